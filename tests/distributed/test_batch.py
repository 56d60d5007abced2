"""How an update's samples are distributed, and the error that shows the arithmetic."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from distributed import Backend, UserMistake, plan_batches
from distributed.batch import BatchPlan
from distributed.options import Options

SIZES = [
    (batch, accumulation, world) for batch in range(1, 49) for accumulation in range(1, 6) for world in range(1, 8)
]


def test_a_plan_is_exact_or_refused_with_the_nearest_sizes_that_fit() -> None:
    for batch, accumulation, world in SIZES:
        if batch % (accumulation * world) == 0:
            plan = plan_batches(batch, accumulation, world)
            assert plan.micro_batch_size * accumulation * world == batch
            assert plan.local_batch_size * world == batch
            assert plan.local_batch_size == plan.micro_batch_size * accumulation
        else:
            with pytest.raises(UserMistake) as raised:
                plan_batches(batch, accumulation, world)
            suggested = re.findall(r"\d+", str(raised.value).split("use --batch_size")[1].split(", or")[0])
            fits = [size for size in range(1, 200) if size % (accumulation * world) == 0]
            nearest_below, nearest_above = [s for s in fits if s < batch][-1:], [s for s in fits if s > batch][:1]
            assert [int(size) for size in suggested] == nearest_below + nearest_above


def before(**changes: Any) -> dict[str, Any]:
    """What a start on 4 processes with micro-batches of 2 noted."""
    return {"batch_size": 8, "asked_grad_accum_steps": 1, "micro_batch_size": 2, "world_size": 4, **changes}


@pytest.mark.parametrize(("world_size", "steps"), [(4, 1), (2, 2), (1, 4), (8, 1)])
def test_fewer_processes_than_before_accumulate_more_and_more_do_not(world_size: int, steps: int) -> None:
    plan = plan_batches(8, 1, world_size, before())
    assert (plan.grad_accum_steps, plan.micro_batch_size) == (steps, 1 if world_size == 8 else 2)
    assert plan.asked_grad_accum_steps == (1 if steps > 1 else None)


def test_micro_batches_get_smaller_where_the_old_size_does_not_divide() -> None:
    noted = before(batch_size=60, micro_batch_size=20, world_size=3)
    plan = plan_batches(60, 1, 2, noted)
    assert (plan.grad_accum_steps, plan.micro_batch_size) == (2, 15)
    assert plan_batches(60, 1, 1, noted).micro_batch_size == 20


@pytest.mark.parametrize(
    "changes", [{"batch_size": 16}, {"asked_grad_accum_steps": 2}, {"micro_batch_size": None}, {"micro_batch_size": 0}]
)
def test_other_flags_or_a_note_that_cannot_be_read_change_nothing(changes: dict[str, Any]) -> None:
    assert plan_batches(8, 1, 2, before(**changes)).grad_accum_steps == 1
    assert plan_batches(8, 1, 2, {}).grad_accum_steps == 1


def test_parts_of_a_batch_are_exact_or_refused() -> None:
    for batch, accumulation, world in SIZES:
        for parts in (1, 2, 4, 6, 12):
            if parts % (accumulation * world) == 0 and batch % parts == 0:
                plan = plan_batches(batch, accumulation, world, batch_parts=parts)
                assert plan.micro_batch_size * parts == batch
                assert plan.grad_accum_steps * world == parts
                assert plan.grad_accum_steps % accumulation == 0
            else:
                with pytest.raises(UserMistake):
                    plan_batches(batch, accumulation, world, batch_parts=parts)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((7, 2, 2, 0),
         "--batch_size 7 is the number of samples per update over all processes and does not divide: "
         "7 / (2 processes x 2 accumulation steps) = 1.75; use --batch_size 4 or 8, or 28 for micro-batches of 7 on "
         "each process"),
        ((1_000_001, 1, 2, 0),  # the quotient does not look whole
         "--batch_size 1000001 is the number of samples per update over all processes and does not divide: "
         "1000001 / (2 processes x 1 accumulation steps) = 500000.5; use --batch_size 1000000 or 1000002"),
        ((8, 2, 4, 4),
         "--batch_parts 4 does not divide: 4 / (4 processes x 2 accumulation steps) = 0.5; use --batch_parts 8"),
        ((24, 1, 3, 8),
         "--batch_parts 8 does not divide: 8 / (3 processes x 1 accumulation steps) = 2.66666666667; "
         "use --batch_parts 6 or 9"),
        ((10, 1, 2, 4),
         "--batch_size 10 does not divide into --batch_parts 4: 10 / 4 = 2.5; use --batch_size 8 or 12"),
    ],
)  # fmt: skip
def test_the_error_shows_the_arithmetic_in_one_line(sizes: tuple[int, int, int, int], text: str) -> None:
    batch, accumulation, world, parts = sizes
    with pytest.raises(UserMistake) as raised:
        plan_batches(batch, accumulation, world, batch_parts=parts)
    assert str(raised.value) == text


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_parts_fix_the_micro_batch_whatever_ran_before(world_size: int) -> None:
    noted = before(batch_size=16, micro_batch_size=1, asked_grad_accum_steps=1)
    plan = plan_batches(16, 1, world_size, noted, batch_parts=8)
    assert (plan.micro_batch_size, plan.grad_accum_steps) == (2, 8 // world_size)
    assert plan.asked_grad_accum_steps == 1  # so that a later start without parts may take it up


def first_of(mine: BatchPlan, others: list[list[Any]], **own: Any) -> Any:
    """Rank 0 of a backend, which hears what the other ranks say. ``own``: its backend's own flags."""
    return SimpleNamespace(
        options=Options(mine), rank=0, comm=None, device=None, _own_flags=list(own.values()),
        flags_of_training=tuple(own), _collectives=SimpleNamespace(gather_objects=lambda found, *_: [found, *others]),
    )  # fmt: skip


