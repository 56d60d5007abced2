"""Random numbers as a function of a key, without global state: equal in all processes, machines and numpy versions."""

from __future__ import annotations

import hashlib

from tandem.hashing import GOLDEN_GAMMA, MASK64, mix64


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
