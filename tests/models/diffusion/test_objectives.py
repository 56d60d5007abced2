from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from models.diffusion import (
    LOSS_WEIGHTS,
    OBJECTIVES,
    SCHEDULES,
    DiffusionLoss,
    Inpaint,
    Schedule,
    check_combination,
    guided,
    sample,
)
from models.diffusion.objectives import LearnedWeight, coefficients, loss_weights, target_of, x_start_of
from tests.models.diffusion.gaussians import Gaussian, no_draw
from tests.models.helpers import refused

COSINE = Schedule("cosine")
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
    schedule = Schedule("flow" if objective == "flow" else "linear", zero_terminal_snr=zero)
    alpha, sigma = schedule.alpha, schedule.sigma
    x0, noise = torch.randn(2, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = alpha * x0 + sigma * noise
    target = target_of(objective, x0, noise, alpha, sigma)
    # The levels of most noise divide by alpha = 0.006, those of least by sigma = 0.001: rounding grows that much.
    close = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(x_start_of(objective, target, x, alpha, sigma), x0, **close)


@pytest.mark.parametrize("objective", VP)
@pytest.mark.parametrize(("weight", "deviation", "mean"), [
    ("min_snr", 1, 0.326113), ("min_snr", 0.5, 0.173197), ("p2", 1, 0.125962),
])  # fmt: skip
def test_one_weight_gives_one_loss_whatever_is_predicted(
    weight: str, deviation: float, mean: float, objective: str
) -> None:
    schedule = Schedule("cosine")
    floor = Gaussian(schedule, deviation).floor / coefficients(objective, schedule.alpha, schedule.sigma)[1] ** 2
    weights = loss_weights(weight, schedule, objective)
    assert (weights * floor).mean().item() == pytest.approx(mean, abs=5e-7)


def test_p2_and_min_snr_weights_of_the_noise_are_the_published_ones() -> None:
    schedule = Schedule("linear")
    snr = schedule.log_snr.exp()
    p2 = loss_weights("p2", schedule, "noise", p2_gamma=0.5, p2_k=2.0)
    torch.testing.assert_close(p2, (2 + snr) ** -0.5, rtol=1e-10, atol=0)
    min_snr = loss_weights("min_snr", schedule, "noise", min_snr_gamma=3.0)
    torch.testing.assert_close(min_snr, snr.clamp_max(3) / snr, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["cosine", "linear", "sigmoid", "flow"])
def test_the_sigmoid_weight_is_an_integral_over_log_snr_whatever_the_schedule(name: str) -> None:
    schedule = Schedule(name, 2000)
    levels = slice(None, -1) if schedule.ends_at_zero_snr else slice(None)
    log_snr = schedule.log_snr[levels]
    floor_of_noise = torch.sigmoid(log_snr)  # of pictures of deviation 1, for both families
    of_noise = loss_weights("sigmoid", schedule, "x_start", sigmoid_bias=-1.0)[levels] / log_snr.exp()
    sum_over_levels = (of_noise * floor_of_noise).sum() / 2000
    integral = torch.trapezoid(torch.sigmoid(-1 - log_snr.flip(0)) * floor_of_noise.flip(0), log_snr.flip(0))
    # A sum over levels is a rectangle rule: half a step too long at each end.
    assert sum_over_levels.item() == pytest.approx(integral.item(), rel=0.01)


@pytest.mark.parametrize(("name", "zero"), itertools.product(SCHEDULES, (False, True)))
def test_every_weight_goes_with_every_objective_of_every_schedule_and_is_0_at_snr_0_alone(
    name: str, zero: bool
) -> None:
    schedule = Schedule(name, zero_terminal_snr=zero)
    objectives = ("flow", "x_start") if name == "flow" else VP[1:] if schedule.ends_at_zero_snr else VP
    allowed = {pair for pair in itertools.product(OBJECTIVES, LOSS_WEIGHTS) if is_fine(schedule, *pair)}
    assert allowed == set(itertools.product(objectives, LOSS_WEIGHTS))
    for objective, weight in allowed:
        weights = loss_weights(weight, schedule, objective)
        has_signal = torch.ones(1000, dtype=torch.bool) if weight in ("none", "learned") else schedule.alpha > 0
        assert weights.isfinite().all() and torch.equal(weights > 0, has_signal), (objective, weight)


def test_weights_down_to_snr_0_are_the_published_ones() -> None:
    """Of v, Hang et al. 2023: min(SNR, gamma) / (SNR + 1). Of flow, t = 1 is noise, and the error of the noise is
    1 - t times that of the prediction: sigmoid(bias - log SNR) |d log SNR / dt| (1 - t)^2 = sigmoid(...) 2 (1 - t) / t
    (Kingma and Gao 2023, with the schedule of Lipman et al. 2023)."""
    schedule = Schedule("cosine", zero_terminal_snr=True)
    snr = schedule.log_snr.exp()
    published = snr.clamp_max(5) / (snr + 1)
    torch.testing.assert_close(loss_weights("min_snr", schedule, "v"), published, rtol=1e-9, atol=0)
    torch.testing.assert_close(loss_weights("p2", schedule, "v"), snr / (1 + snr) ** 2, rtol=1e-9, atol=0)
    schedule, t = Schedule("flow"), torch.arange(1, 1001).double() / 1000
    published = torch.sigmoid(-1 - schedule.log_snr) * 2 * (1 - t) / t
    found = loss_weights("sigmoid", schedule, "flow", sigmoid_bias=-1.0)
    # The slope is a difference of neighbouring levels, one-sided at the ends.
    torch.testing.assert_close(found[1:-1], published[1:-1], rtol=1e-5, atol=0)
    assert found[-1] == published[-1] == 0


def test_the_learned_weight_starts_at_1_and_its_loss_is_least_where_it_is_the_expected_loss() -> None:
    log_snr = torch.linspace(-20, 20, 400, dtype=torch.float64)
    weight = LearnedWeight(terms=6)
    assert torch.equal(weight(torch.tensor([-torch.inf, 0.0, 30.0])), torch.zeros(3))
    with torch.no_grad():
        weight.weight.copy_(torch.tensor([0.3, -0.5, 0.2, 0.1, 0, 0.4]))
    expected_loss = weight(log_snr).exp().detach()
    assert expected_loss.max() / expected_loss.min() > 2
    for scale, is_least in ((1.0, True), (1.1, False)):
        u = weight(log_snr)
        (gradient,) = torch.autograd.grad((scale * expected_loss / u.exp() + u).mean(), weight.weight)
        assert (gradient.abs().max() < 1e-7) == is_least


def test_the_learned_weight_keeps_its_precision_under_autocast() -> None:
    weight, log_snr = LearnedWeight(), torch.linspace(-10, 10, 50)
    torch.nn.init.normal_(weight.weight)
    outside = weight(log_snr)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(weight(log_snr), outside)


def some_sample(**options: Any) -> Tensor:
    schedule, noise = Schedule("cosine", 10), torch.zeros(1, 1, 2, 2)
    return sample(Gaussian(schedule, 1).denoise, schedule, noise, draw=no_draw, **{"steps": 5, **options})


@pytest.mark.parametrize(("call", "wrong", "said"), [
    (check_combination, (Schedule("jsd"), "noise", "none"), "SNR is 0"),
    (check_combination, (Schedule("flow"), "v", "none"), "flow"), (check_combination, (COSINE, "flow", "none"), "flow"),
    (check_combination, (COSINE, "eps", "none"), "'eps'"), (check_combination, (COSINE, "v", "minsnr"), "'minsnr'"),
    (DiffusionLoss, {"schedule": COSINE, "objective": "v", "loss_type": "mse"}, "'mse'"),
    (Schedule, {"name": "cosin"}, "'cosin'"), (Schedule, {"timesteps": 1}, "2 or more"),
    (guided, {"passes": None, "schedule": COSINE, "interval": (2.0, 1.0)}, "empty"),
    (guided, {"passes": None, "schedule": COSINE, "rescale": 1.5}, "0 to 1"),
    (some_sample, {"sampler": "euler"}, "'euler'"), (some_sample, {"spacing": "trailing"}, "'trailing'"),
    (some_sample, {"steps": 11}, "1 to 10"), (some_sample, {"steps": 0}, "1 to 10"),
    (some_sample, {"sampler": "ddpm", "eta": 0.5}, "eta"), (some_sample, {"sampler": "ddim", "eta": 1.5}, "eta"),
    *((Inpaint, (torch.zeros(2, 3, 4, 4), mask), "True where they stay")
      for mask in (torch.ones(2, 4, 5).bool(), torch.ones(2, 4, 4).byte(), torch.ones(4, 4).bool())),
])  # fmt: skip
def test_what_cannot_be_trained_or_sampled_is_refused(call: Callable[..., Any], wrong: Any, said: str) -> None:
    assert said in (refused(call, **wrong) if isinstance(wrong, dict) else refused(call, *wrong))
