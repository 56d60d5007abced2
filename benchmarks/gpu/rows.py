"""What the parts of `benchmarks.gpu` share: their time, their jobs and their rows."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..jobs import PYTHON, JobFailed, measure, run
from ..machine import cores

NEEDS_A_GPU = "needs a GPU"
TITLES = {
    "tests": "Tests that need a GPU",
    "resume": "The same bits after a kill",
    "processes": "Two processes on one GPU against one process, --batch_parts 2",
    "waits": "Waits of the host per update",
    "zero": "DeepSpeed and FSDP, one process: losses against those without them",
    "speed": "Speed and peak memory, one process",
}


@dataclass(frozen=True)
class Row:
    """One line of a part's table.

    Args:
        values: Column -> number or text; empty if nothing could be found out, and ``note`` says why.
        is_bad: The row shows a mistake in this repository, or a job that failed.
    """

    part: str
    name: str
    values: Mapping[str, float | str] = field(default_factory=dict)
    note: str = ""
    is_bad: bool = False

    def __str__(self) -> str:
        values = ", ".join(f"{column} {cell(value)}" for column, value in self.values.items())
        return " ".join(filter(None, [self.part, self.name, values, f"({self.note})" if self.note else ""]))

    def as_json(self) -> dict[str, Any]:
        """JSON values; JSON has no infinity."""
        values = {
            name: value if isinstance(value, str) or math.isfinite(value) else str(value)
            for name, value in self.values.items()
        }
        return {"part": self.part, "name": self.name, "values": values, "note": self.note, "is_bad": self.is_bad}


def cell(value: float | str | None) -> str:
    """A value in the table."""
    if value is None:
        return ""
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def tables(rows: Sequence[Row]) -> str:
    """A Markdown table per part, as docs/figures.md has them."""
    lines: list[str] = []
    for part, group in itertools.groupby(rows, key=lambda row: row.part):
        of_part = list(group)
        columns = list(dict.fromkeys(column for row in of_part for column in row.values))
        noted = any(row.note for row in of_part)
        heads = ["", *columns, *(["note"] if noted else [])]
        lines += ["", f"## {TITLES[part]}", "", _line(heads), "|---" * len(heads) + "|"]
        for row in of_part:
            cells = [row.name, *(cell(row.values.get(column)) for column in columns), *([row.note] if noted else [])]
            lines.append(_line([text.replace("|", "\\|") for text in cells]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


@dataclass(frozen=True)
class Plan:
    """What is to be measured, and by when.

    Args:
        is_toy: Tiny models.
        folder: For runs; removed at the end.
        part, deadline: The present part, and when it ends (`time.monotonic`).
    """

    is_toy: bool
    has_gpu: bool
    scripts: Sequence[str]
    precisions: Sequence[str]
    folder: Path
    part: str = ""
    deadline: float = 0.0

    def until(self, part: str, deadline: float) -> Plan:
        """The plan of a part."""
        return replace(self, part=part, deadline=deadline)

    def row(
        self, name: str, values: Mapping[str, float | str] | None = None, note: str = "", *, is_bad: bool = False
    ) -> Row:
        """A row of the present part."""
        return Row(self.part, name, values or {}, note, is_bad)

    def failed(self, name: str, error: Exception) -> Row:
        """The row of what gave no result. Lack of time is no mistake."""
        text = " ".join(str(error).split())[:300]
        note = text if isinstance(error, JobFailed) else f"failed: {type(error).__name__}: {text}"
        return self.row(name, note=note, is_bad=not isinstance(error, NoTime))

    def job(self, command: Sequence[str], *, at_most: float = float("inf"), **environment: str) -> str:
        """Run a process within the time of the part and ``at_most`` this many seconds. Returns what it wrote.

        Raises:
            NoTime: the time of the part is over.
            JobFailed: the process failed.
        """
        with self._time(at_most) as left:
            (output,) = run([[sys.executable, *command]], {**_environment(), **environment}, left)
        return output

    def worker(self, task: str, script: str, *flags: str) -> dict[str, Any]:
        """What `worker` wrote. Raises what `job` raises."""
        folder = self.folder / f"{task}-{script}"
        result = folder / "result.json"
        command = ["-m", "benchmarks.gpu.worker", task, "--script", script, "--result", str(result)]
        self.job([*command, "--output_dir", str(folder), *flags])
        found: dict[str, Any] = json.loads(result.read_text())
        return found

    def measure(
        self, sides: Sequence[str], flags: Sequence[str], script: str, *, updates: int, at_most: float
    ) -> dict[str, dict[str, Any]]:
        """`jobs.measure` in three rounds of one turn. Raises what `job` raises."""
        with self._time(at_most) as left:
            return measure(
                PYTHON, sides, flags, script=script, threads=1, rounds=3, turns=1, updates=updates, warmup=updates,
                environment=_environment(), seconds=left,
            )  # fmt: skip

    @contextmanager
    def _time(self, at_most: float) -> Iterator[float]:
        """Seconds that a job may take. A job that fails because they are over raises NoTime."""
        left = min(self.deadline - time.monotonic(), at_most)
        if left < 1:
            raise NoTime("not started, because the time of its part was over")
        began = time.monotonic()
        try:
            yield left
        except JobFailed as error:
            if time.monotonic() - began >= left:
                raise NoTime(f"ended at its limit of {left:.0f} s") from None
            raise error

    def at_once(self, work: Callable[[str], Any], names: Sequence[str]) -> Iterator[Any]:
        """``work(name)`` for each name, in their order; several run at a time."""
        with ThreadPoolExecutor(max(1, min(len(names), cores() // 2))) as pool:
            yield from pool.map(work, names)

    def rows(self, work: Callable[[str], Row], names: Sequence[str]) -> Iterator[Row]:
        """`at_once`, where an error becomes a row."""

        def attempt(name: str) -> Row:
            try:
                return work(name)
            except Exception as error:
                return self.failed(name, error)

        yield from self.at_once(attempt, names)


def _environment() -> dict[str, str]:
    """One GPU, the first one that this process may use. All processes are on this machine, so Gloo need not find out
    where the machine's name leads to."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return {"CUDA_VISIBLE_DEVICES": first, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class NoTime(JobFailed):
    """A job did not end within its time."""
