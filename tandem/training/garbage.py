"""When Python collects garbage."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Updates between two collections; docs/devices.md says what a collection finds.
_INTERVAL = 100


@contextmanager
def synchronized_collection() -> Iterator[Callable[[int], None]]:
    """Context in which Python collects garbage after the same updates on all processes: the context gives a function to
    be called with the number of completed updates. Otherwise each process would collect after another update, and all
    others would wait: a full collection takes 0.26 s, most of it for imported objects, which are frozen after the first
    update."""
    was_enabled, is_first = gc.isenabled(), True

    def collect(step: int) -> None:
        nonlocal is_first
        if is_first:
            gc.collect()
            gc.freeze()
            gc.disable()
        elif step % _INTERVAL == 0:
            gc.collect()
        is_first = False

    try:
        yield collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
