"""Samplers with the best network of pictures that are known: their results have closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tandem.config.models.decoder import SCHEDULES
from tandem.models.diffusion.sampling import (
    CLEAN,
    SAMPLERS,
    Denoised,
    Inpaint,
    apply_guidance,
    dynamic_threshold,
    sample,
    sampling_levels,
)
from tandem.models.diffusion.schedule import Schedule
from tandem.models.diffusion.variance import LearnedVariance
from tests.models.diffusion.gaussians import Gaussian, OnePixelEach, no_draw, normal, uniform_levels


def shrunk(schedule: Schedule, deviation: float, sampler: str, steps: int) -> float:
    """What a sampler makes of the noise 1."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    denoise = Gaussian(schedule, deviation).denoise
    return sample(denoise, schedule, one, draw=no_draw, sampler=sampler, steps=steps).item()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("steps", [50, 7])
def test_ddim_is_the_linear_map_that_its_levels_give(name: str, steps: int) -> None:
    schedule, z = Schedule.from_name(name), normal(2, 3, 4, 4)
    pixels = Gaussian(schedule, 0.5, mean=0.3)
    out = sample(pixels.denoise, schedule, z, draw=no_draw, sampler="ddim", steps=steps)
    visited = uniform_levels(999, steps)
    centre = schedule.alpha[visited[0]] * 0.3
    torch.testing.assert_close(out, 0.3 + pixels.shrinking(visited) * (z - centre), rtol=0, atol=1e-12)


def error_of(schedule: Schedule, sampler: str, exact: float) -> float:
    return abs(shrunk(schedule, 0.5, sampler, schedule.timesteps) / exact - 1)


@pytest.mark.parametrize(("sampler", "errors"), [
    ("ddim", (0.139, 0.072, 0.037)), ("dpmpp_2m", (0.0194, 0.0054, 0.0014)),
])  # fmt: skip
def test_errors_fall_with_the_steps_as_the_order_of_a_sampler_says(sampler: str, errors: tuple[float, ...]) -> None:
    for steps, expected in zip((20, 40, 80), errors, strict=True):
        schedule = Schedule(torch.linspace(12, -12, steps + 1, dtype=torch.float64))
        exact = 0.5 / Gaussian(schedule, 0.5).variance[-1].item() ** 0.5
        assert error_of(schedule, sampler, exact) == pytest.approx(expected, rel=0.02)  # the digits given


def spread(pixels: Gaussian, denoise: Callable, **options) -> float:
    """Variance of the samples of N(0, 1) noise, exact: no sample is drawn."""
    source = OnePixelEach(400)
    out = sample(denoise, pixels.schedule, source.first, draw=source, **options)
    assert len(set(source.asked)) == len(source.asked) <= source.draws, "no noise is used twice"
    return out.square().sum().item()


def test_the_variance_of_ddpm_is_that_of_its_recursion() -> None:
    schedule = Schedule.from_name("linear", 20)
    pixels, beta, signal = Gaussian(schedule, 0.5), schedule.betas, schedule.alpha**2
    variance = 1.0
    for t in range(19, 0, -1):
        # Ho et al. 2020, eq. 7, with the estimate gain x in place of x0.
        of_x0 = signal[t - 1].sqrt() * beta[t] / (1 - signal[t])
        of_x = (1 - beta[t]).sqrt() * (1 - signal[t - 1]) / (1 - signal[t])
        small = (1 - signal[t - 1]) / (1 - signal[t]) * beta[t]
        variance = ((of_x0 * pixels.gain[t] + of_x) ** 2 * variance + small).item()
    expected = pixels.gain[0].item() ** 2 * variance
    assert spread(pixels, pixels.denoise, sampler="ddpm", steps=20) == pytest.approx(expected, rel=1e-12)
    eta_1 = spread(pixels, pixels.denoise, sampler="ddim", eta=1.0, steps=20)
    assert eta_1 == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("inpainted", [False, True])
def test_ddpm_with_the_best_learned_variance_draws_from_the_distribution_itself(inpainted: bool) -> None:
    """So it does if noise is added again and again for inpainting: that leads back to the level's own distribution."""
    schedule = Schedule.from_name("linear", 40, zero_terminal_snr=True)
    pixels, variance = Gaussian(schedule, 0.5), LearnedVariance(schedule)
    fraction = (pixels.reverse_variance.log() - variance.log_small) / (variance.log_large - variance.log_small)

    def denoise(x: Tensor, t: int) -> Denoised:
        return Denoised(pixels.estimate(x, t), torch.full_like(x, fraction[t].item()))

    options = {}
    if inpainted:
        size = OnePixelEach(400).first.shape
        options = {"inpaint": Inpaint(torch.zeros(size), torch.zeros(size, dtype=torch.bool), resample_times=3)}
    expected = pixels.gain[0].item() ** 2 * pixels.variance[0].item()  # the last step adds no noise
    assert spread(pixels, denoise, sampler="ddpm", steps=40, **options) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("resample_times", [1, 3])
