"""Samplers: from noise to pictures along some of the noise levels.

All are functions of the network's estimate D of the clean picture. The step from level t to the less noisy level s
is, with r = SNR_t / SNR_s and the noise e = (x - alpha_t D) / sigma_t that D leaves in x,

    x_s = alpha_s D + sqrt(sigma_s^2 - c^2) e + d z,    z standard normal,

where c = d = eta sigma_s sqrt(1 - r) is DDIM (Song et al. 2021, eq. 12 and 16). With eta = 1 that is the posterior of
DDPM, whose d may be larger (Ho et al. 2020, section 3.2). DPM-Solver++ replaces D by an extrapolation. The last step
ends at the clean picture: s has alpha 1, sigma 0 and infinite SNR, so that x_s = D. Coefficients are Python's floats,
and nothing waits for the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .schedule import Schedule

# These samplers use Karras' levels on a schedule whose log SNR at level T / 20 is smaller than this: see
# `sampling_levels`.
_MIN_LOG_SNR_FOR_UNIFORM = {"dpmpp_2m": 4.2, "ddim": 2.8}
# The uniform steps of `_karras_levels` visit no level of a smaller log SNR. At this one sigma / alpha is 100; Karras et
# al. start at 80. Noisier levels show nothing of a picture.
_MIN_LOG_SNR = math.log(1e-4)


class Denoised(NamedTuple):
    """Estimate of the clean pictures, and the fraction of the learned variance if there is one; (b, c, h, w) each."""

    x_start: Tensor
    variance_fraction: Tensor | None = None


Denoise = Callable[[Tensor, int], Denoised]
"""(noisy pictures (b, c, h, w), their level) -> estimate."""

Draw = Callable[[str, int], Tensor]
"""(name of the noise, number of the step) -> standard normal noise like x, from keys of the pictures alone."""


class Level(NamedTuple):
    """One noise level. The clean picture is the level whose number is None."""

    number: int | None
    alpha: float
    sigma: float
    log_snr: float


CLEAN = Level(None, 1.0, 0.0, math.inf)


def apply_guidance(
    denoise: Denoise, reference: Denoise, schedule: Schedule, scale: float, interval: Sequence[float] | None = None
) -> Denoise:
    """Guidance: reference + scale (denoise - reference), for estimates of the clean picture. The noises, which are
    linear in the estimates, are mixed alike. The scale is 1 + w of Ho and Salimans 2022, eq. 6.

    Args:
        reference: The network without its condition (Ho and Salimans 2022), or a worse network with it (Karras et al.
            2024, "Guiding a diffusion model with a bad version of itself").
        interval: (LO, HI]: noise levels sigma / alpha at which the scale holds; elsewhere it is 1 (Kynkaanniemi et al.
            2024, section 3).
    """
    low, high = interval or (-1.0, math.inf)
    noise_levels = (-schedule.log_snr / 2).exp().tolist()

    def denoise_guided(x: Tensor, t: int) -> Denoised:
        estimate = denoise(x, t)
        if not low < noise_levels[t] <= high:
            return estimate
        reference_estimate = reference(x, t).x_start
        return estimate._replace(x_start=reference_estimate + scale * (estimate.x_start - reference_estimate))

    return denoise_guided


class Step(NamedTuple):
    """Inputs of a sampler for the step from `level` to the less noisy `next_level`."""

    x: Tensor
    """(b, c, h, w), the noisy pictures at `level`."""
    estimate: Denoised
    level: Level
    next_level: Level
    eta: float
    """The eta of `sample`."""
    previous: tuple[Tensor, float] | None
    """x_start of the previous step, and the length of that step in half log SNR; None at the first step and after noise
    was added again."""
    draw: Callable[[], Tensor]
    """Draws fresh noise."""


def ddim(step: Step) -> Tensor:
    """Song et al. 2021, eq. 12 and 16."""
    return _step_towards(step.estimate.x_start, step, step.eta)


def ddpm(step: Step) -> Tensor:
    """Ho et al. 2020, Alg. 2, with the learned variance of Nichol and Dhariwal 2021, eq. 15, if there is one."""
    x_start, fraction = step.estimate
    if fraction is None or step.next_level.number is None:
        return _step_towards(x_start, step, 1.0)
    noise_factor = (step.level.sigma / step.next_level.sigma) ** fraction  # its square: (beta / b~)^f
    return _step_towards(x_start, step, 1.0, noise_factor)


def dpmpp_2m(step: Step) -> Tensor:
    """DPM-Solver++(2M), Lu et al. 2022, Alg. 2: D + (D - D_previous) / (2 r), where r is the length of the previous
    step over that of this step, in half log SNR; first order at the first and the last step and after SNR 0.

    1 / r is at most 1. Towards level 0, where estimates hardly change any more, the steps grow by a factor of up to 4
    (the cosine schedule in 20 steps), and the extrapolation would overshoot."""
    x_start, length = step.estimate.x_start, _step_length(step.level, step.next_level)
    if step.previous is not None and not math.isinf(length) and not math.isinf(step.previous[1]):
        x_start = x_start + min(length / step.previous[1], 1.0) / 2 * (x_start - step.previous[0])
    return _step_towards(x_start, step)


def _step_towards(x_start: Tensor, step: Step, eta: float = 0.0, noise_factor: float | Tensor = 1.0) -> Tensor:
    """x_s of the formula at the top of this file; ``noise_factor`` is d / c."""
    level, next_level = step.level, step.next_level
    noise = (step.x - level.alpha * x_start) / level.sigma
    if not eta or next_level.number is None:
        return next_level.alpha * x_start + next_level.sigma * noise
    fresh_share = -(eta**2) * math.expm1(level.log_snr - next_level.log_snr)  # c^2 / sigma_s^2
    x = next_level.alpha * x_start + next_level.sigma * math.sqrt(1 - fresh_share) * noise
    return x + next_level.sigma * math.sqrt(fresh_share) * noise_factor * step.draw()


SAMPLERS = {"ddpm": ddpm, "ddim": ddim, "dpmpp_2m": dpmpp_2m}


@dataclass(frozen=True)
class Inpaint:
    """Inpainting (RePaint, Lugmayr et al. 2022): ``image`` (b, c, h, w), in the range of the network's pictures, is
    kept where ``mask``, bool (b, 1, h, w), is True. Each step is made ``resample_times`` times (U of Alg. 1), with
    noise added again in between, so that the new parts fit the kept ones."""

    image: Tensor
    mask: Tensor
    resample_times: int = 5

    def paste(self, x: Tensor, level: Level, draw: Draw, noise_step: int) -> Tensor:
        """x with the kept parts of the image, noisy as at this level, by the noise number ``noise_step``."""
        image = self.image.to(x)
        if level.sigma:
            image = level.alpha * image + level.sigma * draw("kept", noise_step)
        return torch.where(self.mask, image, x)


@torch.no_grad()
def sample(
    denoise: Denoise, schedule: Schedule, x: Tensor, *, draw: Draw, sampler: str = "dpmpp_2m", steps: int = 20,
    eta: float = 0.0, threshold: Callable[[Tensor], Tensor] | None = None, inpaint: Inpaint | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> Tensor:  # fmt: skip
    """Clean pictures (b, c, h, w) from noise. No row depends on another one.

    Args:
        denoise: Estimates clean pictures; it runs once a step.
        x: Standard normal noise (b, c, h, w).
        draw: Further noise, for ddpm, ddim with eta, and inpainting.
        sampler: One of SAMPLERS.
        steps: Number of levels that are visited, without the clean picture.
        eta: In [0, 1]: noise of ddim, 0 for none.
        threshold: Limits each estimate.
        inpaint: Pictures, and the parts of them to keep.
        on_step: Called after each step with the number of steps so far and the number of all steps.

    Raises:
        ValueError: an unknown sampler, eta outside of its range, more steps than levels, or no step.
    """
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler {sampler!r} does not exist: choose one of {', '.join(SAMPLERS)}")
    if not 0 <= eta <= 1:
        raise ValueError(f"eta {eta:g} is not in 0 to 1")
    levels, noise_step, previous = sampling_levels(schedule, steps, sampler), 0, None
    if inpaint:
        x = inpaint.paste(x, levels[0], draw, noise_step)
    for step_number, (level, next_level) in enumerate(itertools.pairwise(levels), start=1):
        assert level.number is not None
        num_repeats = inpaint.resample_times - 1 if inpaint and next_level.number is not None else 0
        for remaining in range(num_repeats, -1, -1):
            noise_step += 1
            estimate = denoise(x, level.number)
            if threshold:
                estimate = estimate._replace(x_start=threshold(estimate.x_start))
            step = Step(x, estimate, level, next_level, eta, previous, lambda: draw("step", noise_step))  # noqa: B023
            x = SAMPLERS[sampler](step)
            previous = estimate.x_start, _step_length(level, next_level)
            if inpaint:
                x = inpaint.paste(x, next_level, draw, noise_step)
            if remaining:
                x, previous = add_noise_again(x, next_level, level, draw("again", noise_step)), None
        if on_step:
            on_step(step_number, len(levels) - 1)
    return x


def sampling_levels(schedule: Schedule, steps: int, sampler: str) -> list[Level]:
    """The levels that sampling visits, from the noisiest, T - 1, at which a network trained to SNR 0 has to start (Lin
    et al. 2023, 3.3), to level 0, and then the clean picture.

    Their numbers are uniform, unless the last of 20 uniform steps begins in so much noise that pictures of low contrast
    lose contrast. For normal pixels with a deviation of 0.25, dpmpp_2m with uniform steps gives 0.225 on
    "linear", whose low noise levels lie close together, and 0.256 with Karras' levels. On the other schedules it gives
    0.244 to 0.251 with uniform steps, and ddim is better with uniform steps for deviations of 0.5 and more.

    Args:
        steps: Number of levels without the clean one.

    Raises:
        ValueError: more steps than levels, or no step.
    """
    count = schedule.timesteps
    if not 1 <= steps <= count:
        raise ValueError(f"{steps} sampling steps cannot visit {count} noise levels: choose 1 to {count} steps")
    log_snr = schedule.log_snr.cpu()
    indices = torch.linspace(count - 1, 0, steps, dtype=torch.float64).round().long().tolist()
    if sampler in _MIN_LOG_SNR_FOR_UNIFORM and log_snr[count // 20].item() < _MIN_LOG_SNR_FOR_UNIFORM[sampler]:
        indices = _karras_levels(log_snr, steps)
    tables = (schedule.alpha.tolist(), schedule.sigma.tolist(), log_snr.tolist())
    return [Level(index, *(table[index] for table in tables)) for index in indices] + [CLEAN]


def _karras_levels(log_snr: Tensor, steps: int) -> list[int]:
    """The levels that are nearest to uniform steps of (sigma / alpha)^(1/7) (Karras et al. 2022, eq. 5), the noisiest
    first. If the SNR of level T - 1 is below 1e-4, sampling starts there, and the uniform steps begin at the first
    level of at least that SNR. Where levels lie so far apart that several steps have the same nearest level, these
    steps also take the levels beside it."""
    first_level = [len(log_snr) - 1] if steps > 1 and log_snr[-1] < _MIN_LOG_SNR else []
    root = (-(log_snr[log_snr >= _MIN_LOG_SNR] if first_level else log_snr) / 14).exp()  # (sigma / alpha)^(1/7)
    num_levels = steps - len(first_level)
    targets = torch.linspace(root[-1].item(), root[0].item(), num_levels, dtype=torch.float64).flip(0)
    nearest = (targets.log()[:, None] - root.log()).abs().argmin(1)
    positions = torch.arange(num_levels)  # from the clean end
    # The running maximum makes each level's number at least one larger than the one before it.
    numbers = positions + (nearest - positions).cummax(0).values.clamp_max(max(len(root) - num_levels, 0))
    return [*first_level, *numbers.flip(0).tolist()]


def dynamic_threshold(x_start: Tensor, percentile: float) -> Tensor:
    """Divide each picture by the percentile, in (0, 1], of its absolute values if that is above 1, and clamp to
    [-1, 1] (Saharia et al. 2022, section 2.3). With the percentile 0, only clamp."""
    if not percentile:
        return x_start.clamp(-1, 1)
    values = x_start.abs().flatten(1).sort(dim=1).values
    position = percentile * (values.shape[1] - 1)
    low, high = values[:, math.floor(position)], values[:, math.ceil(position)]
    limit = torch.lerp(low, high, position - math.floor(position)).clamp_min(1).view(-1, *[1] * (x_start.ndim - 1))
    return (x_start / limit).clamp(-1, 1)


def add_noise_again(x: Tensor, level: Level, noisier_level: Level, noise: Tensor) -> Tensor:
    """x with the noise that the forward process adds between `level` and `noisier_level`."""
    variance = -(noisier_level.sigma**2) * math.expm1(noisier_level.log_snr - level.log_snr)
    return noisier_level.alpha / level.alpha * x + math.sqrt(variance) * noise


def _step_length(level: Level, next_level: Level) -> float:
    """The length of a step, in half log SNR."""
    return (next_level.log_snr - level.log_snr) / 2
