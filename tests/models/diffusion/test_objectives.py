from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from models.decoder_config import SCHEDULES
from models.diffusion import Schedule, sample
from models.diffusion.losses import (
    LOSS_WEIGHTS,
    OBJECTIVES,
    check_combination,
    coefficients,
    loss_weights,
    target_of,
    x_start_of,
)
from tests.models.diffusion.gaussians import Gaussian, no_draw
from tests.models.helpers import refused

COSINE = Schedule.named("cosine")
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
    schedule = Schedule.named("flow" if objective == "flow" else "linear", zero_terminal_snr=zero)
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
    schedule = Schedule.named("cosine")
    floor = Gaussian(schedule, deviation).floor / coefficients(objective, schedule.alpha, schedule.sigma)[1] ** 2
    weights = loss_weights(weight, schedule, objective)
    assert (weights * floor).mean().item() == pytest.approx(mean, abs=5e-7)


def test_p2_and_min_snr_weights_of_the_noise_are_the_published_ones() -> None:
    schedule = Schedule.named("linear")
    snr = schedule.log_snr.exp()
    p2 = loss_weights("p2", schedule, "noise", p2_gamma=0.5, p2_k=2.0)
    torch.testing.assert_close(p2, (2 + snr) ** -0.5, rtol=1e-10, atol=0)
    min_snr = loss_weights("min_snr", schedule, "noise", min_snr_gamma=3.0)
    torch.testing.assert_close(min_snr, snr.clamp_max(3) / snr, rtol=1e-10, atol=0)


@pytest.mark.parametrize(("name", "zero"), itertools.product(SCHEDULES, (False, True)))
def test_every_weight_goes_with_every_objective_of_every_schedule_and_is_0_at_snr_0_alone(
    name: str, zero: bool
) -> None:
    schedule = Schedule.named(name, zero_terminal_snr=zero)
    objectives = ("flow", "x_start") if name == "flow" else VP[1:] if schedule.ends_at_zero_snr else VP
    allowed = {pair for pair in itertools.product(OBJECTIVES, LOSS_WEIGHTS) if is_fine(schedule, *pair)}
    assert allowed == set(itertools.product(objectives, LOSS_WEIGHTS))
    for objective, weight in allowed:
        weights = loss_weights(weight, schedule, objective)
        has_signal = torch.ones(1000, dtype=torch.bool) if weight == "none" else schedule.alpha > 0
        assert weights.isfinite().all() and torch.equal(weights > 0, has_signal), (objective, weight)


def test_weights_down_to_snr_0_are_the_published_ones() -> None:
    """Of v, Hang et al. 2023: min(SNR, gamma) / (SNR + 1)."""
    schedule = Schedule.named("cosine", zero_terminal_snr=True)
    snr = schedule.log_snr.exp()
    published = snr.clamp_max(5) / (snr + 1)
    torch.testing.assert_close(loss_weights("min_snr", schedule, "v"), published, rtol=1e-9, atol=0)
    torch.testing.assert_close(loss_weights("p2", schedule, "v"), snr / (1 + snr) ** 2, rtol=1e-9, atol=0)


def some_sample(**options: Any) -> Tensor:
    schedule, noise = Schedule.named("cosine", 10), torch.zeros(1, 1, 2, 2)
    return sample(Gaussian(schedule, 1).denoise, schedule, noise, draw=no_draw, **{"steps": 5, **options})


@pytest.mark.parametrize(("call", "wrong", "said"), [
    (check_combination, (Schedule.named(zero_terminal_snr=True), "noise", "none"), "SNR is 0"),
    (check_combination, (Schedule.named("flow"), "v", "none"), "flow"),
    (check_combination, (COSINE, "flow", "none"), "flow"),
    (check_combination, (COSINE, "eps", "none"), "'eps'"), (check_combination, (COSINE, "v", "minsnr"), "'minsnr'"),
    (Schedule.named, {"name": "cosin"}, "'cosin'"), (Schedule.named, {"timesteps": 1}, "2 or more"),
    (some_sample, {"sampler": "euler"}, "'euler'"), (some_sample, {"steps": 11}, "1 to 10"),
    (some_sample, {"steps": 0}, "1 to 10"), (some_sample, {"sampler": "ddim", "eta": 1.5}, "eta"),
])  # fmt: skip
def test_what_cannot_be_trained_or_sampled_is_refused(call: Callable[..., Any], wrong: Any, said: str) -> None:
    assert said in (refused(call, **wrong) if isinstance(wrong, dict) else refused(call, *wrong))
