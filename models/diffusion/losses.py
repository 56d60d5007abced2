"""The loss of a network that denoises, of each picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .objectives import LOSS_TYPES, check_combination, loss_weights, target_of, x_start_of
from .schedule import Schedule
from .variance import LearnedVariance, fraction_of


class Losses(NamedTuple):
    """Of each picture, (b,): the weighted error to train on; the error of the prediction without any weight; and the
    bits of the drawn level in the variational bound of a learned variance, 0 without one."""

    weighted: Tensor
    error: Tensor
    bits: Tensor


class DiffusionLoss:
    """Loss of the predictions at random noise levels. All random numbers are arguments of the call.

    Args:
        schedule: On the device of the pictures.
        objective: One of OBJECTIVES.
        loss_type: One of LOSS_TYPES, of the prediction.
        weight: One of LOSS_WEIGHTS. With "learned" the network is a `WithLearnedWeight`.
        learned_variance: The network has twice the channels, the second half for the variance (`LearnedVariance`).
        lowres_schedule: Of the noise on the low-resolution pictures.
        weights: Options of `loss_weights`.

    Raises:
        ValueError: what `check_combination` refuses, or an unknown type of loss.
    """

    def __init__(
        self,
        schedule: Schedule,
        objective: str = "v",
        *,
        loss_type: str = "l2",
        weight: str = "none",
        learned_variance: bool = False,
        lowres_schedule: Schedule | None = None,
        **weights: float,
    ) -> None:
        check_combination(schedule, objective, weight)
        if loss_type not in LOSS_TYPES:
            raise ValueError(f"loss type {loss_type!r} does not exist: choose one of {', '.join(LOSS_TYPES)}")
        self.schedule, self.objective = schedule, objective
        self._distance = LOSS_TYPES[loss_type]
        self._weight_is_learned = weight == "learned"
        self._weights = loss_weights(weight, schedule, objective, **weights)
        self._variance = LearnedVariance(schedule) if learned_variance else None
        self._lowres_schedule = lowres_schedule

    def __call__(
        self,
        network: Callable[..., Any],
        x0: Tensor,
        conditions: Mapping[str, Tensor],
        *,
        times: Tensor,
        noise: Tensor,
        self_cond: Tensor | None = None,
        keep_image: Tensor | None = None,
        keep_text: Tensor | None = None,
        lowres_time: Tensor | None = None,
        lowres_noise: Tensor | None = None,
    ) -> Losses:
        """Losses of pictures x0 (b, c, h, w) in [-1, 1].

        Args:
            network: Called as network(x, times, **conditions) with x in at least fp32 and int64 times, as numbers of
                low precision cannot tell neighbouring levels apart.
            conditions: Of each picture, as the network takes them.
            times: int64 levels (b,).
            noise: Standard normal, like x0.
            self_cond: bool (b,): which pictures see the network's own estimate of x0, from a first call without
                gradient (Chen et al. 2023, Alg. 1). That call is for all pictures, whatever the draws, so that all
                processes make the same calls. Without it there is none.
            keep_image, keep_text: bool (b,), False drops the condition.
            lowres_time, lowres_noise: int64 levels (b,) of the noise, like the image, that is added to "lowres_image".
                DALLE2-pytorch: of "linear" with 1000 levels, of which sampling uses number 200.
        """
        x = self.schedule.add_noise(x0, noise, times)
        alpha, sigma = self.schedule.at(times, x)
        given = dict(conditions)
        given |= {n: keep for n, keep in (("keep_image", keep_image), ("keep_text", keep_text)) if keep is not None}
        if lowres_time is not None:
            assert self._lowres_schedule is not None and lowres_noise is not None
            given["lowres_image"] = self._lowres_schedule.add_noise(given["lowres_image"], lowres_noise, lowres_time)
            given["lowres_time"] = lowres_time
        if self_cond is not None:
            with torch.no_grad():
                prediction, _, _ = self._split(network(x, times, **given), x)
                # As in sampling: the estimate of the clean picture, in the range of pictures.
                estimate = x_start_of(self.objective, prediction, x, alpha, sigma).clamp(-1, 1)
            given["self_cond"] = torch.where(self_cond.view(-1, 1, 1, 1), estimate, 0.0)
        prediction, variance, log_weight = self._split(network(x, times, **given), x)
        target = target_of(self.objective, x0, noise, alpha, sigma).to(x)
        error = self._distance(prediction, target, reduction="none").flatten(1).mean(1)
        weighted = error * self._weights[times].to(error.dtype)
        if log_weight is not None:
            weighted = weighted / log_weight.exp() + log_weight
        bits = torch.zeros_like(error)
        if self._variance is not None:
            x_start = x_start_of(self.objective, prediction, x, alpha, sigma)
            bits = self._variance.bits(x0.to(x), x_start, fraction_of(variance), times)
        return Losses(weighted, error, bits)

    def _split(self, output: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The network's output -> prediction, channels of the variance (none without), learned weight if any."""
        output, log_weight = output if self._weight_is_learned else (output, None)
        channels = x.shape[1]
        assert output.shape[1] == channels * (1 if self._variance is None else 2), "channels_out of the network"
        output = output.to(x)
        return output[:, :channels], output[:, channels:], log_weight
