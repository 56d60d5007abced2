"""What this package asks of the processes that train or compute together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Processes(Protocol):
    """One of the processes, with the collectives of all; a `distributed.Backend` is one."""

    rank: int
    world_size: int
    device: torch.device

    def agreement(self) -> AbstractContextManager[None]: ...
    def broadcast_object(self, value: Any) -> Any: ...
    def each(self, what: str, items: Iterable[Any]) -> Iterator[Any]: ...
    def gather(self, tensor: Tensor) -> Tensor: ...
    def gather_objects(self, value: Any) -> list[Any]: ...
    def stop_requested(self) -> bool: ...
    def waiting_for(self, what: str) -> AbstractContextManager[None]: ...
