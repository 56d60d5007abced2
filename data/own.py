"""A user's own dataset, for the sets that are not yet fields of records."""

from __future__ import annotations

from typing import Any

from .bad_samples import NotASample
from .records.own import OwnData, OwnSource, as_array, as_bytes, data_of, part_of, shown

__all__ = ["OwnData", "OwnDataset", "as_array", "as_bytes", "data_of", "part_of", "shown"]


class OwnDataset(OwnSource):
    """Items in place of records."""

    def item(self, index: int, epoch: int = 0, augment: bool = False) -> Any:
        return self.record(index, epoch, augment)["item"]

    def refuse(self, index: int, found: Any, expected: str) -> NotASample:
        """The error for an item that is none that the script trains on; `expected` is what it has to be."""
        return NotASample(f"--dataset: {self.describe(index)} is {shown(found)}; it has to be {expected}")
