"""Random numbers as a function of a key, without global state: equal in all processes, machines and numpy versions.
Orders of samples, augmentations and noise are drawn by SplitMix64 (Steele, Lea and Flood 2014)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, TypeVar

Key = tuple[int | str, ...]  # of `Draws`
T = TypeVar("T")

MASK64 = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # is added to the generator's state for each number


def mix64(x: Any) -> Any:
    """Scramble 64 bits, an int or each element of an array of uint64: the output of SplitMix64 for a state, a bijection
    of [0, 2^64)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def derive_key(*parts: int | str) -> int:
    """Parts such as ("flip", seed, epoch, index) -> a 64-bit key. Different parts give independent keys."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


class Draws:
    """An endless sequence of uniform numbers that depends only on the parts of its key (SplitMix64)."""

    def __init__(self, *parts: int | str) -> None:
        self._state = derive_key(*parts)

    def bits(self) -> int:
        """The next 64 bits."""
        self._state = (self._state + GOLDEN_GAMMA) & MASK64
        return mix64(self._state)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """A float in [low, high), of 53 random bits."""
        return low + (high - low) * ((self.bits() >> 11) * 2.0**-53)

    def below(self, n: int) -> int:
        """An int in [0, n). Biased by less than n / 2^64."""
        return (self.bits() * n) >> 64

    def choice(self, options: Iterable[T]) -> T:
        """One of the options."""
        candidates = list(options)
        return candidates[self.below(len(candidates))]
