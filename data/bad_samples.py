"""Samples that cannot be read, and how many of them stop a run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np
import torch

_LISTED = 20
_NAMED = 1000  # bad samples whose path and reason are kept; of all, that they are bad
_ONES = np.array([byte.bit_count() for byte in range(256)], np.uint8)


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be read: its dataset index, the path of its file and the reason, in one line; or a sample
    that is `Incomplete`, or one that was accepted though only a part of it could be read (`accepting_parts`).
    `traceback` is that of a user's code which raised an error."""

    index: int
    path: str
    reason: str
    is_incomplete: bool = False
    is_partial: bool = False
    traceback: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Raised(ValueError):
    """What a user's own code has raised, in one line; `traceback` is Python's own text about it."""

    def __init__(self, text: str, traceback: str = "") -> None:
        super().__init__(text)
        self.traceback = traceback


class Unsuitable(ValueError):
    """A sample can be read, but is none that the user wants: another takes its place, and it does not count as bad."""


class Incomplete(Unsuitable):
    """A sample lacks what others have, such as its embedding or enough pixels: it is counted, but not named one by
    one."""


class NotASample(ValueError):
    """What a user's own dataset holds at an index is nothing that the script trains on: the code has to be changed, so
    no other sample takes its place."""


class _Marks:
    """Some of n indices. A bit for each, because all samples may be among them: 125 bytes for a thousand.

    `bits` (uint8, the lowest bit first) are those of another such set; of one that was larger, what is beyond this set
    is left out.
    """

    def __init__(self, n: int, bits: torch.Tensor | None = None) -> None:
        self._bits, self._n, self.count = np.zeros(n + 7 >> 3, np.uint8), n, 0
        if bits is not None:
            known = bits.numpy()[: len(self._bits)]
            self._bits[: len(known)] = known
            if n & 7:
                self._bits[-1] &= (1 << (n & 7)) - 1
            self.count = int(_ONES[self._bits].sum())

    def __contains__(self, index: int) -> bool:
        return index < self._n and bool(self._bits[index >> 3] >> (index & 7) & 1)

    def add(self, index: int) -> None:
        """Mark an index that is not marked; one beyond the set is left out."""
        if index < self._n:
            self._bits[index >> 3] |= np.uint8(1 << (index & 7))
            self.count += 1

    @property
    def bits(self) -> torch.Tensor:
        """A copy of them, for the constructor."""
        return torch.from_numpy(self._bits.copy())


class BadSampleLog:
    """The bad samples found so far in a data set of `n_samples`, each once. Only `share` talks to other processes."""

    def __init__(self, n_samples: int) -> None:
        self.n_samples = n_samples
        self._named: list[BadSample] = []  # the first bad samples
        self._bad, self._incomplete, self._partial = (_Marks(n_samples) for _ in range(3))

    @property
    def count(self) -> int:
        """Number of different bad samples so far, without the incomplete ones and those that were accepted in part."""
        return self._bad.count

    @property
    def count_incomplete(self) -> int:
        """Number of different incomplete samples so far."""
        return self._incomplete.count

    @property
    def count_partial(self) -> int:
        """Number of different samples so far that were accepted in part."""
        return self._partial.count

    @property
    def counts(self) -> dict[str, int]:
        """What a line of metrics says: bad_samples and, if there are any, partial_samples."""
        return {"bad_samples": self.count, **({"partial_samples": n} if (n := self.count_partial) else {})}

    def add(self, samples: Iterable[BadSample]) -> list[BadSample]:
        """Remember `samples`; returns those that were not known before, each once."""
        new = []
        for sample in samples:
            if sample.is_partial:
                if sample.index in self._partial:
                    continue
                self._partial.add(sample.index)
            elif sample.index in self._bad or sample.index in self._incomplete:
                continue
            elif sample.is_incomplete:
                self._incomplete.add(sample.index)
            else:
                self._bad.add(sample.index)
                self._named += [replace(sample, traceback="")] if len(self._named) < _NAMED else []
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
        listed = "; ".join(map(str, self._named[:_LISTED]))
        rest = f"; and {self.count - _LISTED} more" if self.count > _LISTED else ""
        raise ValueError(
            f"{self.count} of {self.n_samples} samples could not be read, more than the {int(self._tolerated)} that "
            f"are passed over; repair or remove them: {listed}{rest}"
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: "samples", the index, path and reason of the first bad ones, and of each kind of
        which there are some a bit for every sample of the set (uint8)."""
        kinds = {"bad": self._bad, "incomplete": self._incomplete, "partial": self._partial}
        samples = [[sample.index, sample.path, sample.reason] for sample in self._named]
        return {"samples": samples, **{kind: marks.bits for kind, marks in kinds.items() if marks.count}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the known bad samples by those of `state`."""
        self._named = [BadSample(index, path, reason) for index, path, reason in state["samples"]]
        self._bad, self._incomplete, self._partial = (
            _Marks(self.n_samples, state.get(kind)) for kind in ("bad", "incomplete", "partial")
        )


#: What was wrong with files of which parts were returned; None: decoders raise, as outside of `accepting_parts`.
_accepted: ContextVar[list[str] | None] = ContextVar("accepted", default=None)


@contextlib.contextmanager
def accepting_parts(is_on: bool = True) -> Iterator[list[str]]:
    """Context in which decoders of this thread return what can be read of a damaged file, instead of an error, and add
    its reason to the list that is yielded. With `is_on` False they raise, as outside of it."""
    reasons: list[str] = []
    token = _accepted.set(reasons if is_on else None)
    try:
        yield reasons
    finally:
        _accepted.reset(token)


def parts_are_accepted() -> bool:
    """Whether a decoder may return a part of a file; it then has to call `accept_part`."""
    return _accepted.get() is not None


def accept_part(error: BaseException) -> bool:
    """Note what was wrong with a file of which a part is returned. Returns False if parts are not accepted: then the
    decoder has to raise the error."""
    reasons = _accepted.get()
    if reasons is None:
        return False
    reasons.append(" ".join(reason_of(error).split()))
    return True


def reason_of(error: BaseException) -> str:
    """Why something failed: for an OSError, the system's message without the path; else the text of the error."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
