"""Targets of a denoising network's predictions, weights of the noise levels, and the loss of each picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.config.models.decoder import OBJECTIVES

from .schedule import Schedule
from .variance import LearnedVariance, variance_fraction

LOSS_WEIGHTS = ("none", "min_snr", "p2")


def prediction_target(objective: str, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """The target of the network for x = alpha x0 + sigma noise; shapes broadcast. v = alpha noise - sigma x0 (Salimans
    and Ho 2022, section 4); the flow's velocity dx / dsigma = noise - x0 (Lipman et al. 2023)."""
    if objective == "noise":
        return noise
    if objective == "x_start":
        return x0
    return alpha * noise - sigma * x0 if objective == "v" else noise - x0


def coefficients(objective: str, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """a and b of x0 = a x + b p: the clean picture x0 is a linear combination of the noisy picture x and the prediction
    p (Salimans and Ho 2022, appendix D, for noise, x0 and v; Lipman et al. 2023 for flow).

    The preconditioning of Karras et al. 2022 for data of standard deviation 1 equals "v" with the weight 1, except for
    the sign: its sigma is sigma / alpha here, its noisy picture x / alpha, the input of its network x, the output -v;
    its loss weight cancels the factor of the output.
    """
    if objective == "noise":
        return 1 / alpha, -sigma / alpha
    if objective == "x_start":
        return torch.zeros_like(alpha), torch.ones_like(alpha)
    return (alpha, -sigma) if objective == "v" else (torch.ones_like(alpha), -sigma)


def predict_x_start(objective: str, prediction: Tensor, x: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """The clean picture x0 that follows from a prediction and the noisy picture x."""
    a, b = coefficients(objective, alpha, sigma)
    return a * x + b * prediction


def loss_weights(
    name: str, schedule: Schedule, objective: str, *, min_snr_gamma: float = 5.0, p2_gamma: float = 1.0,
    p2_k: float = 1.0,
) -> Tensor:  # fmt: skip
    """Weight of each level's squared error of the prediction, fp64 (T,).

    Except for "none", the formulas below weight the squared error of x0, so that an estimate of x0 has the same loss
    with every objective. An error e of the prediction is an error b e of x0 (`coefficients`), so the weight of the
    squared error of the prediction is b^2 times that of x0.

    - none: 1 for the prediction.
    - min_snr: min(SNR, gamma) (Hang et al. 2023, eq. 8).
    - p2: SNR / (k + SNR)^gamma (Choi et al. 2022, eq. 8, which divides the loss of the noise by (k + SNR)^gamma).

    The weights of the last two are 0 at SNR 0. The network still learns a last level of SNR 0, from the levels beside
    it: in a measurement its error at that level was equal to its error at the level before, whether the weight was 0 or
    small.
    """
    if name == "none":
        return torch.ones_like(schedule.log_snr)
    snr = schedule.log_snr.exp()
    x0_weights = snr.clamp_max(min_snr_gamma) if name == "min_snr" else snr / (p2_k + snr) ** p2_gamma
    return x0_weights * coefficients(objective, schedule.alpha, schedule.sigma)[1] ** 2


def check_combination(schedule: Schedule, objective: str, weight: str) -> None:
    """Refuse combinations that cannot be trained or sampled.

    Raises:
        ValueError: an unknown name; noise predicted where no picture is left; "flow" without a flow schedule; or noise
            or v with one.
    """
    for name, value, choices in (("objective", objective, OBJECTIVES), ("loss weight", weight, LOSS_WEIGHTS)):
        if value not in choices:
            raise ValueError(f"{name} {value!r} does not exist: choose one of {', '.join(choices)}")
    if schedule.is_flow and objective in ("noise", "v"):
        raise ValueError(f"objective {objective} does not fit the flow schedule: choose objective flow or x_start")
    if objective == "flow" and not schedule.is_flow:
        raise ValueError("objective flow needs the schedule flow, where x = (1 - t) x0 + t noise")
    if objective == "noise" and schedule.ends_at_zero_snr:
        raise ValueError(
            "objective noise says nothing about the picture at the last noise level, whose SNR is 0: "
            "choose objective v or x_start, or a schedule that does not end at SNR 0"
        )


class DiffusionLossOutput(NamedTuple):
    """Losses of each picture, (b,) each."""

    weighted: Tensor  # the weighted squared error, which is trained on
    error: Tensor  # the mean squared error of the prediction
    bits: Tensor  # the term of the variational bound at the picture's level; 0 without a learned variance


class DiffusionLoss:
    """Squared error of the predictions at random noise levels. All random numbers are arguments of the call.

    Args:
        schedule: On the device of the pictures.
        objective: One of OBJECTIVES.
        weight: One of LOSS_WEIGHTS.
        learned_variance: The network has twice the channels, the second half for the variance (`LearnedVariance`).
        lowres_schedule: Schedule of the noise on the low-resolution pictures.
        weight_options: Options of `loss_weights`.

    Raises:
        ValueError: what `check_combination` refuses.
    """

    def __init__(
        self, schedule: Schedule, objective: str = "v", *, weight: str = "none", learned_variance: bool = False,
        lowres_schedule: Schedule | None = None, **weight_options: float,
    ) -> None:  # fmt: skip
        check_combination(schedule, objective, weight)
        self.schedule, self.objective = schedule, objective
        self._weights = loss_weights(weight, schedule, objective, **weight_options)
        self._variance = LearnedVariance(schedule) if learned_variance else None
        self._lowres_schedule = lowres_schedule

    def __call__(
        self, network: Callable[..., Tensor], x0: Tensor, conditions: Mapping[str, Tensor], *, times: Tensor,
        noise: Tensor, lowres_time: Tensor | None = None, lowres_noise: Tensor | None = None, **keep_masks: Tensor,
    ) -> DiffusionLossOutput:  # fmt: skip
        """Losses of pictures x0 (b, c, h, w) in [-1, 1].

        Args:
            network: Called as network(x, times, **conditions) with x in at least fp32 and int64 times, as numbers of
                low precision cannot tell neighbouring levels apart.
            conditions: (b, ...), by the names of the network's arguments.
            times: int64 levels (b,).
            noise: Standard normal, like x0.
            lowres_time, lowres_noise: int64 levels (b,), and standard normal noise, which is added to "lowres_image".
                `Decoder`, like DALLE2-pytorch, takes these levels from the schedule "linear" of 1000 levels.
            keep_masks: "keep_image" and "keep_text", bool (b,); False drops the condition.
        """
        x = self.schedule.add_noise(x0, noise, times)
        alpha, sigma = self.schedule.at(times, x)
        inputs = {**conditions, **keep_masks}
        if lowres_time is not None:
            assert self._lowres_schedule is not None and lowres_noise is not None
            inputs["lowres_image"] = self._lowres_schedule.add_noise(inputs["lowres_image"], lowres_noise, lowres_time)
            inputs["lowres_time"] = lowres_time
        output, channels = network(x, times, **inputs).to(x), x.shape[1]
        assert output.shape[1] == channels * (1 if self._variance is None else 2), "channels of the network"
        prediction = output[:, :channels]
        target = prediction_target(self.objective, x0, noise, alpha, sigma).to(x)
        error = (prediction - target).square().flatten(1).mean(1)
        bits = torch.zeros_like(error)
        if self._variance is not None:
            x_start = predict_x_start(self.objective, prediction, x, alpha, sigma)
            bits = self._variance.bits(x0.to(x), x_start, variance_fraction(output[:, channels:]), times)
        return DiffusionLossOutput(error * self._weights[times].to(error.dtype), error, bits)
