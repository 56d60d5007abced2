"""Are the copies of a model on all processes the same, bit for bit?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .errors import TrainingStopped

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(tensors: dict[str, Tensor]) -> dict[str, int]:
    """A number per tensor that depends on every bit of it; the sum of integers does not depend on their order."""
    sums = [
        t.detach().contiguous().view(-1).view(_INTEGERS[t.element_size()]).sum(dtype=torch.int64)
        for t in tensors.values()
    ]
    return dict(zip(tensors, torch.stack(sums).tolist(), strict=True)) if sums else {}


def check_replicas(module: nn.Module, when: str, gather_objects: Callable[[Any], list[Any]]) -> None:
    """Collective: compare every weight and buffer with the root's.

    Raises:
        TrainingStopped: naming the first tensor that differs, and on which ranks.
    """
    by_rank = gather_objects(checksums(dict(module.state_dict())))
    for name, expected in by_rank[0].items():
        if differing := [rank for rank, sums in enumerate(by_rank) if sums.get(name) != expected]:
            raise TrainingStopped(
                f"{when}, {name} on rank {differing[0]} is not what it is on rank 0 (differing ranks: {differing})"
            )
