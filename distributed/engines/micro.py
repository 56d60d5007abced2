"""What every engine computes alike: parts of a batch, the weight of a loss, the norm of a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..batch import BatchPlan

_PIECE = 2**17  # numbers


def split_batch(batch: Mapping[str, Any], plan: BatchPlan) -> list[dict[str, Any]]:
    """``grad_accum_steps`` consecutive parts of a local batch. Tensors and lists are cut, and every part gets all
    other values unchanged. With ``batch_parts``, parts are copies: where a part begins in the local
    batch depends on the number of processes, and matrix products may round differently at another address.

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
            cut = value[start : start + size]
            return cut.clone() if plan.batch_parts else cut
        return value[start : start + size] if isinstance(value, list) else value

    return [{key: part(value, index * size) for key, value in batch.items()} for index in range(plan.grad_accum_steps)]


def backward_weight(items: int | Tensor | None, total: int | Tensor | None, plan: BatchPlan) -> float | Tensor:
    """The factor of a loss, chosen so that the sum of the weighted losses over all backward calls of all processes is
    the update's loss. The factor does not depend on how many processes share the parts of the batch."""
    if (items is None) != (total is None):
        raise ValueError("backward(loss, items=..., total=...) needs both or neither")
    if items is None or total is None:
        return 1.0 / (plan.grad_accum_steps * plan.world_size)
    return items / total


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm over all tensors, 0-d fp64: in fp32 the fifth digit would depend on the order of summation."""
    # In pieces that fit into a CPU's cache, because there PyTorch first makes an fp64 copy of each.
    pieces = [piece for gradient in gradients for piece in gradient.flatten().split(_PIECE)]
    return torch.stack(torch._foreach_norm(pieces, dtype=torch.float64)).square().sum().sqrt()


def all_finite(gradients: list[Tensor]) -> Tensor:
    """Whether no number in all tensors is infinite or NaN, 0-d bool. In half the time of the norm, which is not finite
    in the same cases: that of finite fp32 numbers does not overflow in fp64."""
    return torch.isfinite(torch.stack([end for gradient in gradients for end in torch.aminmax(gradient)])).all()


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """Gradients of norm ``norm`` divided by this have at most norm ``max_norm`` (0: no limit); 0-d fp64, >= 1."""
    return ((norm + 1e-6) / max_norm).clamp(min=1.0) if max_norm > 0 else torch.ones_like(norm)
