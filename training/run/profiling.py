"""`--profile_steps`: a trace of some updates, by torch.profiler."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch


class Profiler:
    """Records the root's operations from update `first` to update `last`, counted from 1, and writes them to `folder`:
    a trace for https://ui.perfetto.dev, and a table of the operations that take the most time."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path, say: Callable[[str], None]) -> None:
        self._steps, self._folder, self._say = steps, folder, say
        self._profile: Any = None

    @contextlib.contextmanager
    def update(self, number: int) -> Iterator[None]:
        """Context for an update, and for loading the batch after it."""
        if self._steps is None or not self._steps[0] <= number <= self._steps[1]:
            yield
            return
        if self._profile is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # its log is for those who develop it
            kinds = torch.profiler.ProfilerActivity
            self._profile = torch.profiler.profile(
                activities=[kinds.CPU, *([kinds.CUDA] if torch.cuda.is_available() else [])]
            )
            self._profile.start()
        with torch.profiler.record_function(f"update {number}"):
            yield
        if number == self._steps[1]:
            self._profile.stop()
            self._write(f"updates_{self._steps[0]}-{self._steps[1]}")

    def _write(self, name: str) -> None:
        trace, table = self._folder / f"{name}.json.gz", self._folder / f"{name}.txt"
        key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        try:
            self._folder.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(trace))
            table.write_text(self._profile.key_averages().table(sort_by=key, row_limit=40))
        except (OSError, RuntimeError) as error:
            self._say(f"cannot write the profile {trace}: {error}")
        else:
            self._say(f"profile: {trace}, for https://ui.perfetto.dev, and {table}")
        self._profile = None
