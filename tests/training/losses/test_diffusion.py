"""Draws of the diffusion objectives: functions of the seed, the name, the step and the place in the global batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tandem.training.losses.diffusion import DiffusionDraws, LowresDraws
from tandem.training.metrics.unets import UnetErrors
from tests.processes import Process, on_processes

SHAPE = (3, 8, 8)
EVERYTHING = {
    "image_drop": 0.1, "text_drop": 0.5,
    "lowres": LowresDraws(1000, blur_sigma=(0.4, 0.8)),
}  # fmt: skip
NAMES = {
    "times", "noise", "keep_image", "keep_text", "lowres_time", "lowres_noise", "blur_sigma",
}  # fmt: skip


def draws_of(name: str = "unet1", seed: int = 0, timesteps: int = 1000, **options) -> DiffusionDraws:
    return DiffusionDraws(seed, name, timesteps, **{**EVERYTHING, **options})


def flat(draws: dict[str, Tensor]) -> Tensor:
    return torch.cat(
        [draw.double().flatten(1) if draw.ndim > 1 else draw.double()[:, None] for draw in draws.values()], 1
    )


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_draws_are_the_same_however_the_batch_is_cut(parts: int) -> None:
    draws = draws_of()
    whole = draws(3, range(32), 32, SHAPE)
    cut = [draws(3, range(first, first + 32 // parts), 32, SHAPE) for first in range(0, 32, 32 // parts)]
    assert whole.keys() == NAMES
    for name, draw in whole.items():
        assert torch.equal(torch.cat([part[name] for part in cut]), draw), name


def test_draws_differ_between_seeds_networks_steps_and_positions_and_uses() -> None:
    draws = draws_of()
    first = draws(0, range(32), 32, SHAPE)
    others = [
        draws_of(seed=1)(0, range(32), 32, SHAPE), draws_of("unet2")(0, range(32), 32, SHAPE),
        draws(1, range(32), 32, SHAPE), draws_of().fixed(range(32), 32, SHAPE),
    ]  # fmt: skip
    for name, draw in first.items():
        assert not any(torch.equal(draw, other[name]) for other in others), name
    noise = torch.stack([first["noise"], *(other["noise"] for other in others)]).flatten(0, 1).flatten(1)
    # 192 numbers a row: correlations of independent rows have deviation 0.072; 6 of them among 12720 pairs.
    correlation = torch.corrcoef(noise).fill_diagonal_(0)
    assert correlation.abs().max() < 6 / math.sqrt(192)
    both = torch.stack([first["noise"].flatten(), first["lowres_noise"].flatten()])
    assert torch.corrcoef(both)[0, 1].abs() < 5 / math.sqrt(both.shape[1])


@pytest.mark.parametrize("batch_size", [32, 50])
def test_stratified_times_come_once_from_each_stratum_of_the_global_batch(batch_size: int) -> None:
    draws, orders = draws_of(timesteps=10 * batch_size), set()
    inside: list[Tensor] = []
    for step in range(20):
        times = torch.cat([
            draws(step, positions, batch_size, SHAPE)["times"]
            for positions in (range(batch_size // 2), range(batch_size // 2, batch_size))
        ])  # fmt: skip
        assert (times // 10).sort().values.tolist() == list(range(batch_size))
        orders.add(tuple((times // 10).tolist()))
        inside.append(times % 10)
    assert len(orders) == 20
    counts = torch.cat(inside).bincount(minlength=10)
    assert (counts - 2 * batch_size).abs().max() < 5 * math.sqrt(2 * batch_size), "uniform in the stratum"


@pytest.mark.parametrize("stratified", [False, True])
def test_logit_normal_times_have_their_distribution(stratified: bool) -> None:
    draws = draws_of(logit_normal=(-0.5, 1.5), stratified=stratified, lowres=None)
    times = draws(0, range(2000), 2000, (1,))["times"]
    n = (((times + 0.5) / 1000).logit() + 0.5) / 1.5
    quantiles = torch.linspace(0.05, 0.95, 19)
    # 2000 independent numbers know a quantile's probability to 0.011; strata know it to 1 / 2000, levels to 0.001.
    found = (n[:, None] < torch.special.ndtri(quantiles)).float().mean(0)
    assert (found - quantiles).abs().max() < (0.003 if stratified else 0.045)
    assert times.min() >= 0 and times.max() <= 999


def test_conditions_are_dropped_and_coins_are_thrown_for_each_picture() -> None:
    drawn = draws_of(image_drop=0.4)(0, range(2000), 2000, (1,), (1,))
    blurred = drawn["blur_sigma"] > 0
    # Of 2000 draws with probability p, the fraction has deviation sqrt(p (1 - p) / 2000), at most 0.0112.
    for draw, probability in (
        (drawn["keep_image"], 0.6), (drawn["keep_text"], 0.5), (blurred, 0.5),
        (drawn["keep_image"] & drawn["keep_text"], 0.3), (drawn["keep_text"] & blurred, 0.25),
        (drawn["keep_text"] & drawn["keep_image"], 0.3),
    ):  # fmt: skip
        assert draw.float().mean().item() == pytest.approx(probability, abs=0.045)
    sigma = drawn["blur_sigma"][blurred]
    assert 0.4 <= sigma.min() < 0.41 and 0.79 < sigma.max() <= 0.8
    assert drawn["lowres_time"].min() < 10 and 990 <= drawn["lowres_time"].max() <= 999


def test_validation_has_fixed_draws_that_are_spread_over_the_split_and_drops_nothing() -> None:
    draws = draws_of(timesteps=400)
    whole = draws.fixed(range(40), 40, SHAPE)
    assert (whole["times"] // 10).sort().values.tolist() == list(range(40))
    for name in ("keep_image", "keep_text"):
        assert whole[name].all()
    cut = [draws_of(timesteps=400).fixed(range(first, first + 10), 40, SHAPE) for first in range(0, 40, 10)]
    assert all(torch.equal(torch.cat([part[name] for part in cut]), whole[name]) for name in NAMES)


@pytest.mark.parametrize("logit_normal", [None, (0.7, 1.0)])
def test_errors_are_pooled_by_quarters_that_are_equally_likely(logit_normal: tuple[float, float] | None) -> None:
    draws = draws_of(logit_normal=logit_normal, lowres=None)
    times = draws(0, range(400), 400, (1,))["times"]

    def work(here: Process) -> dict[str, float]:
        measured = UnetErrors({1: draws.quarters(), 2: torch.tensor([2, 4, 6])})
        for first in range(50 * here.rank, 400, 100):
            part = times[first : first + 50]
            measured.add(1, part.float(), part)
        return measured.result(here.sum)

    result = on_processes(2, work)[0]
    quarters = times.double().sort().values.view(4, 100).mean(1)
    assert result["unet1/error"] == pytest.approx(quarters.mean().item())
    # A level on an edge belongs to one quarter, its pictures may be of two.
    assert [result[f"unet1/q{n}"] for n in range(4)] == pytest.approx(quarters.tolist(), abs=1.0)


def test_a_quarter_begins_at_its_edge_and_one_without_pictures_is_nan() -> None:
    measured = UnetErrors({2: torch.tensor([2, 4, 6])})
    measured.add(2, torch.tensor([1.0, 3.0, 5.0, 7.0, 8.0]), torch.tensor([0, 1, 2, 6, 7]))
    found = measured.result()
    assert list(found) == ["loss", "unet2/error", *(f"unet2/q{n}" for n in range(4))]
    assert list(found.values()) == pytest.approx([4.8, 4.8, 2.0, 5.0, math.nan, 7.5], nan_ok=True)