def test_inpainting_keeps_what_the_mask_says_and_draws_the_rest(sampler: str, resample_times: int) -> None:
    schedule = Schedule.from_name("cosine", zero_terminal_snr=True)
    pixels, image = Gaussian(schedule, 0.5), torch.full((2, 3, 6, 6), 0.25, dtype=torch.float64)
    gap = torch.zeros(2, 6, 6, dtype=torch.bool)
    gap[0, :, [0, 5]] = True
    gap[1, 2:4] = True
    for mask in (torch.ones_like(gap), gap):
        out = sample(
            pixels.denoise, schedule, normal(2, 3, 6, 6), draw=lambda name, step: normal(2, 3, 6, 6, seed=step),
            sampler=sampler, steps=8, inpaint=Inpaint(image, mask[:, None], resample_times),
        )  # fmt: skip
        kept = mask.view(2, 1, 6, 6).expand_as(out)
        assert torch.equal(out[kept], image[kept])
        assert out.isfinite().all() and (out[~kept] != 0.25).all()


def test_at_each_level_the_kept_parts_are_the_image_with_that_levels_noise() -> None:
    schedule = Schedule.from_name("cosine", 100)
    image, seen = torch.full((1, 3, 2, 2), 0.5, dtype=torch.float64), list[tuple[int, float]]()

    def denoise(x: Tensor, t: int) -> Denoised:
        seen.append((t, x.mean().item()))
        return Denoised(x)

    one = torch.ones_like(image)
    inpaint = Inpaint(image, torch.ones(1, 1, 2, 2, dtype=torch.bool), 1)
    sample(denoise, schedule, 9 * one, draw=lambda name, step: one, sampler="ddim", steps=5, inpaint=inpaint)
    for t, mean in seen:
        assert mean == pytest.approx((0.5 * schedule.alpha[t] + schedule.sigma[t]).item(), rel=1e-12)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_sampling_visits_the_last_level_first_and_each_level_once(sampler: str) -> None:
    schedule, seen, told = Schedule.from_name("cosine"), list[int](), list[tuple[int, int]]()

    def denoise(x: Tensor, t: int) -> Denoised:
        seen.append(t)
        return Denoised(torch.full_like(x, t))

    z = normal(1, 1, 2, 2)
    out = sample(
        denoise, schedule, z, draw=lambda *_: z, sampler=sampler, steps=5, on_step=lambda *step: told.append(step)
    )
    levels = [999, 749, 500, 250, 0]  # round(999 - 249.75 n)
    assert seen == levels
    assert (out == 0).all(), "the last estimate is the result"
    assert told == [(n, 5) for n in range(1, 6)]


def test_repainting_runs_the_network_as_often_as_it_says() -> None:
    schedule, calls = Schedule.from_name("cosine", 50), list[int]()
    z = normal(1, 1, 2, 2)

    def denoise(x: Tensor, t: int) -> Denoised:
        calls.append(t)
        return Denoised(x)

    inpaint = Inpaint(z, torch.zeros(1, 1, 2, 2, dtype=torch.bool), 3)
    sample(denoise, schedule, z, draw=lambda *_: z, sampler="dpmpp_2m", steps=4, inpaint=inpaint)
    assert calls == [49] * 3 + [33] * 3 + [16] * 3 + [0]  # the last step ends clean: no noise comes again


def test_after_noise_was_added_again_dpmpp_has_no_slope_to_continue() -> None:
    schedule, z = Schedule.from_name("cosine", 50), normal(1, 1, 2, 2)
    inpaint = Inpaint(z, torch.zeros(1, 1, 2, 2, dtype=torch.bool), 2)
    seen: dict[str, list[Tensor]] = {"ddim": [], "dpmpp_2m": []}
    for sampler, inputs in seen.items():

        def denoise(x: Tensor, t: int, inputs: list[Tensor] = inputs) -> Denoised:
            inputs.append(x)
            return Denoised(torch.full_like(x, len(inputs)))

        sample(denoise, schedule, z, draw=lambda *_: z, sampler=sampler, steps=3, inpaint=inpaint)
    # Levels 49, 49, 24, 24, 0: only the first step from 24 continues the one before it.
    assert [torch.equal(*inputs) for inputs in zip(*seen.values(), strict=True)] == [True, True, True, False, False]


