"""How an update's samples are distributed, the error that shows the arithmetic, and that all processes plan alike."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from tandem.distributed import Backend, UserMistake, plan_batches
from tests.data.helpers import one_line
from tests.processes import on_backends

SIZES = [
    (batch, accumulation, world) for batch in range(1, 49) for accumulation in range(1, 6) for world in range(1, 8)
]


def suggested(*sizes: int) -> list[int]:
    """What the refusal of a plan says that fits."""
    batch, accumulation, world, *parts = sizes
    with pytest.raises(UserMistake) as raised:
        plan_batches(batch, accumulation, world, None, *parts)
    return [int(size) for size in re.findall(r"\d+", str(raised.value).split("; use --")[1].split(", or")[0])]


def nearest(size: int, unit: int) -> list[int]:
    below = size // unit * unit
    return [below, below + unit] if below else [unit]


def test_a_plan_is_exact_or_refused_with_the_nearest_sizes_that_fit() -> None:
    for batch, accumulation, world in SIZES:
        if batch % (accumulation * world) == 0:
            plan = plan_batches(batch, accumulation, world)
            assert plan.micro_batch_size * accumulation * world == plan.local_batch_size * world == batch
        else:
            assert suggested(batch, accumulation, world) == nearest(batch, accumulation * world)


def test_parts_of_a_batch_are_exact_or_refused_with_the_nearest_that_fit() -> None:
    for batch, accumulation, world in SIZES:
        for parts in (1, 2, 4, 6, 12):
            if parts % (accumulation * world) == 0 and batch % parts == 0:
                plan = plan_batches(batch, accumulation, world, batch_parts=parts)
                assert plan.micro_batch_size * parts == batch
                assert plan.grad_accum_steps * world == parts and plan.grad_accum_steps % accumulation == 0
            else:
                whole = accumulation * world
                expected = nearest(batch, parts) if parts % whole == 0 else nearest(parts, whole)
                assert suggested(batch, accumulation, world, parts) == expected


@pytest.mark.parametrize(
    ("sizes", "facts"),
    [
        ((7, 2, 2, 0), ["--batch_size 7 ", "7 / (2 processes x 2 accumulation steps) = 1.75;", "or 28 for micro"]),
        ((1_000_001, 1, 2, 0), ["1000001 / (2 processes x 1 acc", "= 500000.5;"]),  # the quotient does not look whole
        ((24, 1, 3, 8), ["--batch_parts 8 ", "8 / (3 processes x 1 accumulation step) = 2.66666666667;"]),
        ((10, 1, 2, 4), ["--batch_size 10 ", "--batch_parts 4: 10 / 4 = 2.5;"]),
    ],
)
def test_the_error_shows_the_arithmetic_in_one_line(sizes: tuple[int, int, int, int], facts: list[str]) -> None:
    batch, accumulation, world, parts = sizes
    said = one_line(plan_batches, batch, accumulation, world, batch_parts=parts, kind=UserMistake)
    assert all(fact in said for fact in facts)


def before(**changes: Any) -> dict[str, Any]:
    """What a start on 4 processes with micro-batches of 2 noted."""
    return {"batch_size": 8, "asked_grad_accum_steps": 1, "micro_batch_size": 2, "world_size": 4, **changes}


LARGER = {"batch_size": 60, "micro_batch_size": 20, "world_size": 3}


@pytest.mark.parametrize(
    ("asked", "noted", "steps", "micro"),
    [
        # Fewer processes than before accumulate more, and more do not.
        *(((8, 1, world), before(), steps, micro)
          for world, steps, micro in ((4, 1, 2), (2, 2, 2), (1, 4, 2), (8, 1, 1))),
        # Micro-batches get smaller where the old size does not divide.
        ((60, 1, 2), before(**LARGER), 2, 15), ((60, 1, 1), before(**LARGER), 3, 20),
        ((8, 2, 2), before(asked_grad_accum_steps=2), 2, 2),
        # Other flags, or a note that cannot be read, change nothing.
        *(((8, 1, 2), before(**other), 1, 4)
          for other in ({"batch_size": 16}, {"asked_grad_accum_steps": 2}, {"micro_batch_size": None},
                        {"micro_batch_size": 0})),
        ((8, 1, 2), {}, 1, 4),
        # Parts fix the micro-batch whatever ran before.
        *(((16, 1, world, 8), before(batch_size=16, micro_batch_size=1), 8 // world, 2) for world in (1, 2, 4, 8)),
    ],
    ids=str,
)  # fmt: skip
def test_a_run_that_goes_on_elsewhere_holds_no_more_samples_at_a_time(
    asked: tuple[int, ...], noted: dict[str, Any], steps: int, micro: int
) -> None:
    batch_size, accumulation, world, *parts = asked
    plan = plan_batches(batch_size, accumulation, world, noted, *parts)
    assert (plan.grad_accum_steps, plan.micro_batch_size) == (steps, micro)
    assert plan.asked_grad_accum_steps == accumulation, "so that a later start, also one without parts, may take it up"


def agreed(backend: Backend, *, of_the_last: dict[str, Any], of_the_backend: tuple[bool, ...] = (True,) * 3) -> Any:
    """The plan of a process when it has entered, of which the last one has other options."""
    processes = backend.processes
    if processes.rank == 2:
        backend.options = replace(backend.options, **of_the_last)
    # What a backend does while it is entered, and its own flags, of which these processes have none.
    backend.training_flags, backend._training_flag_values = ("offload",), [of_the_backend[processes.rank]]  # type: ignore[misc]
    backend._agree_on_plan(processes.comm)
    return backend.options.plan


def test_a_machine_that_joins_takes_over_the_accumulation_of_the_run() -> None:
    of_two = {"batch_size": 48, "asked_grad_accum_steps": 1, "micro_batch_size": 12}
    knows = plan_batches(48, 1, 3, of_two)
    assert knows.grad_accum_steps == 2 and plan_batches(48, 1, 3).grad_accum_steps == 1
    assert on_backends(3, lambda p: agreed(p, of_the_last={"plan": knows}), batch_size=48) == [knows] * 3


@pytest.mark.parametrize(("other", "value"), [
    ({"plan": plan_batches(48, 2, 3)}, 2), ({"precision": "bf16"}, "bf16"), ({"reduce_precision": "bf16"}, "bf16"),
    ({"compile": True}, True), ({}, False),
], ids=str)  # fmt: skip
def test_processes_that_would_call_other_collectives_are_refused(other: dict[str, Any], value: Any) -> None:
    flags = (True, True, bool(other))
    errors = on_backends(
        3, lambda p: agreed(p, of_the_last=other, of_the_backend=flags), batch_size=48, catches=ValueError
    )
    for rank, said in enumerate(map(str, errors)):
        assert f"on rank {rank}" in said and "offload" in said and repr(value) in said, said
