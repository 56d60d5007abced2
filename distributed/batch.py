"""One meaning of batch size: samples per optimizer update, over all processes and accumulation steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import UserMistake


@dataclass(frozen=True)
class BatchPlan:
    """global_batch_size = micro_batch_size x grad_accum_steps x world_size, always exactly."""

    global_batch_size: int
    grad_accum_steps: int
    world_size: int
    #: What was asked for, where a run goes on with fewer processes and accumulates more instead.
    asked_grad_accum_steps: int | None = None

    @property
    def local_batch_size(self) -> int:
        """Samples that one process sees per update."""
        return self.global_batch_size // self.world_size

    @property
    def micro_batch_size(self) -> int:
        """Samples in one forward pass of one process."""
        return self.local_batch_size // self.grad_accum_steps


def plan_batches(
    global_batch_size: int, grad_accum_steps: int, world_size: int, last_start: Mapping[str, Any] | None = None
) -> BatchPlan:
    """The plan, or one line with the arithmetic and the nearest sizes that fit.

    ``last_start`` describes the processes that trained this run before. If more of them trained the same batch with the
    same flags, each now gets more samples per update; accumulation grows so that it holds no more of them at a time.

    Raises:
        UserMistake: the batch does not divide by processes x accumulation steps.
    """
    unit = grad_accum_steps * world_size
    if global_batch_size % unit:
        below = global_batch_size // unit * unit
        fits = f"{below} or {below + unit}" if below else f"{unit}"
        raise UserMistake(
            f"--batch_size {global_batch_size} is the number of samples per update over all processes and does not "
            f"divide: {global_batch_size} / ({world_size} processes x {grad_accum_steps} accumulation steps) = "
            f"{global_batch_size / unit:.12g}; use --batch_size {fits}"
        )
    needed = _needed_steps(global_batch_size, grad_accum_steps, world_size, last_start or {})
    if needed > grad_accum_steps:
        return BatchPlan(global_batch_size, needed, world_size, asked_grad_accum_steps=grad_accum_steps)
    return BatchPlan(global_batch_size, grad_accum_steps, world_size)


def _needed_steps(batch_size: int, asked: int, world_size: int, before: Mapping[str, Any]) -> int:
    """Accumulation steps that leave micro-batches no larger than they were."""
    same_flags = (before.get("batch_size"), before.get("asked_grad_accum_steps")) == (batch_size, asked)
    micro = before.get("micro_batch_size")
    if not (same_flags and isinstance(micro, int) and micro > 0):
        return asked
    local = batch_size // world_size
    return next(steps for steps in range(asked, local + 1) if local % steps == 0 and local // steps <= micro)