@pytest.mark.parametrize(("name", "zero"), [("linear", False), ("linear", True)])
def test_karras_levels_are_the_nearest_to_equal_steps_of_the_seventh_root(name: str, zero: bool) -> None:
    schedule = Schedule.from_name(name, zero_terminal_snr=zero)
    levels = sampling_levels(schedule, 12, "dpmpp_2m")
    assert levels[0].number == 999 and levels[-2].number == 0 and levels[-1] == CLEAN and len(levels) == 13
    noise = (schedule.sigma / schedule.alpha).log()
    visited = levels[1:-1]  # the first one has no picture
    high, low = ((it.sigma / it.alpha) ** (1 / 7) for it in (visited[0], visited[-1]))
    assert high**7 == pytest.approx(100, rel=0.25)  # as near as there is a level
    for n, level in enumerate(visited):
        wanted = 7 * math.log(high + n / (len(visited) - 1) * (low - high))
        assert (noise - wanted).abs().argmin() == level.number


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("steps", [1, 2, 50, 250, 1000])
def test_each_step_visits_a_level_of_its_own(name: str, sampler: str, steps: int) -> None:
    """Where levels lie far apart, the one that is nearest to a step of Karras' is that of its neighbours too."""
    for zero in (False, True):
        schedule = Schedule.from_name(name, zero_terminal_snr=zero)
        numbers = [level.number for level in sampling_levels(schedule, steps, sampler)[:-1]]
        assert len(set(numbers)) == steps and numbers == sorted(numbers, reverse=True) and numbers[0] == 999


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("zero", [False, True])
def test_the_default_sampler_keeps_small_deviations_on_every_schedule(name: str, zero: bool) -> None:
    """With uniform steps it keeps 90% of it on linear."""
    schedule = Schedule.from_name(name, zero_terminal_snr=zero)
    assert shrunk(schedule, 0.25, "dpmpp_2m", 20) == pytest.approx(0.25, rel=0.03)


def test_the_threshold_is_a_percentile_of_each_picture_and_leaves_small_ones_alone() -> None:
    x = normal(3, 3, 5, 5) * torch.tensor([0.1, 1.0, 5.0]).view(3, 1, 1, 1)
    limits = x.abs().flatten(1).quantile(0.9, dim=1).clamp_min(1).view(3, 1, 1, 1)
    torch.testing.assert_close(dynamic_threshold(x, 0.9), (x / limits).clamp(-1, 1), rtol=1e-12, atol=0)
    assert torch.equal(dynamic_threshold(x, 0.9)[:1], x[:1])
    assert dynamic_threshold(x, 1.0)[2].abs().max() == 1


# Guidance.

SCHEDULE = Schedule.from_name("cosine")
WITH, WITHOUT = Gaussian(SCHEDULE, 0.5, mean=0.4), Gaussian(SCHEDULE, 0.5, mean=-0.1)
Z = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Counted:
    """Normal pictures with a learned variance; it counts its calls."""

    def __init__(self, pixels: Gaussian, fraction: float) -> None:
        self.pixels, self.fraction, self.calls = pixels, fraction, 0

    def __call__(self, x: Tensor, t: int) -> Denoised:
        self.calls += 1
        return Denoised(self.pixels.estimate(x, t), torch.full_like(x, self.fraction))


def samples(denoise, steps: int = 20) -> Tensor:
    return sample(denoise, SCHEDULE, Z, draw=no_draw, sampler="ddim", steps=steps)


@pytest.mark.parametrize("scale", [-1.0, 0.0, 0.5, 3.0])
def test_guided_samples_are_those_of_the_extrapolated_distribution(scale: float) -> None:
    mean = -0.1 + scale * 0.5
    pixels = Gaussian(SCHEDULE, 0.5, mean)
    expected = mean + pixels.shrinking(uniform_levels(999, 20)) * (Z - SCHEDULE.alpha[999] * mean)
    out = samples(apply_guidance(WITH.denoise, WITHOUT.denoise, SCHEDULE, scale))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_a_learned_variance_is_the_conditional_one_and_a_network_that_guides_itself_is_itself() -> None:
    network, other = Counted(WITH, 1.0), Counted(WITHOUT, 0.0)
    out = apply_guidance(network, other, SCHEDULE, 3.0)(Z, 500)
    assert out.variance_fraction is not None and torch.equal(out.variance_fraction, torch.ones_like(Z))
    assert (network.calls, other.calls) == (1, 1)
    torch.testing.assert_close(
        samples(apply_guidance(network, network, SCHEDULE, 2.0)), samples(network), rtol=0, atol=0
    )


def test_the_interval_is_open_below_and_closed_above_and_infinity_is_inside() -> None:
    schedule = Schedule(torch.tensor([2.0, 0.0, -torch.inf], dtype=torch.float64))
    pixels, other = Gaussian(Schedule.from_name("cosine", 3), 0.5), Counted(WITHOUT, 0.0)
    for interval, inside in (((0.0, 1.0), {0, 1}), ((1.0, float("inf")), {2}), ((0.5, 2.0), {1})):
        denoise = apply_guidance(pixels.denoise, other, schedule, 2.0, interval=interval)
        for t in range(3):
            other.calls = 0
            is_guided = not torch.equal(denoise(Z, t).x_start, pixels.estimate(Z, t))
            assert other.calls == is_guided == (t in inside)
