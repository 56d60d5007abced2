"""The mixing of SplitMix64 (Steele, Lea and Flood 2014), by which orders of samples, augmentations and noise are
functions of a key."""

from __future__ import annotations

from typing import Any

MASK64 = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # between two states of the generator


def mix64(x: Any) -> Any:
    """Scramble 64 bits, an int or each element of an array of uint64: the output of SplitMix64 for a state, a bijection
    of [0, 2^64)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)
