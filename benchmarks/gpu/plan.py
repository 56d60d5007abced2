"""The plan of `benchmarks.gpu`, which its parts share: what to measure, their time limits and their jobs."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..jobs import ONE_PROCESS, JobFailed, measure, run
from ..machine import cores
from ..report import NoTime, Row, failure_row

NEEDS_A_GPU = "needs a GPU"


@dataclass(frozen=True)
class Plan:
    """What to measure, and until when.

    Args:
        is_toy: Tiny models.
        folder: Of the runs; removed at the end.
        deadline: When the present part ends (`time.monotonic`).
    """

    is_toy: bool
    has_gpu: bool
    scripts: Sequence[str]
    precisions: Sequence[str]
    folder: Path
    deadline: float = 0.0

    @property
    def is_pretend(self) -> bool:
        """Whether the GPU is the pretend accelerator of tests/pretend, for a rehearsal."""
        return self.has_gpu and str(torch.accelerator.current_accelerator()) == "pretend"

    def job(self, command: Sequence[str], *, expected: int = 0, **environment: str) -> None:
        """Run a process within the time of the part. ``expected``: its exit code.

        Raises:
            NoTime: the time of the part is over.
            JobFailed: the process ended otherwise.
        """
        with self._time() as seconds:
            run([[sys.executable, *command]], {**_environment(), **environment}, seconds, expected)

    def measure(
        self, sides: Sequence[str], flags: Sequence[str], script: str, *, updates: int, at_most: float
    ) -> dict[str, dict[str, Any]]:
        """`jobs.measure` in three rounds of one turn, for at most ``at_most`` seconds. Raises what `job` raises."""
        with self._time(at_most) as seconds:
            return measure(
                ONE_PROCESS, sides, flags, script=script, threads=1, rounds=3, turns=1, updates=updates, warmup=updates,
                environment=_environment(), seconds=seconds,
            )  # fmt: skip

    @contextmanager
    def _time(self, at_most: float = math.inf) -> Iterator[float]:
        """Seconds that a job may take. A job that fails because they are over raises NoTime."""
        start = time.monotonic()
        seconds = min(self.deadline - start, at_most)
        if seconds < 1:
            raise NoTime("not started, because the time of its part was over")
        try:
            yield seconds
        except JobFailed as error:
            if time.monotonic() - start >= seconds:
                raise NoTime(f"ended at its limit of {seconds:.0f} s") from None
            raise error

    def rows(self, work: Callable[[str], Row], names: Sequence[str]) -> Iterator[Row]:
        """``work(name)`` for each name, in their order; several run at a time. An error becomes a row."""

        def attempt(name: str) -> Row:
            try:
                return work(name)
            except Exception as error:
                return failure_row(name, error)

        with ThreadPoolExecutor(max(1, min(len(names), cores() // 2))) as pool:
            yield from pool.map(attempt, names)


def _environment() -> dict[str, str]:
    """Environment variables of a job: the first GPU that this process may use, one thread, and loopback for Gloo,
    because all processes are on this machine."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return {"CUDA_VISIBLE_DEVICES": first, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
