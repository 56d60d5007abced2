"""Small things that every engine does alike: cut a batch, weigh a loss, shut gradients off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .batch import BatchPlan


def split_batch(batch: Mapping[str, Any], plan: BatchPlan, device: torch.device) -> list[dict[str, Any]]:
    """``grad_accum_steps`` consecutive parts of a local batch. Tensors go to the device; lists are cut alike; what is
    neither is handed on as it is.

    Raises:
        ValueError: a tensor or list does not hold ``local_batch_size`` entries.
    """
    size = plan.micro_batch_size
    for key, value in batch.items():
        if isinstance(value, Tensor | list) and len(value) != plan.local_batch_size:
            raise ValueError(
                f"batch[{key!r}] holds {len(value)} samples, this process was to get {plan.local_batch_size}"
            )

    def part(value: Any, start: int) -> Any:
        if isinstance(value, Tensor):
            return value[start : start + size].to(device, non_blocking=True)
        return value[start : start + size] if isinstance(value, list) else value

    return [{key: part(value, index * size) for key, value in batch.items()} for index in range(plan.grad_accum_steps)]


def backward_weight(
    items: int | Tensor | None, total: int | Tensor | None, grad_accum_steps: int, world_size: int
) -> float | Tensor:
    """The factor of a loss such that the mean over the processes of the sum over backward calls is the update's."""
    if (items is None) != (total is None):
        raise ValueError("backward(loss, items=..., total=...) needs both or neither")
    if items is None or total is None:
        return 1.0 / grad_accum_steps
    return items * world_size / total


@contextmanager
def no_gradients(module: nn.Module) -> Iterator[None]:
    """Parameters that ask for gradients do not, for a while."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
