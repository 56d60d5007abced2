"""One meaning of batch size, and an error that shows its arithmetic."""

from __future__ import annotations

import re

import pytest

from distributed import UserMistake, plan_batches

SIZES = [
    (batch, accumulation, world) for batch in range(1, 49) for accumulation in range(1, 6) for world in range(1, 8)
]


def test_a_plan_is_exact_or_refused() -> None:
    for batch, accumulation, world in SIZES:
        if batch % (accumulation * world) == 0:
            plan = plan_batches(batch, accumulation, world)
            assert plan.micro_batch_size * accumulation * world == batch
            assert plan.local_batch_size * world == batch
            assert plan.local_batch_size == plan.micro_batch_size * accumulation
        else:
            with pytest.raises(UserMistake):
                plan_batches(batch, accumulation, world)


def test_the_suggested_sizes_fit_and_none_that_fits_is_nearer() -> None:
    for batch, accumulation, world in SIZES:
        try:
            plan_batches(batch, accumulation, world)
        except UserMistake as mistake:
            suggestions = [int(size) for size in re.findall(r"\d+", str(mistake).split("use --batch_size")[1])]
            for size in suggestions:
                plan_batches(size, accumulation, world)
            fits = [size for size in range(1, 200) if size % (accumulation * world) == 0]
            nearest_below, nearest_above = [s for s in fits if s < batch][-1:], [s for s in fits if s > batch][:1]
            assert suggestions == nearest_below + nearest_above


def test_the_error_shows_the_arithmetic_in_one_line() -> None:
    with pytest.raises(UserMistake) as raised:
        plan_batches(7, 2, 2)
    assert str(raised.value) == (
        "--batch_size 7 is the number of samples per update over all processes and does not divide: "
        "7 / (2 processes x 2 accumulation steps) = 1.75; use --batch_size 4 or 8"
    )


def test_a_quotient_that_is_not_whole_does_not_look_whole() -> None:
    with pytest.raises(UserMistake, match=re.escape("= 500000.5;")):
        plan_batches(1_000_001, 1, 2)
