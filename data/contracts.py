"""The interfaces that this package needs: a set of samples, and the processes that train or compute together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Processes(Protocol):
    """This process and the collectives of all processes; a `distributed.Backend` has this interface."""

    rank: int
    world_size: int
    device: torch.device

    def agreement(self) -> AbstractContextManager[None]: ...
    def broadcast_object(self, value: Any) -> Any: ...
    def each(self, what: str, items: Iterable[Any]) -> Iterator[Any]: ...
    def gather(self, tensor: Tensor) -> Tensor: ...
    def gather_objects(self, value: Any) -> list[Any]: ...
    def mark(self, phase: str) -> None: ...
    def stop_requested(self, here: bool = False, now: bool = False) -> bool: ...
    def sum(self, value: Any) -> Any: ...
    def waiting_for(self, what: str) -> AbstractContextManager[None]: ...
    def working(self, phase: str) -> None: ...


class Samples(Protocol):
    """A numbered set of samples of any kind. `fingerprint` is equal where equally many samples have the same names in
    the same order; a set that is drawn needs none. It may have `skipped`, a line about files that are no samples
    (`skipped_of`)."""

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Any:
        """The sample, which depends only on the set's seed and the arguments; on the epoch only with `augment`.

        Raises OSError or ValueError, in one line, if it cannot be read.
        """
        ...

    def describe(self, index: int) -> str:
        """The name by which a user finds the sample: its path."""
        ...


def skipped_of(samples: Any) -> str:
    """The line about the files that a set, or the places of its samples, skips; "" if it skips none."""
    return str(getattr(samples, "skipped", ""))
