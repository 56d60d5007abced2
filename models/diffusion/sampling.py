"""Samplers: from noise to pictures along some of the noise levels.

All are functions of an estimate D of the clean picture. The step from level t to the less noisy level s is, with
r = SNR_t / SNR_s and the noise e = (x - alpha_t D) / sigma_t that D leaves in x,

    x_s = alpha_s D + sqrt(sigma_s^2 - c^2) e + d z,    z standard normal,

where c = d = eta sigma_s sqrt(1 - r) is DDIM (Song et al. 2021, eq. 12 and 16). With eta = 1 that is the posterior of
DDPM, whose d may be larger (Ho et al. 2020, section 3.2). DPM-Solver++ replaces D by an extrapolation. The last step
ends at the clean picture: s has alpha 1, sigma 0 and infinite SNR, so that x_s = D. Coefficients are Python's floats,
and nothing waits for the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .guidance import Denoise, Denoised
from .schedule import Schedule

SAMPLERS = ("ddpm", "ddim", "dpmpp_2m", "heun")
SPACINGS = ("auto", "uniform", "karras")
# With a smaller log SNR at a twentieth of the levels, these samplers lose less with "karras": see `best_spacing`.
_LEAST_FOR_UNIFORM = {"dpmpp_2m": 4.2, "ddim": 2.8, "heun": 2.8}

Draw = Callable[[str, int], Tensor]
"""(name of the noise, number of the step) -> standard normal noise like x, from keys of the pictures alone."""


class Level(NamedTuple):
    """One noise level. The clean picture is a level without a number."""

    number: int | None
    alpha: float
    sigma: float
    log_snr: float


CLEAN = Level(None, 1.0, 0.0, math.inf)

# Below, sigma / alpha is above 100 or infinite, and there is no picture to see. Karras et al. start at 80.
_LEAST_LOG_SNR = math.log(1e-4)


@dataclass(frozen=True)
class Inpaint:
    """Parts of pictures that are kept (RePaint, Lugmayr et al. 2022).

    image: (b, c, h, w) in the range of the network's pictures; mask: bool, (b, h, w) or (b, 1, h, w), True keeps;
    resample_times: how often each step is made, with noise added again in between (Alg. 1's U), so that the new parts
    fit the kept ones.
    """

    image: Tensor
    mask: Tensor
    resample_times: int = 5

    def __post_init__(self) -> None:
        b, _, *size = self.image.shape
        if self.mask.dtype != torch.bool or tuple(self.mask.shape) not in ((b, *size), (b, 1, *size)):
            raise ValueError(
                f"a mask of {self.mask.dtype} {tuple(self.mask.shape)} does not fit pictures "
                f"{tuple(self.image.shape)}: it has to be bool, {(b, *size)} or {(b, 1, *size)}, True where they stay"
            )
        if self.resample_times < 1:
            raise ValueError(f"resample_times {self.resample_times} is below 1")

    def keep(self, x: Tensor, level: Level, draw: Draw, count: int) -> Tensor:
        """x with the kept parts as the image has them at this level."""
        known = self.image.to(x)
        if level.sigma:
            known = level.alpha * known + level.sigma * draw("kept", count)
        return torch.where(self.mask.view(len(x), 1, *x.shape[2:]), known, x)


def sampling_levels(schedule: Schedule, steps: int, *, spacing: str = "uniform") -> list[Level]:
    """The levels that sampling visits, from the noisiest, T - 1, at which a network trained to SNR 0 has to start (Lin
    et al. 2023, 3.3), to level 0, and then the clean picture.

    Args:
        steps: Number of levels without the clean one.
        spacing: "uniform" in the index; or "karras": sigma / alpha to the power 1/7 is uniform as far as there are such
            levels (Karras et al. 2022, eq. 5), after the first level if its SNR is below 1e-4. Where levels lie so far
            apart that one is the nearest of several steps, the others of these take the levels beside it.

    Raises:
        ValueError: more steps than levels, or no step.
    """
    assert spacing in ("uniform", "karras"), spacing
    count = schedule.timesteps
    if not 1 <= steps <= count:
        raise ValueError(f"{steps} sampling steps cannot visit {count} noise levels: choose 1 to {count} steps")
    log_snr = schedule.log_snr.cpu()
    indices = torch.linspace(count - 1, 0, steps, dtype=torch.float64).round().long().tolist()
    if spacing == "karras":
        before = [count - 1] if steps > 1 and log_snr[-1] < _LEAST_LOG_SNR else []
        root = (-(log_snr[log_snr >= _LEAST_LOG_SNR] if before else log_snr) / 14).exp()  # (sigma / alpha)^(1/7)
        rest = steps - len(before)
        wanted = torch.linspace(root[-1].item(), root[0].item(), rest, dtype=torch.float64).flip(0)
        nearest = (wanted.log()[:, None] - root.log()).abs().argmin(1)
        place = torch.arange(rest)  # from the clean end; each level's number is at least one above that before it
        numbers = place + (nearest - place).cummax(0).values.clamp_max(max(len(root) - rest, 0))
        indices = [*before, *numbers.flip(0).tolist()]
    tables = (schedule.alpha.tolist(), schedule.sigma.tolist(), log_snr.tolist())
    return [Level(index, *(table[index] for table in tables)) for index in indices] + [CLEAN]


def best_spacing(schedule: Schedule, sampler: str) -> str:
    """The spacing with which pictures of little contrast keep it in 20 steps: "karras" where the last of uniform steps
    would begin in too much noise.

    Of pictures of normal pixels with a deviation of 0.25, dpmpp_2m with uniform steps draws 0.225 on "linear" and 0.211
    on "jsd", whose low noise levels lie close together, and 0.256 and 0.250 with "karras". On the other schedules it
    draws 0.244 to 0.251 with uniform steps, and ddim and heun are better with these for deviations of 0.5 and more. If
    "cosine" is shifted for pictures of four times the side, it is 0.177, 0.151 and 0.300 with uniform steps, and 0.252,
    0.212 and 0.262 with "karras" (dpmpp_2m, ddim, heun).
    """
    least = _LEAST_FOR_UNIFORM.get(sampler)
    is_noisy = least is not None and schedule.log_snr[schedule.timesteps // 20].item() < least
    return "karras" if is_noisy else "uniform"


def dynamic_threshold(x_start: Tensor, percentile: float) -> Tensor:
    """Divide each picture by the percentile, in (0, 1], of its absolute values if that is above 1, and clamp to
    [-1, 1] (Saharia et al. 2022, section 2.3)."""
    values = x_start.abs().flatten(1).sort(dim=1).values
    place = percentile * (values.shape[1] - 1)
    low, high = values[:, math.floor(place)], values[:, math.ceil(place)]
    limit = torch.lerp(low, high, place - math.floor(place)).clamp_min(1).view(-1, *[1] * (x_start.ndim - 1))
    return (x_start / limit).clamp(-1, 1)


def add_noise_again(x: Tensor, now: Level, noisier: Level, noise: Tensor) -> Tensor:
    """From a level to a noisier one, by the forward process: x of the marginal q of one level has that of the other."""
    variance = -(noisier.sigma**2) * math.expm1(noisier.log_snr - now.log_snr)
    return noisier.alpha / now.alpha * x + math.sqrt(variance) * noise


class _Solver:
    """The steps of one call of `sample`, and the estimates that they remember."""

    def __init__(self, estimate: Callable[[Tensor, int, Tensor | None], Denoised], sampler: str, eta: float) -> None:
        self._estimate, self._sampler = estimate, sampler
        self._eta = 1.0 if sampler == "ddpm" else eta
        self.x_start: Tensor | None = None  # the last estimate, for a network that sees its own
        self._before: tuple[Tensor, float] | None = None  # the one before, and the step after it in half log SNR

    def forget_slope(self) -> None:
        """The next step continues no path: it is of first order."""
        self._before = None

    def step(self, x: Tensor, now: Level, then: Level, draw: Draw, count: int) -> Tensor:
        assert now.number is not None
        out = self._estimate(x, now.number, self.x_start)
        self.x_start = target = out.x_start
        if self._sampler == "dpmpp_2m":
            target = self._extrapolated(target, now, then)
        noise = (x - now.alpha * target) / now.sigma
        if self._sampler == "heun" and then.number is not None and now.log_snr >= _LEAST_LOG_SNR:
            return self._corrected(then.alpha * target + then.sigma * noise, noise, now, then)
        if not self._eta or then.number is None:
            return then.alpha * target + then.sigma * noise
        renewed = -(self._eta**2) * math.expm1(now.log_snr - then.log_snr)  # c^2 / sigma_s^2
        x = then.alpha * target + then.sigma * math.sqrt(1 - renewed) * noise
        deviation: float | Tensor = then.sigma * math.sqrt(renewed)
        if self._sampler == "ddpm" and out.variance_fraction is not None:
            deviation = deviation * (now.sigma / then.sigma) ** out.variance_fraction  # beta / b~ is that ratio squared
        return x + deviation * draw("step", count)

    def _extrapolated(self, x_start: Tensor, now: Level, then: Level) -> Tensor:
        """D of DPM-Solver++(2M), Lu et al. 2022, Alg. 2; first order at the first and the last step and after SNR 0.

        A step that is longer than the one before it counts as no longer. Towards level 0 the steps grow, by a factor of
        4 on the cosine schedule in 20 steps, where estimates hardly change any more: the line would overshoot."""
        length = (then.log_snr - now.log_snr) / 2
        before, self._before = self._before, (x_start, length)
        if before is None or math.isinf(length) or math.isinf(before[1]):
            return x_start
        return x_start + min(length / before[1], 1.0) / 2 * (x_start - before[0])

    def _corrected(self, guess: Tensor, noise: Tensor, now: Level, then: Level) -> Tensor:
        """Heun's second evaluation, Karras et al. 2022, Alg. 1. There x / alpha changes by (change of sigma / alpha)
        times the noise, here times the mean of the noise at both ends; the rest is already in the guess. There is no
        correction where sigma / alpha is above 100: the change is as large, and would magnify errors of estimates."""
        assert then.number is not None
        self.x_start = self._estimate(guess, then.number, self.x_start).x_start
        at_end = (guess - then.alpha * self.x_start) / then.sigma
        change = then.sigma - then.alpha * now.sigma / now.alpha
        return guess + change * (at_end - noise) / 2


@torch.no_grad()
def sample(
    denoise: Denoise,
    schedule: Schedule,
    x: Tensor,
    *,
    draw: Draw,
    sampler: str = "dpmpp_2m",
    steps: int = 20,
    spacing: str = "auto",
    eta: float = 0.0,
    threshold: Callable[[Tensor], Tensor] | None = None,
    inpaint: Inpaint | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Clean pictures (b, c, h, w) from noise. No row depends on another one.

    Args:
        denoise: Estimates clean pictures: `guided`. It runs once a step; with "heun" twice, except for the last step.
        x: Standard normal noise (b, c, h, w).
        draw: Further noise, for ddpm, ddim with eta, and inpainting.
        sampler: One of SAMPLERS.
        steps, spacing: As in `sampling_levels`. "auto": see `best_spacing`.
        eta: In [0, 1]: noise of ddim, 0 for none.
        threshold: Limits each estimate, such as `dynamic_threshold` or a clamp to [-1, 1].
        inpaint: What to keep of given pictures.
        on_step: Called with the number of steps made and that of all.

    Raises:
        ValueError: an unknown sampler or spacing, eta for another one than ddim, or as in `sampling_levels`.
    """
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler {sampler!r} does not exist: choose one of {', '.join(SAMPLERS)}")
    if spacing not in SPACINGS:
        raise ValueError(f"spacing {spacing!r} does not exist: choose one of {', '.join(SPACINGS)}")
    if not 0 <= eta <= (sampler == "ddim"):
        raise ValueError(f"eta {eta:g} does not fit sampler {sampler}: it is in 0 to 1 for ddim, 0 for the others")

    def estimate(x: Tensor, t: int, previous: Tensor | None) -> Denoised:
        out = denoise(x, t, previous)
        return out if threshold is None else out._replace(x_start=threshold(out.x_start))

    solver = _Solver(estimate, sampler, eta)
    spacing = best_spacing(schedule, sampler) if spacing == "auto" else spacing
    levels = sampling_levels(schedule, steps, spacing=spacing)
    count = 0
    if inpaint:
        x = inpaint.keep(x, levels[0], draw, count)
    for done, (now, then) in enumerate(itertools.pairwise(levels), start=1):
        again = inpaint.resample_times - 1 if inpaint and then.number is not None else 0
        for left in range(again, -1, -1):
            count += 1
            x = solver.step(x, now, then, draw, count)
            if inpaint:
                x = inpaint.keep(x, then, draw, count)
            if left:
                x = add_noise_again(x, then, now, draw("again", count))
                solver.forget_slope()
        if on_step:
            on_step(done, len(levels) - 1)
    return x
