"""Processes that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor


class Process:
    """One of several; each collective waits for all of them."""

    def __init__(self, rank: int, world_size: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.rank, self.world_size, self._barrier, self._slots = rank, world_size, barrier, slots
        self.collectives = 0

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self.collectives += 1
        self._slots[self.rank] = tensor.detach().clone()
        self._barrier.wait()
        parts = list(self._slots)
        self._barrier.wait()
        return parts

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange(tensor)).sum(0)

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._exchange(tensor))

    def connect(self, quantizer: Any) -> None:
        quantizer.all_reduce, quantizer.gather = self.all_reduce, self.gather
        quantizer.rank, quantizer.world_size = self.rank, self.world_size


def run_processes(world_size: int, work: Callable[[Process], Any]) -> list[Any]:
    """What `work` gives on each process, by rank."""
    barrier, slots = threading.Barrier(world_size, timeout=20), [None] * world_size

    def guarded(rank: int) -> Any:
        try:
            return work(Process(rank, world_size, barrier, slots))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(guarded, range(world_size)))


@pytest.fixture
def processes() -> Callable[[int, Callable[[Process], Any]], list[Any]]:
    """`run_processes`."""
    return run_processes
