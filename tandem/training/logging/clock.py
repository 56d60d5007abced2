"""The time and the memory that a run takes, and when it is time to save, to stop or to finish."""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tandem.training.run_folder.starts import now

if TYPE_CHECKING:
    from tandem.distributed import ProcessGroup

_IMPORTED = time.monotonic()
_MAX_UPDATES = 1000  # between two calls of `check_limits`
_UNKNOWN_SAVE_SECONDS = 10.0  # assumed before the first save


def process_seconds() -> float:
    """Seconds since this process was started; on a system without /proc, since this module was imported."""
    since_import = time.monotonic() - _IMPORTED
    try:
        # Field 22 of /proc/self/stat: start in clock ticks since boot. The fields are counted after the name in ().
        start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        boot_clock = time.CLOCK_BOOTTIME if hasattr(time, "CLOCK_BOOTTIME") else time.CLOCK_MONOTONIC
        return max(since_import, time.clock_gettime(boot_clock) - start)
    except (OSError, ValueError, IndexError):
        return since_import


def peak_memory(device: torch.device) -> dict[str, float]:
    """The peak memory of this process in GB since its start: of the host, and of its GPU in use and reserved by
    PyTorch."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    peaks = {"peak_host_memory_gb": host}
    if device.type != "cpu":
        with suppress(RuntimeError):  # PyTorch keeps no statistics of the memory of some devices, MPS among them
            peaks["peak_device_memory_gb"] = torch.accelerator.max_memory_allocated(device)
            peaks["peak_device_memory_reserved_gb"] = torch.accelerator.max_memory_reserved(device)
    return {name: round(number / 1e9, 3) for name, number in peaks.items()}


class Clock:
    """Wall-clock seconds of all starts of a run, the rate of training in this start, and its waits.

    Args:
        minutes: Time limit of this process, within which a last save must be done; None for no limit.
        save_minutes: Age of a checkpoint at which the next one is due; 0 for never.
        run_minutes: Time limit of all starts together, after which the run finishes; None for no limit.
    """

    def __init__(
        self,
        processes: ProcessGroup,
        minutes: float | None = None,
        save_minutes: float = 0.0,
        run_minutes: float | None = None,
    ) -> None:
        self._processes, self._limit_seconds = processes, 60 * (minutes or math.inf)
        self._save_seconds, self.max_run_seconds = 60 * (save_minutes or math.inf), 60 * (run_minutes or math.inf)
        self._checked_at: float | None = None
        self._longest_step = 0.0
        self._paused_since: float | None = None
        self._saving_seconds = 0.0
        self._validated_at: float | None = None
        self.begin(0.0, 0)

    def begin(self, seconds: float, samples: int) -> None:
        """Count from now on, after the `seconds` and `samples` of earlier starts."""
        self._lap, self._lap_samples = time.monotonic(), samples
        self._begin_time = self._saved_at = self._lap
        self._start = self._lap - seconds
        self._waits_before = dict(self._processes.waited)

    @property
    def seconds(self) -> float:
        """Total seconds of this start, validation, pictures and saves included, and of the earlier ones."""
        return time.monotonic() - self._start

    def times(self, samples: int) -> dict[str, Any]:
        """The times of a line of metrics, after `samples` of all starts: samples per second of training since the last
        call, seconds of all starts, and the time of day."""
        until = time.monotonic() if self._paused_since is None else self._paused_since
        rate = (samples - self._lap_samples) / max(until - self._lap, 1e-9)
        self._lap, self._lap_samples = until, samples
        return {"samples_per_second": round(rate, 3), **self.timestamp()}

    def timestamp(self) -> dict[str, Any]:
        """Seconds of all starts, and the time of day."""
        return {"seconds": round(self.seconds, 3), "time": now()}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context for validation, pictures and checkpoints, which rate and waits of training leave out."""
        new_waits, start = self._new_waits(), time.monotonic()
        self._paused_since = start
        yield
        self._paused_since = None
        self._lap += time.monotonic() - start
        self._waits_before = {name: seconds - new_waits[name] for name, seconds in self._processes.waited.items()}

    def end_validation(self, start: float) -> float:
        """Record the end of a validation that began at `start` (`time.monotonic`). Returns its share in the time since
        the end of the previous one; 0 for the first of a start, in which loaders begin and kernels are chosen."""
        previous_end, self._validated_at = self._validated_at, time.monotonic()
        if previous_end is None:
            return 0.0
        return (self._validated_at - start) / max(self._validated_at - previous_end, 1e-9)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context for a save, which training waits for."""
        start = time.monotonic()
        yield
        self._saved_at = time.monotonic()
        self._saving_seconds += self._saved_at - start

    def waits(self) -> dict[str, float]:
        """Seconds that this process waited since the last call, by metric."""
        waits = {**self._new_waits(), "save": self._saving_seconds}
        if self._processes.device.type != "cpu":
            del waits["communication"]  # contains the device's computing, for which the host waits
        self._waits_before, self._saving_seconds = dict(self._processes.waited), 0.0
        return {f"{name}_seconds": seconds for name, seconds in waits.items()}

    def is_late(self, save_seconds: float) -> bool:
        """Whether the time limit of this process requires a save now: whether less is left of it than three steps and a
        save take, if each takes twice the longest time so far. Steps are the times between two calls: it is called
        after each update, and between the steps of an evaluation.

        Args:
            save_seconds: Of the longest save so far, 0 if none.
        """
        checked_at = time.monotonic()
        if self._checked_at is not None:
            self._longest_step = max(self._longest_step, checked_at - self._checked_at)
        self._checked_at = checked_at
        # Three steps, because a stop request takes effect up to two updates late (`ProcessGroup.stop_requested`).
        margin = 2 * (3 * self._longest_step + (save_seconds or _UNKNOWN_SAVE_SECONDS))
        return self._limit_seconds < math.inf and process_seconds() + margin >= self._limit_seconds

    def check_limits(self, updates: int) -> tuple[bool, bool, int]:
        """Whether a checkpoint is due by its age, whether the time of the run is over, and after how many updates to
        call this again: as many as fit into half of the time until the next save or the end. An update is assumed to
        take as long as the longest one but the first, which compiles the model, or the mean of all `updates` of this
        start, whichever is longer."""
        checked_at = time.monotonic()
        until_save, until_end = self._save_seconds - (checked_at - self._saved_at), self.max_run_seconds - self.seconds
        per_update = max(self._longest_step, (checked_at - self._begin_time) / updates, 1e-3)
        next_save = until_save if until_save > 0 else self._save_seconds  # a due save is made at once
        seconds_left = min(next_save, until_end if until_end > 0 else math.inf)
        return until_save <= 0, until_end <= 0, int(max(min(seconds_left / 2 / per_update, _MAX_UPDATES), 1))

    def _new_waits(self) -> dict[str, float]:
        return {name: seconds - self._waits_before[name] for name, seconds in self._processes.waited.items()}
