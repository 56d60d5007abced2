"""The names of samples in the index of a store."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from tandem.data.sources.files import redact
from tandem.data.sources.manifest import ManifestSource
from tandem.data.sources.record import RecordSource
from tandem.data.sources.rows import time_ranges
from tandem.data.sources.tar import TarSource
from tandem.hashing import derive_key

from .output import names_sha256

PART_KEYS = {"start_seconds": "from", "end_seconds": "to"}  # of the part of a file that a manifest states


class SampleNames:
    """The entries by which the index of a store names samples: "path", and `PART_KEYS` where a manifest states a part
    of a file. No two are equal, unless a manifest repeats a row: if members of several tars share a name, the path of
    each begins with that of its tar, relative to the folder of the tars. They are computed when they are needed.

    Args:
        name: index -> the path of a sample, which members of several tars may share.

    sha256: Of the paths that `name` gives, and of the parts.
    """

    def __init__(self, source: RecordSource, name: Callable[[int], str]) -> None:
        self._source, self._name, indices = source, name, range(len(source))
        self.sha256 = names_sha256(itertools.chain(map(name, indices), time_ranges(source)))
        if isinstance(source, TarSource) and not all_differ(map(name, indices)):
            prefix = os.path.commonprefix([*map(redact, source.paths)])  # noqa: RUF071  (cut at a folder below)
            folder = "".join(prefix.rpartition("/")[:2])
            self._name = lambda index: source.describe(index).removeprefix(folder)

    def __len__(self) -> int:
        return len(self._source)

    def entry(self, index: int) -> dict[str, Any]:
        return {"path": self._name(index), **self._part(index)}

    def describe(self, index: int) -> str:
        """The name by which a user finds the sample."""
        return self._source.describe(index) + part_text(self._part(index))

    def _part(self, index: int) -> Mapping[str, float]:
        return self._source.part(index) if isinstance(self._source, ManifestSource) else {}


def part_text(entry: Mapping[str, float]) -> str:
    """ " from 2.5 s to 4 s" for the part of a file that an entry of an index states; "" for a whole file."""
    return "".join(f" {word} {entry[key]:.9g} s" for key, word in PART_KEYS.items() if key in entry)


def all_differ(names: Iterable[str]) -> bool:
    """Whether no two names are equal. Of each only a number of 64 bits is in memory."""
    keys = np.fromiter(map(derive_key, names), np.uint64)
    return len(np.unique(keys)) == len(keys)
