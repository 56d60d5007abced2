"""The samples of a run: the records of a source, of which fields decode the entries of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .bad_samples import NotASample
from .records.record import Source

if TYPE_CHECKING:
    from .fields import Field


class Samples:
    """A numbered set of samples. `fingerprint` is equal where equally many samples have the same names in the same
    order, and the same was found of them; `skipped` is a line about files that are no samples, or "".

    The field that makes a sample comes first in `fields`; it is decoded last, because what stands beside it is cheap.
    """

    def __init__(self, source: Source, fields: Sequence[Field]) -> None:
        self.source, self.fields = source, list(fields)
        self.describe, self.name, self.skipped = source.describe, source.name, source.skipped
        self.fingerprint = source.fingerprint + "".join(field.fingerprint for field in fields)

    def __len__(self) -> int:
        return len(self.source)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        """The sample's part of each entry of a batch, which depends only on the set's seed and the arguments; on the
        epoch only with `augment`. Raises OSError or ValueError, in one line, if it cannot be read."""
        record = self.source.record(index, epoch, augment)
        try:
            parts = [field.load(record, index, epoch, augment) for field in reversed(self.fields)]
        except NotASample as error:
            raise NotASample(f"--dataset: {self.describe(index)} {error}") from None
        return {key: value for part in reversed(parts) for key, value in part.items()}


class Joined(Samples):
    """The samples of two sets as one: those of `first` and behind them those of `second`."""

    def __init__(self, first: Samples, second: Samples) -> None:
        self.first, self.second = first, second
        self.fingerprint = first.fingerprint + second.fingerprint
        self.skipped = "; ".join(filter(None, (first.skipped, second.skipped)))

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        samples, index = self._place(index)
        return samples.load(index, epoch, augment)

    def describe(self, index: int) -> str:
        samples, index = self._place(index)
        return samples.describe(index)

    def _place(self, index: int) -> tuple[Samples, int]:
        n = len(self.first)
        return (self.first, index) if index < n else (self.second, index - n)
