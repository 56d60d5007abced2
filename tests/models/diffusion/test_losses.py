"""What is predicted, how it is weighed, and the losses, against closed forms of normal pictures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tandem.config.models.decoder import SCHEDULES
from tandem.models.diffusion.losses import (
    LOSS_WEIGHTS,
    OBJECTIVES,
    DiffusionLoss,
    check_combination,
    loss_weights,
    predict_x_start,
    prediction_target,
)
from tandem.models.diffusion.sampling import sample
from tandem.models.diffusion.schedule import Schedule
from tandem.models.diffusion.variance import LearnedVariance
from tests.models.diffusion.gaussians import Gaussian, no_draw, normal, prediction_of
from tests.models.helpers import refused

COSINE, LINEAR, FLOW = (Schedule.from_name(name) for name in ("cosine", "linear", "flow"))
TIMES = torch.tensor([0, 1, 300, 700, 999])
FRACTION = 0.3


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
    schedule = Schedule.from_name("flow" if objective == "flow" else "cosine")
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


VP = ("noise", "x_start", "v")


def is_fine(schedule: Schedule, objective: str, weight: str) -> bool:
    try:
        check_combination(schedule, objective, weight)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("objective", "zero"), [*itertools.product(("x_start", "v", "flow"), (False, True)), ("noise", False)]
)
def test_the_target_means_the_clean_picture_at_every_level(objective: str, zero: bool) -> None:
    schedule = Schedule.from_name("flow" if objective == "flow" else "linear", zero_terminal_snr=zero)
    alpha, sigma = schedule.alpha, schedule.sigma
    x0, noise = torch.randn(2, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = alpha * x0 + sigma * noise
    target = prediction_target(objective, x0, noise, alpha, sigma)
    # The levels of most noise divide by alpha = 0.006, those of least by sigma = 0.001: rounding grows that much.
    close = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(predict_x_start(objective, target, x, alpha, sigma), x0, **close)


@pytest.mark.parametrize(("name", "zero"), itertools.product(SCHEDULES, (False, True)))
def test_every_weight_goes_with_every_objective_of_every_schedule_and_is_0_at_snr_0_alone(
    name: str, zero: bool
) -> None:
    schedule = Schedule.from_name(name, zero_terminal_snr=zero)
    objectives = ("flow", "x_start") if name == "flow" else VP[1:] if schedule.ends_at_zero_snr else VP
    allowed = {pair for pair in itertools.product(OBJECTIVES, LOSS_WEIGHTS) if is_fine(schedule, *pair)}
    assert allowed == set(itertools.product(objectives, LOSS_WEIGHTS))
    for objective, weight in allowed:
        weights = loss_weights(weight, schedule, objective)
        has_signal = torch.ones(1000, dtype=torch.bool) if weight == "none" else schedule.alpha > 0
        assert weights.isfinite().all() and torch.equal(weights > 0, has_signal), (objective, weight)


def some_sample(**options: Any) -> Tensor:
    schedule, noise = Schedule.from_name("cosine", 10), torch.zeros(1, 1, 2, 2)
    return sample(Gaussian(schedule, 1).denoise, schedule, noise, draw=no_draw, **{"steps": 5, **options})


@pytest.mark.parametrize(("call", "wrong", "said"), [
    (check_combination, (Schedule.from_name(zero_terminal_snr=True), "noise", "none"), "SNR is 0"),
    (check_combination, (Schedule.from_name("flow"), "v", "none"), "flow"),
    (check_combination, (COSINE, "flow", "none"), "flow"),
    (check_combination, (COSINE, "eps", "none"), "'eps'"), (check_combination, (COSINE, "v", "minsnr"), "'minsnr'"),
    (Schedule.from_name, {"name": "cosin"}, "'cosin'"), (Schedule.from_name, {"timesteps": 1}, "2 or more"),
    (some_sample, {"sampler": "euler"}, "'euler'"), (some_sample, {"steps": 11}, "1 to 10"),
    (some_sample, {"steps": 0}, "1 to 10"), (some_sample, {"sampler": "ddim", "eta": 1.5}, "eta"),
])  # fmt: skip
def test_what_cannot_be_trained_or_sampled_is_refused(call: Callable[..., Any], wrong: Any, said: str) -> None:
    assert said in (refused(call, **wrong) if isinstance(wrong, dict) else refused(call, *wrong))


@pytest.mark.parametrize("zero", [False, True])
def test_weights_are_the_published_ones_down_to_snr_0(zero: bool) -> None:
    """Of v, Hang et al. 2023: min(SNR, gamma) / (SNR + 1); of the noise, which has none at SNR 0, times its share."""
    schedule = Schedule.from_name("cosine", zero_terminal_snr=zero)
    snr = schedule.log_snr.exp()
    of_v = {"min_snr": snr.clamp_max(3) / (snr + 1), "p2": (2 + snr) ** -0.5 * snr / (1 + snr)}
    options = {"min_snr_gamma": 3.0, "p2_gamma": 0.5, "p2_k": 2.0}
    for weight, expected in of_v.items():
        found = loss_weights(weight, schedule, "v", **options)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
        if not zero:
            of_noise = loss_weights(weight, schedule, "noise", **options)
            torch.testing.assert_close(of_noise, expected * (1 + snr) / snr, rtol=1e-9, atol=0)
