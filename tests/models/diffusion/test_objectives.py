from __future__ import annotations

import itertools

import pytest
import torch

from models.diffusion import LOSS_WEIGHTS, OBJECTIVES, SCHEDULES, Schedule, check_combination
from models.diffusion.objectives import (
    LearnedWeight,
    coefficients,
    loss_weights,
    target_of,
    x_start_of,
)
from tests.models.diffusion.gaussians import Gaussian

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


@pytest.mark.parametrize(
    ("deviation", "objective", "mean"),
    [
        (1, "x_start", 0.504422), (1, "noise", 0.495578), (1, "v", 1.0),
        (0.5, "x_start", 0.168087), (0.5, "noise", 0.327653), (0.5, "v", 0.495740),
    ],
)  # fmt: skip
def test_the_least_losses_of_normal_pictures_follow_from_that_of_x0(
    deviation: float, objective: str, mean: float
) -> None:
    schedule = Schedule("cosine")
    pixels = Gaussian(schedule, deviation)
    alpha, sigma = schedule.alpha, schedule.sigma
    known = {"x_start": sigma**2, "noise": alpha**2, "v": torch.ones(1000).double()}[objective]
    floor = pixels.floor / coefficients(objective, alpha, sigma)[1] ** 2
    torch.testing.assert_close(floor, deviation**2 * known / pixels.variance, rtol=1e-10, atol=0)
    assert floor.mean().item() == pytest.approx(mean, abs=5e-7)


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


def test_the_preconditioning_of_edm_for_deviation_1_is_v_without_a_weight() -> None:
    schedule = Schedule("cosine")
    noise = schedule.sigma / schedule.alpha  # its sigma, of pictures x / alpha
    c_skip, c_out, c_in = 1 / (noise**2 + 1), noise / (noise**2 + 1).sqrt(), 1 / (noise**2 + 1).sqrt()
    a, b = coefficients("v", schedule.alpha, schedule.sigma)
    for ours, theirs in ((schedule.alpha, c_in), (a * schedule.alpha, c_skip), (-b, c_out)):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=0)
    its_weight = (noise**2 + 1) / noise**2
    torch.testing.assert_close(loss_weights("none", schedule, "v"), its_weight * c_out**2, rtol=1e-10, atol=0)


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


@pytest.mark.parametrize(("name", "objective", "weight", "match"), [
    ("jsd", "noise", "none", "SNR is 0"), ("flow", "v", "none", "objective flow"), ("cosine", "flow", "none", "flow"),
    ("cosine", "eps", "none", "choose one of"),
    ("cosine", "v", "minsnr", "choose one of"),
])  # fmt: skip
def test_what_cannot_be_trained_is_refused(name: str, objective: str, weight: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check_combination(Schedule(name), objective, weight)


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
