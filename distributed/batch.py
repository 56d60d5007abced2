"""One meaning of batch size: samples per optimizer update, over all processes and accumulation steps."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UserMistake


@dataclass(frozen=True)
class BatchPlan:
    """global_batch_size = micro_batch_size x grad_accum_steps x world_size, always exactly."""

    global_batch_size: int
    grad_accum_steps: int
    world_size: int

    @property
    def local_batch_size(self) -> int:
        """Samples that one process sees per update."""
        return self.global_batch_size // self.world_size

    @property
    def micro_batch_size(self) -> int:
        """Samples in one forward pass of one process."""
        return self.local_batch_size // self.grad_accum_steps


def plan_batches(global_batch_size: int, grad_accum_steps: int, world_size: int) -> BatchPlan:
    """The plan, or one line with the arithmetic and the nearest sizes that fit.

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
    return BatchPlan(global_batch_size, grad_accum_steps, world_size)
