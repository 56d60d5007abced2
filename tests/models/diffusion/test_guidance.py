from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.diffusion import Denoised, Schedule, denoiser, guided, sample
from models.diffusion.guidance import Passes
from tests.models.diffusion.gaussians import Gaussian, no_draw, prediction_of, uniform_levels

SCHEDULE = Schedule("cosine")
WITH, WITHOUT = Gaussian(SCHEDULE, 0.5, mean=0.4), Gaussian(SCHEDULE, 0.5, mean=-0.1)
Z = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Network:
    """Normal pictures, whose mean is the condition; it counts its rows and has a learned variance."""

    def __init__(self, conditional: Gaussian = WITH) -> None:
        self.rows, self.conditional = list[tuple[int, tuple[bool, ...]]](), conditional

    def __call__(self, x: Tensor, t: int, previous: Tensor | None, blocks: tuple[bool, ...]) -> Denoised:
        self.rows.append((len(x), blocks))
        assert previous is None or len(previous) == len(x)
        of = [self.conditional if keeps else WITHOUT for keeps in blocks]
        parts = zip(of, x.chunk(len(blocks)), blocks, strict=True)
        estimates, fractions = zip(
            *((pixels.estimate(part, t), torch.full_like(part, float(keeps))) for pixels, part, keeps in parts),
            strict=True,
        )
        return Denoised(torch.cat(estimates), torch.cat(fractions))


def samples(network: Passes, sampler: str = "ddim", **options) -> Tensor:
    denoise = guided(network, SCHEDULE, **options)
    return sample(denoise, SCHEDULE, Z, draw=no_draw, sampler=sampler, steps=20)


@pytest.mark.parametrize("scale", [-1.0, 0.0, 0.5, 1.0, 3.0])
def test_guided_samples_are_those_of_the_extrapolated_distribution(scale: float) -> None:
    network = Network()
    mean = -0.1 + scale * 0.5
    pixels = Gaussian(SCHEDULE, 0.5, mean)
    expected = mean + pixels.shrinking(uniform_levels(999, 20)) * (Z - SCHEDULE.alpha[999] * mean)
    torch.testing.assert_close(samples(network, scale=scale), expected, rtol=0, atol=1e-12)
    one_pass = {0.0: (2, (False,)), 1.0: (2, (True,))}
    assert network.rows == [one_pass.get(scale, (4, (True, False)))] * 20


@pytest.mark.parametrize("scale", [-1.0, 0.5, 3.0])
def test_a_learned_variance_is_the_conditional_one(scale: float) -> None:
    out = guided(Network(), SCHEDULE, scale=scale)(Z, 500, Z)
    assert out.variance_fraction is not None and torch.equal(out.variance_fraction, torch.ones_like(Z))


def test_guidance_holds_inside_its_interval_of_noise_levels_alone() -> None:
    noise = SCHEDULE.sigma / SCHEDULE.alpha
    low, high = noise[200].item(), noise[600].item()
    network = Network()
    denoise, always = (guided(network, SCHEDULE, scale=3.0, interval=it) for it in ((low, high), None))
    # The edges are computed in another way than the levels: 1e-12 decides on which side they are.
    for t, is_inside in ((199, False), (201, True), (599, True), (601, False)):
        network.rows.clear()
        out = denoise(Z, t, None).x_start
        assert network.rows == ([(4, (True, False))] if is_inside else [(2, (True,))])
        assert torch.equal(out, always(Z, t, None).x_start if is_inside else WITH.estimate(Z, t))
    everywhere = samples(network, scale=3.0, interval=(0.0, float("inf")))
    assert torch.equal(everywhere, samples(network, scale=3.0))


def test_the_interval_is_open_below_and_closed_above_and_infinity_is_inside() -> None:
    levels = torch.tensor([2.0, 0.0, -torch.inf], dtype=torch.float64)
    schedule, network = Schedule.from_log_snr(levels), Network(Gaussian(Schedule("cosine", 3), 0.5))
    for interval, inside in (((0.0, 1.0), {0, 1}), ((1.0, float("inf")), {2}), ((0.5, 2.0), {1})):
        denoise = guided(network, schedule, scale=2.0, interval=interval)
        for t in range(3):
            network.rows.clear()
            denoise(Z, t, None)
            assert (network.rows[0][0] == 4) == (t in inside)


def test_autoguidance_extrapolates_from_a_worse_network_and_from_itself_does_nothing() -> None:
    network, worse = Network(), Network(Gaussian(SCHEDULE, 0.5, mean=0.0))
    expected = samples(Network(Gaussian(SCHEDULE, 0.5, mean=0.8)))
    torch.testing.assert_close(samples(network, scale=2.0, guide=worse), expected, rtol=0, atol=1e-12)
    assert network.rows == worse.rows == [(2, (True,))] * 20
    assert torch.equal(samples(network, scale=2.0, guide=network), samples(network))
    without = samples(network, scale=2.0, guide=worse, is_conditional=False)
    torch.testing.assert_close(without, expected, rtol=0, atol=1e-12)


def test_a_network_without_condition_runs_once_whatever_the_scale() -> None:
    network = Network()
    out = samples(network, scale=7.0, is_conditional=False)
    assert torch.equal(out, samples(Network())) and network.rows == [(2, (True,))] * 20


def test_rescaling_returns_to_the_conditional_deviation_of_each_picture() -> None:
    def passes(x: Tensor, t: int, previous: Tensor | None, blocks: tuple[bool, ...]) -> Denoised:
        return Denoised(
            torch.cat([part.tanh() if keeps else 0.1 * part for part, keeps in zip(x.chunk(2), blocks, strict=True)])
        )

    def guided_by(rescale: float, x: Tensor) -> Tensor:
        return guided(passes, SCHEDULE, scale=3.0, rescale=rescale)(x, 300, None).x_start

    x = Z * torch.tensor([0.2, 3.0]).view(2, 1, 1, 1)
    plain, whole, half = (guided_by(rescale, x) for rescale in (0.0, 1.0, 0.5))
    of_each = x.tanh().flatten(1).std(1)
    assert (plain.flatten(1).std(1) > 1.2 * of_each).all()
    torch.testing.assert_close(whole.flatten(1).std(1), of_each, rtol=1e-12, atol=0)
    torch.testing.assert_close(half, (plain + whole) / 2, rtol=1e-12, atol=1e-15)
    assert torch.equal(guided_by(1.0, x[1:]), whole[1:])


@pytest.mark.parametrize("objective", ["noise", "x_start", "v"])
@pytest.mark.parametrize("learned", [False, True])
def test_predictions_become_estimates_and_their_variance_channels_fractions(objective: str, learned: bool) -> None:
    def predict(x: Tensor, t: Tensor, previous: Tensor | None, blocks: tuple[bool, ...]) -> Tensor:
        assert t.dtype == torch.int64 and t.tolist() == [500, 500] and blocks == (True,)
        assert previous is not None and previous.abs().max() == 1
        alpha, sigma = SCHEDULE.at(t, x)
        prediction = prediction_of(objective, WITH.estimate(x, 500), x, alpha, sigma)
        return torch.cat([prediction, 2 * x], dim=1) if learned else prediction

    out = denoiser(predict, SCHEDULE, objective)(Z, 500, 100 * Z, (True,))
    torch.testing.assert_close(out.x_start, WITH.estimate(Z, 500), rtol=0, atol=1e-12)
    assert (out.variance_fraction is not None) == learned
    if out.variance_fraction is not None:
        assert torch.equal(out.variance_fraction, Z + 0.5)
