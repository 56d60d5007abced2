"""How fast training goes, without what is not training."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Wall-clock seconds of this start, and the part of them that is training."""

    def __init__(self) -> None:
        self._start = self._lap = time.monotonic()
        self._paused_since: float | None = None

    @property
    def seconds(self) -> float:
        """Since this process started training, everything included."""
        return time.monotonic() - self._start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count as training: validation, pictures, checkpoints."""
        self._paused_since = began = time.monotonic()
        yield
        self._paused_since = None
        self._lap += time.monotonic() - began

    def lap(self) -> float:
        """Seconds of training since the last lap."""
        now = time.monotonic() if self._paused_since is None else self._paused_since
        seconds, self._lap = now - self._lap, now
        return seconds
