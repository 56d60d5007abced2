"""Checks that the copies of a model on all processes are the same, bit for bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.distributed.errors import TrainingStopped

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_ROW_LENGTH = 1024
_MAX_ROWS = 2**21  # up to so many, the checksum tells all places apart; larger tensors work, too


def checksums(tensors: dict[str, Tensor]) -> dict[str, int]:
    """By name, an integer that depends on every bit of a tensor and on its position. It is a sum of integers, which
    does not depend on the order, so it is the same on every device."""
    sums = [_checksum(tensor.detach()) for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack(sums).tolist(), strict=True)) if sums else {}


def digest(sums: dict[str, int]) -> str:
    """A short digest of ``checksums`` (BLAKE2b, hexadecimal)."""
    return hashlib.blake2b(json.dumps(sums).encode(), digest_size=16).hexdigest()


def _checksum(tensor: Tensor) -> Tensor:
    bits = tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    full_rows = bits[: bits.numel() // _ROW_LENGTH * _ROW_LENGTH].view(-1, _ROW_LENGTH)
    last_row = F.pad(bits[full_rows.numel() :], (0, _ROW_LENGTH - bits.numel() % _ROW_LENGTH))
    # Sums over rows and over columns, each weighted by its index: few numbers, exact modulo 2^64, two passes. A
    # number's weight is (2 row + 1) + 2^22 (2 column + 1), a different one for each of 2^31 places. Weights are
    # odd, so a changed number changes the checksum. Two numbers that swap places change it by (difference of the
    # weights, no multiple of 2^33) x (difference of the numbers, below 2^32), which is no multiple of 2^64.
    rows = torch.cat([full_rows.sum(1, dtype=torch.int64), last_row.sum(dtype=torch.int64)[None]])
    columns = full_rows.sum(0, dtype=torch.int64) + last_row
    return _weighted_sum(rows) + 2 * _MAX_ROWS * _weighted_sum(columns)


def _weighted_sum(sums: Tensor) -> Tensor:
    weights = 2 * torch.arange(len(sums), device=sums.device) + 1
    return (sums * weights).sum()


def check_replicas(module: nn.Module, when: str, gather_objects: Callable[[Any], list[Any]]) -> None:
    """Compare every weight and buffer with the root's. Collective.

    Raises:
        TrainingStopped: a tensor differs; the text names the first one and the ranks.
    """
    own_checksums = checksums(dict(module.state_dict()))
    if len(set(gather_objects(digest(own_checksums)))) == 1:
        return
    checksums_by_rank = gather_objects(own_checksums)
    for name, expected in checksums_by_rank[0].items():
        if ranks := [rank for rank, sums in enumerate(checksums_by_rank) if sums.get(name) != expected]:
            raise TrainingStopped(
                f"{when}, {name} on rank {ranks[0]} is not what it is on rank 0 (differing ranks: {ranks})"
            )
