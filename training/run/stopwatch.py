"""Clocks: seconds of training, and of the process for `--save_before_minutes`."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_IMPORTED = time.monotonic()
_MUCH = 0.1  # share of the time that validation should not exceed
_NOTICED_SECONDS = 10.0  # less validation than that is not worth a warning


def process_seconds() -> float:
    """Seconds since this process was started; since this module was imported, if /proc does not say."""
    since_import = time.monotonic() - _IMPORTED
    try:
        # Field 22 of /proc/self/stat: start in clock ticks since boot. The fields are counted after the name in ().
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(since_import, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return since_import


class Deadline:
    """When to stop, so that a last save is done `minutes` after the process was started.

    Three updates, or steps of an evaluation, and the save get twice the time of the longest so far.

    Args:
        minutes: None for no limit.
    """

    _UNKNOWN_SAVE_SECONDS = 10.0  # assumed before the first save

    def __init__(self, minutes: float | None) -> None:
        self._limit_seconds = math.inf if minutes is None else 60 * minutes
        self._asked_at: float | None = None
        self._longest_step = 0.0

    def asked(self) -> None:
        """Note that the processes ask whether to stop: after each update, and between the steps of an evaluation."""
        now = time.monotonic()
        if self._asked_at is not None:
            self._longest_step = max(self._longest_step, now - self._asked_at)
        self._asked_at = now

    def near(self, save_seconds: float) -> bool:
        """Whether it is time to save; `save_seconds`: duration of the longest save so far, 0 if none."""
        # Three steps: a stop request takes effect up to two updates late (`Backend.stop_requested`).
        room = 2 * (3 * self._longest_step + (save_seconds or self._UNKNOWN_SAVE_SECONDS))
        return process_seconds() + room >= self._limit_seconds


class Stopwatch:
    """Wall-clock seconds over all starts of a run, in total, and since the last lap of training alone.

    Args:
        before: Seconds of the earlier starts.
    """

    def __init__(self, before: float = 0.0) -> None:
        self._lap = time.monotonic()
        self._start = self._lap - before
        self._paused_since: float | None = None
        self._validation_seconds = 0.0
        self._first_validated: float | None = None
        self._is_warned = False

    @property
    def seconds(self) -> float:
        """Total seconds of this start, validation, pictures and saves included, and of the earlier ones."""
        return time.monotonic() - self._start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context for what is not training: validation, pictures, checkpoints."""
        self._paused_since = began = time.monotonic()
        yield
        self._paused_since = None
        self._lap += time.monotonic() - began

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Context for a validation."""
        began = time.monotonic()
        yield
        ended = time.monotonic()
        if self._first_validated is None:  # it starts loaders and may compile, so it says little about the others
            self._first_validated = ended
        else:
            self._validation_seconds += ended - began

    def costly_validation(self) -> float | None:
        """The share of validation in the time since the first validation of this start; None if it is small, or was
        returned before."""
        if self._first_validated is None or self._is_warned or self._validation_seconds < _NOTICED_SECONDS:
            return None
        share = self._validation_seconds / (time.monotonic() - self._first_validated)
        self._is_warned = share > _MUCH
        return share if self._is_warned else None

    def lap(self) -> float:
        """Seconds of training since the last lap."""
        now = time.monotonic() if self._paused_since is None else self._paused_since
        seconds, self._lap = now - self._lap, now
        return seconds
