"""Random numbers as a function of seed, step and index, computed on the device without a generator."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

Integer = TypeVar("Integer", int, Tensor)

_MASK = 0xFFFFFFFF
_MULTIPLIER = 0x45D9F3B  # odd and below 2^31: its product with 32 bits fits an int64


def mix(x: Integer) -> Integer:
    """A one-to-one scrambling of 32-bit integers, by xor-shifts and multiplications."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * _MULTIPLIER & _MASK
    return (x >> 16) ^ x


def random_indices(count: int, bound: int, seed: int, step: int, device: torch.device) -> Tensor:
    """int64 (count,) in [0, bound), bound < 2^32; the k-th depends on (seed, step, k) only."""
    key = mix(mix(seed & _MASK) ^ (step & _MASK))
    return mix(mix(torch.arange(count, device=device)) ^ key) % bound