def agreed(mine: BatchPlan, *others: list[int]) -> BatchPlan:
    """The plan of rank 0 when it has heard the other ranks: [batch, accumulation that was asked for, processes, parts,
    accumulation]; the precisions are the same."""
    all_ranks = [[*other[:-1], "fp32", "fp32", False, other[-1]] for other in others]
    backend = first_of(mine, all_ranks)
    Backend._agree_on_plan(backend)
    return backend.options.plan


def test_a_machine_that_joins_takes_over_the_accumulation_of_the_run() -> None:
    of_two = {"batch_size": 48, "asked_grad_accum_steps": 1, "micro_batch_size": 12}
    knows, joins = plan_batches(48, 1, 3, of_two), plan_batches(48, 1, 3)
    assert (knows.grad_accum_steps, joins.grad_accum_steps) == (2, 1)
    assert agreed(joins, [48, 1, 3, 0, 2], [48, 1, 3, 0, 2]) == agreed(knows, [48, 1, 3, 0, 1]) == knows
    with pytest.raises(ValueError, match=r"are \[48, 1, 3, 0, .* on rank 0, \[48, 2, 3, 0, .* on rank 1"):
        agreed(joins, [48, 2, 3, 0, 2])


@pytest.mark.parametrize("place", [4, 5, 6], ids=["precision", "reduce_precision", "compile"])
def test_a_process_with_another_precision_is_refused_before_sums_of_other_sizes_meet(place: int) -> None:
    theirs: list[Any] = [48, 1, 3, 0, "fp32", "fp32", False, 1]
    theirs[place] = "bf16" if place < 6 else True
    backend = first_of(plan_batches(48, 1, 3), [theirs])
    with pytest.raises(ValueError, match=r"reduce_precision, compile are \[48, .* on rank 0, \[48, .* on rank 1"):
        Backend._agree_on_plan(backend)


def test_a_process_with_another_flag_of_its_backend_is_refused_before_they_call_other_collectives() -> None:
    theirs = [48, 1, 3, 0, "fp32", "fp32", False, False, 1]
    backend = first_of(plan_batches(48, 1, 3), [theirs], fsdp_reshard_after_forward=True)
    with pytest.raises(ValueError, match=r"compile, fsdp_reshard_after_forward are .*True\] on rank 0, .* on rank 1"):
        Backend._agree_on_plan(backend)
