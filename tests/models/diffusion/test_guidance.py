from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.diffusion import Denoised, Schedule, guided, sample
from tests.models.diffusion.gaussians import Gaussian, no_draw, uniform_levels

SCHEDULE = Schedule.named("cosine")
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
    out = samples(guided(WITH.denoise, WITHOUT.denoise, SCHEDULE, scale))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_a_learned_variance_is_the_conditional_one_and_a_network_that_guides_itself_is_itself() -> None:
    network, other = Counted(WITH, 1.0), Counted(WITHOUT, 0.0)
    out = guided(network, other, SCHEDULE, 3.0)(Z, 500)
    assert out.variance_fraction is not None and torch.equal(out.variance_fraction, torch.ones_like(Z))
    assert (network.calls, other.calls) == (1, 1)
    torch.testing.assert_close(samples(guided(network, network, SCHEDULE, 2.0)), samples(network), rtol=0, atol=0)


def test_guidance_holds_inside_its_interval_of_noise_levels_alone() -> None:
    noise = SCHEDULE.sigma / SCHEDULE.alpha
    low, high = noise[200].item(), noise[600].item()
    other = Counted(WITHOUT, 0.0)
    denoise, always = (guided(WITH.denoise, other, SCHEDULE, 3.0, interval=it) for it in ((low, high), None))
    # The edges are computed in another way than the levels: 1e-12 decides on which side they are.
    for t, is_inside in ((199, False), (201, True), (599, True), (601, False)):
        expected = always(Z, t).x_start if is_inside else WITH.estimate(Z, t)
        other.calls = 0
        assert torch.equal(denoise(Z, t).x_start, expected) and other.calls == is_inside


def test_the_interval_is_open_below_and_closed_above_and_infinity_is_inside() -> None:
    schedule = Schedule(torch.tensor([2.0, 0.0, -torch.inf], dtype=torch.float64))
    pixels, other = Gaussian(Schedule.named("cosine", 3), 0.5), Counted(WITHOUT, 0.0)
    for interval, inside in (((0.0, 1.0), {0, 1}), ((1.0, float("inf")), {2}), ((0.5, 2.0), {1})):
        denoise = guided(pixels.denoise, other, schedule, 2.0, interval=interval)
        for t in range(3):
            other.calls = 0
            denoise(Z, t)
            assert (other.calls == 1) == (t in inside)
