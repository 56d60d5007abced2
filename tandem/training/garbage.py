"""When Python looks for garbage."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Updates between two collections. What these leave to one, and how long that takes, is in docs/devices.md.
_INTERVAL = 100


@contextmanager
def collected_together() -> Iterator[Callable[[int], None]]:
    """Context in which Python looks for garbage after the same updates on all processes: when the function that it
    gives is called with the number of completed updates. By itself, each process would choose an update of its own, for
    which all others wait: a full collection takes 0.26 s, most of it for what was imported. That is set aside after the
    first update."""
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
