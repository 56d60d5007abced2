from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.diffusion import DiffusionLoss, Schedule
from models.diffusion.losses import loss_weights
from models.diffusion.variance import LearnedVariance
from tests.models.diffusion.gaussians import Gaussian, prediction_of

LINEAR, FLOW = Schedule.named("linear"), Schedule.named("flow")
TIMES = torch.tensor([0, 1, 300, 700, 999])
FRACTION = 0.3


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X0, NOISE = normal(5, 3, 4, 4).clamp(-1, 1), normal(5, 3, 4, 4, seed=2)


class Estimator(nn.Module):
    """Predicts what means the estimate `factor * x0 of the best network`, and keeps what it was called with."""

    def __init__(self, objective: str, schedule: Schedule, learned_variance: bool = False) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.9, dtype=torch.float64))
        self.channels = torch.full((1, 3, 1, 1), 2 * FRACTION - 1, dtype=torch.float64).requires_grad_()
        self._pixels, self._objective = Gaussian(schedule, 0.5), objective
        self._learned_variance, self.calls = learned_variance, list[dict[str, Any]]()

    def forward(self, x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        self.calls.append({"x": x, "t": t, "grad": torch.is_grad_enabled(), **conditions})
        estimate = self.factor * self._pixels.estimate(x.double(), t)
        prediction = prediction_of(self._objective, estimate, x, *self._pixels.schedule.at(t, x.double()))
        return torch.cat([prediction, self.channels.expand_as(x)], 1) if self._learned_variance else prediction


def loss_of(objective: str, schedule: Schedule = LINEAR, **options: Any) -> tuple[Any, Estimator]:
    network = Estimator(objective, schedule, options.get("learned_variance", False))
    return DiffusionLoss(schedule, objective, **options)(network, X0, {}, times=TIMES, noise=NOISE), network


@pytest.mark.parametrize("objective", ["noise", "x_start", "v", "flow"])
@pytest.mark.parametrize("deviation", [1.0, 0.5])
def test_the_best_network_has_the_least_loss(objective: str, deviation: float) -> None:
    schedule = Schedule.named("flow" if objective == "flow" else "cosine")
    pixels, count = Gaussian(schedule, deviation), 4000
    times = torch.arange(count) * 1000 // count
    x0, noise = deviation * normal(count, 1, 4, 4), normal(count, 1, 4, 4, seed=2)
    losses = DiffusionLoss(schedule, objective)(pixels.network(objective), x0, {}, times=times, noise=noise)
    alpha, sigma, d = schedule.alpha, schedule.sigma, pixels.variance
    of_v = deviation**2 / d
    floor = {"x_start": sigma**2 * of_v, "noise": alpha**2 * of_v, "v": of_v, "flow": of_v}[objective][times]
    assert torch.equal(losses.weighted, losses.error)
    excess = losses.error - floor
    assert abs(excess.mean()) < 4 * excess.std() / math.sqrt(count)
    by_level = excess.view(10, -1)  # a wrong level would be hidden in the mean of all
    assert (by_level.mean(1).abs() < 4 * by_level.std(1) / math.sqrt(count / 10)).all()


@pytest.mark.parametrize("weight", ["min_snr", "p2"])
def test_the_loss_of_an_estimate_does_not_depend_on_what_is_predicted(weight: str) -> None:
    losses = {objective: loss_of(objective, weight=weight)[0] for objective in ("noise", "x_start", "v")}
    error = (0.9 * Gaussian(LINEAR, 0.5).estimate(LINEAR.add_noise(X0, NOISE, TIMES), TIMES) - X0).square()
    expected = error.flatten(1).mean(1) * loss_weights(weight, LINEAR, "x_start")[TIMES]
    for objective, found in losses.items():
        torch.testing.assert_close(found.weighted, expected, rtol=1e-9, atol=0, msg=objective)


@pytest.mark.parametrize("schedule", [LINEAR, FLOW], ids=["linear", "flow"])
def test_bits_of_a_learned_variance_are_those_of_the_estimate_whatever_is_predicted(schedule: Schedule) -> None:
    estimate = 0.9 * Gaussian(schedule, 0.5).estimate(schedule.add_noise(X0, NOISE, TIMES), TIMES)
    expected = LearnedVariance(schedule).bits(X0, estimate, torch.full_like(X0, FRACTION), TIMES)
    for objective in ("flow", "x_start") if schedule.is_flow else ("noise", "x_start", "v"):
        found, network = loss_of(objective, schedule, learned_variance=True)
        torch.testing.assert_close(found.bits, expected, rtol=1e-9, atol=0, msg=objective)
        assert torch.equal(found.weighted, found.error)
        of_mean, of_variance = torch.autograd.grad(
            found.bits.sum(), [network.factor, network.channels], allow_unused=True, retain_graph=True
        )
        assert of_mean is None or of_mean == 0
        assert of_variance.abs().min() > 0


def test_any_part_of_a_batch_has_the_losses_of_its_pictures_in_the_batch() -> None:
    network = Estimator("v", LINEAR, learned_variance=True)
    loss = DiffusionLoss(LINEAR, "v", learned_variance=True)
    whole = loss(network, X0, {}, times=TIMES, noise=NOISE)
    for rows in (slice(0, 1), slice(1, 5)):
        part = loss(network, X0[rows], {}, times=TIMES[rows], noise=NOISE[rows])
        assert torch.equal(part.weighted, whole.weighted[rows]) and torch.equal(part.bits, whole.bits[rows])


def test_levels_stay_whole_numbers_and_pictures_fp32_whatever_the_precision() -> None:
    """bf16 cannot tell levels above 256 apart."""
    times = torch.arange(900, 1000)
    pictures = torch.zeros(100, 3, 4, 4, dtype=torch.bfloat16)
    network = Estimator("v", LINEAR)
    with torch.autocast("cpu", torch.bfloat16):
        losses = DiffusionLoss(LINEAR, "v")(network, pictures, {}, times=times, noise=torch.ones(100, 3, 4, 4))
    assert torch.equal(network.calls[0]["t"], times) and not network.calls[0]["t"].is_floating_point()
    assert network.calls[0]["x"].dtype == losses.weighted.dtype == torch.float32
    assert network.calls[0]["x"][:, 0, 0, 0].unique().numel() == 100


def test_low_resolution_pictures_get_the_noise_that_is_drawn_and_the_network_is_told_its_level() -> None:
    network, images = Estimator("flow", FLOW), normal(5, 3, 6, 6, seed=5)
    # The published decoder samples at level 200 of this schedule, whose alpha^2 is 0.65635.
    assert abs(LINEAR.alpha[200].item() ** 2 - 0.65635) < 5e-6
    times, noise = TIMES.flip(0), normal(5, 3, 6, 6, seed=6)
    loss = DiffusionLoss(FLOW, "flow", lowres_schedule=LINEAR)
    loss(network, X0, {"lowres_image": images}, times=TIMES, noise=NOISE, lowres_time=times, lowres_noise=noise)
    for given, image, t, n in zip(network.calls[0]["lowres_image"], images, times, noise, strict=True):
        assert torch.equal(given, LINEAR.alpha[t] * image + LINEAR.sigma[t] * n)
    assert torch.equal(network.calls[0]["lowres_time"], times)
    loss(network, X0, {"lowres_image": images}, times=TIMES, noise=NOISE)
    assert torch.equal(network.calls[1]["lowres_image"], images) and "lowres_time" not in network.calls[1]
