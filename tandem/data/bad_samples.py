"""Samples that cannot be read, and how many of them stop a run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
import torch

from tandem.io.reading import counted

_MAX_LISTED = 20  # bad samples that the error of `BadSampleLog.check` names
_MAX_NAMED = 1000  # bad samples whose path and reason are kept
_KINDS = {"bad": 1, "incomplete": 2}
_reasons: ContextVar[list[str] | None] = ContextVar("reasons", default=None)


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be read, or that is `SampleIncomplete`: its index in the dataset, the path of its file,
    and the reason in one line. `traceback` is that of an error in a user's code."""

    index: int
    path: str
    reason: str
    is_incomplete: bool = False
    traceback: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class UserCodeError(ValueError):
    """An error of a user's own code, in one line; `traceback` is its text as Python prints it."""

    def __init__(self, text: str, traceback: str = "") -> None:
        super().__init__(text)
        self.traceback = traceback


class SampleSkipped(ValueError):
    """A readable sample that the user does not want: another takes its place, and it does not count as bad."""


class SampleIncomplete(SampleSkipped):
    """A sample that lacks an embedding or enough pixels, for example: it is counted, but not reported by name."""


class BadDatasetItem(ValueError):
    """A user's dataset returned something that the script cannot train on. No other sample takes its place, because the
    user has to change the code."""


class BadSampleLog:
    """The bad samples of a data set of `n_samples`, each once. `count` is the number of samples that could not be read,
    `count_incomplete` that of the incomplete ones. Only `share` communicates with other processes."""

    def __init__(self, n_samples: int) -> None:
        self.n_samples = n_samples
        self._first_bad: list[BadSample] = []  # at most _MAX_NAMED
        self._kinds = np.zeros(n_samples, np.uint8)  # for each sample 0, or a number of `_KINDS`
        self.count = self.count_incomplete = 0

    def add(self, samples: Iterable[BadSample]) -> list[BadSample]:
        """Add `samples`; returns those that are new, each once."""
        new = []
        for sample in samples:
            if self._kinds[sample.index]:
                continue
            new.append(sample)
            self._kinds[sample.index] = _KINDS["incomplete" if sample.is_incomplete else "bad"]
            if sample.is_incomplete:
                self.count_incomplete += 1
                continue
            self.count += 1
            if len(self._first_bad) < _MAX_NAMED:
                self._first_bad.append(sample)
        return new

    def share(self, samples: Iterable[BadSample], gather_objects: Callable[[Any], list[Any]]) -> list[BadSample]:
        """`add` the samples of all processes; returns the same list on every process. Collective: `gather_objects`
        gathers from all processes."""
        by_rank = gather_objects([astuple(sample) for sample in samples])
        return self.add(BadSample(*sample) for rank_samples in by_rank for sample in rank_samples)

    @property
    def _limit(self) -> float:
        return max(0.01 * self.n_samples, min(10, math.ceil(0.1 * self.n_samples)))

    @property
    def are_too_many(self) -> bool:
        """Whether `check` raises."""
        return self.count > self._limit

    def check(self) -> None:
        """Raise ValueError if more than 1% of the samples, and more than min(10, 10% rounded up), are bad."""
        if not self.are_too_many:
            return
        named = "; ".join(map(str, self._first_bad[:_MAX_LISTED]))
        remainder = f"; and {self.count - _MAX_LISTED} more" if self.count > _MAX_LISTED else ""
        raise ValueError(
            f"{self.count} of {counted(self.n_samples, 'sample')} could not be read, more than the "
            f"{int(self._limit)} that are passed over; repair or remove them: {named}{remainder}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: "samples", the index, path and reason of the first bad ones; and "bad" and
        "incomplete", if there are any, each a bit mask of all samples (uint8, the lowest bit first)."""
        samples = [[sample.index, sample.path, sample.reason] for sample in self._first_bad]
        counts = {"bad": self.count, "incomplete": self.count_incomplete}
        bits = {kind: np.packbits(self._kinds == _KINDS[kind], bitorder="little") for kind, n in counts.items() if n}
        return {"samples": samples, **{kind: torch.from_numpy(mask) for kind, mask in bits.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the bad samples by those of `state`; those beyond the end of this data set are not counted."""
        self._first_bad = [BadSample(index, path, reason) for index, path, reason in state["samples"]]
        self._kinds[:] = 0
        for kind in _KINDS.keys() & state.keys():
            mask = np.unpackbits(state[kind].numpy(), bitorder="little")[: self.n_samples]
            self._kinds[: len(mask)][mask > 0] = _KINDS[kind]
        self.count, self.count_incomplete = (int((self._kinds == number).sum()) for number in _KINDS.values())


@contextlib.contextmanager
def collect_partial_reads() -> Iterator[list[str]]:
    """Context manager that gives a list, to which `report_partial_read` adds the reasons while it is active."""
    reasons: list[str] = []
    token = _reasons.set(reasons)
    try:
        yield reasons
    finally:
        _reasons.reset(token)


def report_partial_read(reason: str) -> None:
    """State why only a part of a file is read: adds the reason to the list of the enclosing `collect_partial_reads`, if
    there is one."""
    if (reasons := _reasons.get()) is not None:
        reasons.append(reason)
