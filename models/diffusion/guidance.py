"""Estimates of the clean picture that follow a condition more closely than the network does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .objectives import x_start_of
from .schedule import Schedule
from .variance import fraction_of


class Denoised(NamedTuple):
    """Estimate of the clean pictures, and the fraction of the learned variance if there is one; (b, c, h, w) each."""

    x_start: Tensor
    variance_fraction: Tensor | None = None


Denoise = Callable[[Tensor, int, Tensor | None], Denoised]
"""(noisy pictures (b, c, h, w), their level, the previous estimate if any) -> estimate."""

Passes = Callable[[Tensor, int, Tensor | None, tuple[bool, ...]], Denoised]
"""As `Denoise`, for one or two blocks of b rows; the last argument says which blocks keep their condition."""

COND, NULL, BOTH = (True,), (False,), (True, False)


def denoiser(
    predict: Callable[[Tensor, Tensor, Tensor | None, tuple[bool, ...]], Tensor], schedule: Schedule, objective: str
) -> Passes:
    """Turn predictions of a network into estimates of clean pictures.

    Args:
        predict: (x (b, c, h, w), int64 levels (b,), previous estimate in [-1, 1] or None, blocks as in `Passes`) ->
            predictions (b, c, h, w), or (b, 2 c, h, w) with the channels of a learned variance behind them.
    """

    def estimate(x: Tensor, t: int, previous: Tensor | None, blocks: tuple[bool, ...]) -> Denoised:
        levels = torch.full((len(x),), t, device=x.device)
        output = predict(x, levels, None if previous is None else previous.clamp(-1, 1), blocks)
        prediction, variance = output[:, : x.shape[1]], output[:, x.shape[1] :]
        alpha, sigma = schedule.at(levels, x)
        x_start = x_start_of(objective, prediction, x, alpha, sigma)
        return Denoised(x_start, fraction_of(variance) if variance.shape[1] else None)

    return estimate


def guided(
    passes: Passes,
    schedule: Schedule,
    *,
    scale: float = 1.0,
    interval: Sequence[float] | None = None,
    guide: Passes | None = None,
    rescale: float = 0.0,
    is_conditional: bool = True,
) -> Denoise:
    """Guidance: reference + scale (conditional - reference), of estimates of the clean picture.

    The reference is the estimate without condition, in the same call as the conditional one (Ho and Salimans 2022), or
    the conditional estimate of `guide`, a worse network (autoguidance, Karras et al. 2024b). With scale 1, and outside
    the interval, there is one pass of b rows, the conditional one. The learned variance is the conditional one.

    Args:
        passes: The network.
        scale: 0 gives the reference.
        interval: (LO, HI]: noise levels sigma / alpha at which the scale holds; elsewhere it is 1 (Kynkaanniemi et al.
            2024, section 3).
        rescale: In [0, 1], how far the standard deviation of each guided estimate returns to that of the conditional
            one (Lin et al. 2023, section 3.4, where it is of v; of x0 the result does not depend on the objective).
        is_conditional: Whether the network has a condition. Without one there is nothing to drop: one pass of b rows.

    Raises:
        ValueError: an interval that is empty, or a rescale outside [0, 1].
    """
    low, high = interval or (-1.0, float("inf"))
    if not low < high:
        raise ValueError(f"guidance interval ({low:g}, {high:g}] is empty: the first number has to be the smaller one")
    if not 0 <= rescale <= 1:
        raise ValueError(f"guidance rescale {rescale:g} is not in 0 to 1")
    noise_levels = (-schedule.log_snr / 2).exp().tolist()

    def denoise(x: Tensor, t: int, previous: Tensor | None) -> Denoised:
        if scale == 1 or not low < noise_levels[t] <= high or not (is_conditional or guide):
            return passes(x, t, previous, COND)
        if scale == 0 and guide is None:
            return passes(x, t, previous, NULL)
        if guide is not None:
            wanted, fraction = passes(x, t, previous, COND)
            reference = guide(x, t, previous, COND).x_start
        else:
            twice = None if previous is None else torch.cat([previous, previous])
            both, fraction = passes(torch.cat([x, x]), t, twice, BOTH)
            wanted, reference = both.chunk(2)
            fraction = None if fraction is None else fraction[: len(x)]
        x_start = reference + scale * (wanted - reference)
        if rescale:
            tiny = torch.finfo(x_start.dtype).tiny
            ratio = _deviation(wanted) / _deviation(x_start).clamp_min(tiny)
            x_start = x_start * (rescale * ratio + 1 - rescale)
        return Denoised(x_start, fraction)

    return denoise


def _deviation(pictures: Tensor) -> Tensor:
    """Standard deviation of each picture, (b, 1, 1, 1)."""
    return pictures.std(dim=tuple(range(1, pictures.ndim)), keepdim=True)
