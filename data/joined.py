"""Several sets of samples as one."""

from __future__ import annotations

from typing import Any

from .contracts import Samples, skipped_of


class Joined:
    """The samples of two sets as one: those of `first` and behind them those of `second`. See `Samples`."""

    def __init__(self, first: Samples, second: Samples) -> None:
        self.first, self.second = first, second
        self.fingerprint = first.fingerprint + second.fingerprint
        self.skipped = "; ".join(filter(None, map(skipped_of, (first, second))))

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Any:
        samples, index = self._place(index)
        return samples.load(index, epoch, augment)

    def describe(self, index: int) -> str:
        samples, index = self._place(index)
        return samples.describe(index)

    def _place(self, index: int) -> tuple[Samples, int]:
        n = len(self.first)
        return (self.first, index) if index < n else (self.second, index - n)
