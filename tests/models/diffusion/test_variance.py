"""The variational bound of normal pictures has closed forms; the product code gives each of its terms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tandem.models.diffusion.schedule import Schedule
from tandem.models.diffusion.variance import LearnedVariance, log_likelihood
from tests.models.diffusion.gaussians import Gaussian


def nats_of_every_level(variance: LearnedVariance, squared_error: Tensor, fraction: Tensor) -> Tensor:
    """Expected KL divergence of each level but the first, (T - 1,), for errors of the given expected squares (T,)."""
    levels = torch.arange(len(squared_error))
    x0 = torch.zeros(len(levels), 1, 1, 1, dtype=torch.float64)
    bits = variance.bits(x0, x0 + squared_error.sqrt().view(-1, 1, 1, 1), fraction.view(-1, 1, 1, 1), levels)
    return bits[1:] * math.log(2)


def best_fraction(pixels: Gaussian, variance: LearnedVariance) -> Tensor:
    span = variance.log_large - variance.log_small
    return (pixels.reverse_variance.log() - variance.log_small) / span


def bound(pixels: Gaussian, fraction: Tensor, first_variance: Tensor) -> float:
    schedule, variance = pixels.schedule, LearnedVariance(pixels.schedule)
    kl = nats_of_every_level(variance, pixels.floor, fraction).sum()
    last = (pixels.variance[-1] - 1 - 2 * schedule.sigma[-1].log()) / 2
    # A density, where the code has 256 bins.
    first = ((2 * math.pi * first_variance).log() + pixels.floor[0] / first_variance) / 2
    return (first + kl + last).item()


@pytest.mark.parametrize("name", ["cosine", "linear", "sigmoid"])
@pytest.mark.parametrize("timesteps", [10, 1000])
def test_the_bound_of_standard_normal_pictures_is_their_entropy_with_the_large_variance(
    name: str, timesteps: int
) -> None:
    pixels = Gaussian(Schedule.from_name(name, timesteps), 1.0)
    found = bound(pixels, torch.ones(timesteps).double(), pixels.schedule.betas[0])
    assert found == pytest.approx(1.4189385332, abs=1e-9)  # log(2 pi e) / 2


@pytest.mark.parametrize(("deviation", "nats"), [(0.5, 0.7257914), (2.0, 2.1120857)])
def test_the_bound_is_exact_with_the_variance_of_the_reverse_process(deviation: float, nats: float) -> None:
    pixels = Gaussian(Schedule.from_name("linear"), deviation)
    fraction = best_fraction(pixels, LearnedVariance(pixels.schedule))
    assert bound(pixels, fraction, pixels.reverse_variance[0]) == pytest.approx(nats, abs=1e-7)


@pytest.mark.parametrize("name", ["cosine", "flow"])
def test_with_the_small_variance_a_term_is_the_fall_of_snr_times_half_the_squared_error(name: str) -> None:
    schedule = Schedule.from_name(name, 50)
    snr = schedule.log_snr.exp()
    error = torch.linspace(0.1, 2, 50).double()
    terms = nats_of_every_level(LearnedVariance(schedule), error**2, torch.zeros(50).double())
    torch.testing.assert_close(terms, (snr[:-1] - snr[1:]) / 2 * error[1:] ** 2, rtol=1e-10, atol=0)


def test_the_first_level_has_the_small_variance_of_the_second_and_finite_bits() -> None:
    schedule = Schedule.from_name("cosine")
    variance = LearnedVariance(schedule)
    assert variance.log_small[0] == variance.log_small[1]
    assert variance.log_small[0].item() == pytest.approx(-10.73408, abs=5e-6)
    torch.testing.assert_close(variance.log_large, schedule.betas.log(), rtol=1e-10, atol=0)
    x0 = torch.tensor([-1.0, 0.003, 1.0]).view(1, 3, 1, 1).expand(2, -1, -1, -1)
    for error in (0.0, 0.01, 3.0):
        fraction = torch.full_like(x0, 0.5).requires_grad_()
        bits = variance.bits(x0, x0 + error, fraction, torch.tensor([0, 1]))
        bits.sum().backward()
        assert bits.isfinite().all() and fraction.grad is not None and fraction.grad.isfinite().all()


def test_estimates_far_off_at_high_noise_leave_finite_gradients() -> None:
    """Early in training on noise, an estimate of x0 is off by as much as 1 / alpha = 20000."""
    variance = LearnedVariance(Schedule.from_name("cosine"))
    x0, fraction = torch.zeros(2, 3, 4, 4), torch.full((2, 3, 4, 4), 0.5).requires_grad_()
    x_start = torch.stack([torch.full((3, 4, 4), 0.1), torch.full((3, 4, 4), 3e6)])
    variance.bits(x0, x_start, fraction, torch.tensor([0, 999])).sum().backward()
    assert fraction.grad is not None and fraction.grad.isfinite().all()


@pytest.mark.parametrize("mean", [-1.4, -1.0, 0.0031, 0.7, 1.2])
@pytest.mark.parametrize("deviation", [1e-3, 0.006, 0.1, 3.0])
def test_the_likelihoods_of_256_values_sum_to_1(mean: float, deviation: float) -> None:
    values = torch.arange(256, dtype=torch.float64) / 127.5 - 1
    log_variance = torch.full_like(values, 2 * math.log(deviation))
    log_p = log_likelihood(values, torch.full_like(values, mean), log_variance)
    assert log_p.exp().sum().item() == pytest.approx(1, abs=1e-12) and log_p.isfinite().all()
    single = log_likelihood(values.float(), torch.full((256,), mean), log_variance.float())
    likely = log_p > -50
    # Two logarithms of fp32 near -50 leave 1e-5, relative to a bin of 1/255 of a deviation of 3 up to 0.01.
    torch.testing.assert_close(single[likely].double(), log_p[likely], rtol=1e-3, atol=1e-2)
