"""Processes that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.models.helpers import Process


@pytest.fixture
def processes() -> Callable[[int, Callable[[Process], Any]], list[Any]]:
    """(world_size, work) -> what `work` gives on each process, by rank."""

    def run(world_size: int, work: Callable[[Process], Any]) -> list[Any]:
        barrier, slots = threading.Barrier(world_size, timeout=20), [None] * world_size

        def guarded(rank: int) -> Any:
            try:
                return work(Process(rank, world_size, barrier, slots))
            except BaseException:
                barrier.abort()
                raise

        with ThreadPoolExecutor(world_size) as pool:
            return list(pool.map(guarded, range(world_size)))

    return run
