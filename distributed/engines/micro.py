"""Small things that every engine does alike: cut a batch, weigh a loss, shut gradients off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import BatchPlan


def split_batch(batch: Mapping[str, Any], plan: BatchPlan, device: torch.device) -> list[dict[str, Any]]:
    """``grad_accum_steps`` consecutive parts of a local batch. Tensors go to the device; lists are cut alike; what is
    neither is handed on as it is. With ``batch_parts``, parts are copies: where one begins in the local batch depends
    on the number of processes, and products of matrices may round otherwise at another address.

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
            return value[start : start + size].to(device, non_blocking=True, copy=bool(plan.batch_parts))
        return value[start : start + size] if isinstance(value, list) else value

    return [{key: part(value, index * size) for key, value in batch.items()} for index in range(plan.grad_accum_steps)]


def backward_weight(items: int | Tensor | None, total: int | Tensor | None, plan: BatchPlan) -> float | Tensor:
    """The factor of a loss such that the sum over all backward calls of all processes is the update's. It does not
    depend on how many processes share the parts of the batch."""
    if (items is None) != (total is None):
        raise ValueError("backward(loss, items=..., total=...) needs both or neither")
    if items is None or total is None:
        return 1.0 / (plan.grad_accum_steps * plan.world_size)
    return items / total


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm over all tensors, 0-d fp64: a sum of millions of squares in fp32 would depend on its order in the fifth
    digit."""
    return torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) ** 2 for g in gradients]).sum().sqrt()


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """What to divide gradients of this norm by so that it is at most ``max_norm`` (0: no limit); 0-d fp64, >= 1."""
    return ((norm + 1e-6) / max_norm).clamp(min=1.0) if max_norm > 0 else torch.ones_like(norm)


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
