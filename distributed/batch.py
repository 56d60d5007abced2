"""The batch size, in samples per optimizer update, divided over processes and accumulation steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.io.reading import counted

from .errors import UserMistake


@dataclass(frozen=True)
class BatchPlan:
    """The sizes of an update: global_batch_size = micro_batch_size x grad_accum_steps x world_size."""

    global_batch_size: int
    grad_accum_steps: int
    world_size: int
    #: The flag --grad_accum_steps. A run on fewer processes than before, or with --batch_parts, takes more steps.
    asked_grad_accum_steps: int
    #: --batch_parts: equal parts in which the batch is computed on any number of processes; 0: no parts.
    batch_parts: int = 0

    @property
    def local_batch_size(self) -> int:
        """Samples that one process sees per update."""
        return self.global_batch_size // self.world_size

    @property
    def micro_batch_size(self) -> int:
        """Samples in one forward pass of one process."""
        return self.local_batch_size // self.grad_accum_steps

    def summary(self) -> str:
        """The arithmetic in one line, and the reason if it differs from the flags."""
        text = f"batch {self.global_batch_size}"
        if self.grad_accum_steps * self.world_size > 1:
            processes = counted(self.world_size, "process")
            text += f" = {self.micro_batch_size} x {self.grad_accum_steps} accumulation x {processes}"
        if self.batch_parts:
            text += f"; in {self.batch_parts} parts, with the same bits on any number of processes"
        elif self.grad_accum_steps > self.asked_grad_accum_steps:
            text += (
                f" (--grad_accum_steps {self.asked_grad_accum_steps}, but there are fewer processes than before: more "
                "accumulation, so that none holds more samples at a time)"
            )
        return text


def plan_batches(
    global_batch_size: int,
    grad_accum_steps: int,
    world_size: int,
    previous_batch_plan: Mapping[str, Any] | None = None,
    batch_parts: int = 0,
) -> BatchPlan:
    """Distribute the samples of an update over processes and accumulation steps.

    ``previous_batch_plan`` is the ``Backend.describe`` of the run's last start. If that start had more processes, and
    the same batch and flags, each process now gets more samples per update. It accumulates over more steps then, so
    that it holds no more samples at a time.

    ``batch_parts`` above 0 fixes the micro-batch: every process accumulates over its share of the parts, whose number
    must be a multiple of ``grad_accum_steps``.

    Raises:
        UserMistake: the batch or the parts do not divide by processes x accumulation steps, or the batch does not
            divide by the parts; the line shows the arithmetic and the nearest sizes that fit.
    """
    if batch_parts:
        return _plan_parts(global_batch_size, grad_accum_steps, world_size, batch_parts)
    note, size_hint = " is the number of samples per update over all processes and", ""
    if grad_accum_steps > 1:
        size = global_batch_size * grad_accum_steps * world_size
        size_hint = f", or {size} for micro-batches of {global_batch_size} on each process"
    _check_divides("--batch_size", global_batch_size, grad_accum_steps, world_size, note, size_hint)
    accumulation_steps = _needed_steps(global_batch_size, grad_accum_steps, world_size, previous_batch_plan or {})
    return BatchPlan(global_batch_size, accumulation_steps, world_size, asked_grad_accum_steps=grad_accum_steps)


def _plan_parts(batch_size: int, asked_steps: int, world_size: int, parts: int) -> BatchPlan:
    _check_divides("--batch_parts", parts, asked_steps, world_size)
    if batch_size % parts:
        raise UserMistake(
            f"--batch_size {batch_size} does not divide into --batch_parts {parts}: {batch_size} / {parts} = "
            f"{batch_size / parts:.12g}; use --batch_size {_nearest(batch_size, parts)}"
        )
    return BatchPlan(batch_size, parts // world_size, world_size, asked_grad_accum_steps=asked_steps, batch_parts=parts)


def _check_divides(flag: str, number: int, steps: int, world_size: int, note: str = "", hint: str = "") -> None:
    unit = steps * world_size
    if number % unit:
        divisor = f"({counted(world_size, 'process')} x {counted(steps, 'accumulation step')})"
        raise UserMistake(
            f"{flag} {number}{note} does not divide: {number} / {divisor} = {number / unit:.12g}; use {flag} "
            f"{_nearest(number, unit)}{hint}"
        )


def _nearest(number: int, unit: int) -> str:
    """The multiples of ``unit`` below and above ``number``."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def _needed_steps(batch_size: int, asked_steps: int, world_size: int, previous: Mapping[str, Any]) -> int:
    """The fewest accumulation steps with which micro-batches are no larger than in the ``previous`` plan, if that had
    the same flags."""
    flags = (batch_size, asked_steps)
    has_same_flags = (previous.get("batch_size"), previous.get("asked_grad_accum_steps")) == flags
    limit = previous.get("micro_batch_size")
    if not (has_same_flags and isinstance(limit, int) and limit > 0):
        return asked_steps
    local = batch_size // world_size
    return next(steps for steps in range(asked_steps, local + 1) if local % steps == 0 and local // steps <= limit)
