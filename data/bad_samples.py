"""Samples that cannot be read, and how many of them stop a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

_LISTED = 20


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be read: its dataset index, the path of its file and the reason, in one line; or a sample
    that is `Incomplete`."""

    index: int
    path: str
    reason: str
    is_incomplete: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Unsuitable(ValueError):
    """A sample can be read, but is none that the user wants: another takes its place, and it does not count as bad."""


class Incomplete(Unsuitable):
    """A sample lacks what others have, such as its embedding or enough pixels: it is counted, but not named one by
    one."""


class BadSampleLog:
    """The bad samples found so far in a data set of `n_samples`, each once. Only `share` talks to other processes.
    `count_incomplete`: number of different incomplete samples so far."""

    def __init__(self, n_samples: int) -> None:
        self.n_samples = n_samples
        self._samples: dict[int, BadSample] = {}
        # A bit for each sample, because all samples may be incomplete: 125 bytes for a thousand.
        self._incomplete, self.count_incomplete = np.zeros(n_samples + 7 >> 3, np.uint8), 0

    @property
    def count(self) -> int:
        """Number of different bad samples so far, without the incomplete ones."""
        return len(self._samples)

    def add(self, samples: Iterable[BadSample]) -> list[BadSample]:
        """Remember `samples`; returns those that were not known before, each once."""
        new = []
        for sample in samples:
            byte, bit = sample.index >> 3, np.uint8(1 << (sample.index & 7))
            if sample.index in self._samples or self._incomplete[byte] & bit:
                continue
            if sample.is_incomplete:
                self._incomplete[byte] |= bit
                self.count_incomplete += 1
            else:
                self._samples[sample.index] = sample
            new.append(sample)
        return new

    def share(self, samples: Iterable[BadSample], gather_objects: Callable[[Any], list[Any]]) -> list[BadSample]:
        """`add` the samples of all processes; every process returns the same. Collective, through `gather_objects`."""
        by_rank = gather_objects([astuple(sample) for sample in samples])
        return self.add(BadSample(*sample) for met in by_rank for sample in met)

    @property
    def _tolerated(self) -> float:
        return max(0.01 * self.n_samples, min(10, math.ceil(0.1 * self.n_samples)))

    @property
    def are_too_many(self) -> bool:
        """Whether `check` raises."""
        return self.count > self._tolerated

    def check(self) -> None:
        """Raise ValueError if more than 1% of the samples, and more than min(10, 10% rounded up), are bad."""
        if not self.are_too_many:
            return
        listed = "; ".join(map(str, list(self._samples.values())[:_LISTED]))
        rest = f"; and {self.count - _LISTED} more" if self.count > _LISTED else ""
        raise ValueError(
            f"{self.count} of {self.n_samples} samples could not be read, more than the {int(self._tolerated)} that "
            f"are passed over; repair or remove them: {listed}{rest}"
        )

    def state_dict(self) -> dict[str, list[Any]]:
        """What a checkpoint keeps, as plain JSON."""
        samples = [[sample.index, sample.path, sample.reason] for sample in self._samples.values()]
        incomplete = np.flatnonzero(np.unpackbits(self._incomplete, bitorder="little")).tolist()
        return {"samples": samples, **({"incomplete": incomplete} if incomplete else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the known bad samples by those of `state`."""
        self._samples = {index: BadSample(index, path, reason) for index, path, reason in state["samples"]}
        known = np.zeros(8 * len(self._incomplete), np.bool_)
        known[state.get("incomplete", [])] = True
        self._incomplete, self.count_incomplete = np.packbits(known, bitorder="little"), int(known.sum())


def reason_of(error: BaseException) -> str:
    """Why something failed: for an OSError, the system's message without the path; else the text of the error."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
