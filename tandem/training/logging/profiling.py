"""`--profile_steps`: a trace of some updates, by torch.profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch


class Profiler:
    """Records the root's operations in the updates `steps` (first and last, counted from 1), and writes them to
    `folder`: a trace for https://ui.perfetto.dev, and a table of the operations that take the most time."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path, say: Callable[[str], None]) -> None:
        self._steps, self._folder, self._say = steps, folder, say
        self._profile: Any = None
        self._recorded_updates: list[int] = []

    @contextlib.contextmanager
    def update(self, number: int) -> Iterator[None]:
        """Context for an update."""
        if self._steps is None or not self._steps[0] <= number <= self._steps[1]:
            yield
            return
        if self._profile is None:
            activities = torch.profiler.supported_activities()
            has_device = torch.accelerator.is_available()
            self._profile = torch.profiler.profile(
                activities=activities if has_device else {torch.profiler.ProfilerActivity.CPU}
            )
            self._profile.start()
        with torch.profiler.record_function(f"update {number}"):
            yield
        self._recorded_updates.append(number)
        if number == self._steps[1]:
            self._write()

    def close(self) -> None:
        """Write what was recorded, if the run ends before the last of these updates."""
        if self._profile is not None:
            self._write()
        elif self._steps is not None and not self._recorded_updates:
            self._say(f"--profile_steps {self._steps[0]}:{self._steps[1]}: this start made none of these updates")

    def _write(self) -> None:
        self._profile.stop()
        name = f"updates_{self._recorded_updates[0]}-{self._recorded_updates[-1]}"
        trace, table = self._folder / f"{name}.json.gz", self._folder / f"{name}.txt"
        key = "self_device_time_total" if torch.accelerator.is_available() else "self_cpu_time_total"
        try:
            self._folder.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(trace))
            table.write_text(self._profile.key_averages().table(sort_by=key, row_limit=40))
        except (OSError, RuntimeError) as error:
            self._say(f"cannot write the profile {trace}: {error}")
        else:
            self._say(f"profile: {trace}, for https://ui.perfetto.dev, and {table}")
        self._profile = None
