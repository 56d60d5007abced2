"""What the parts of `benchmarks.gpu` share: what is to be measured, their time and their jobs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..jobs import PYTHON, JobFailed, measure, run
from ..machine import cores
from ..report import NoTime, Row, failed

NEEDS_A_GPU = "needs a GPU"


@dataclass(frozen=True)
class Plan:
    """What is to be measured, and by when.

    Args:
        is_toy: Tiny models.
        folder: For runs; removed at the end.
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

    def until(self, deadline: float) -> Plan:
        """The plan of a part."""
        return replace(self, deadline=deadline)

    def job(
        self, command: Sequence[str], *, at_most: float = float("inf"), expected: int = 0, **environment: str
    ) -> None:
        """Run a process, which ends with exit code ``expected``, within the time of the part and ``at_most`` this many
        seconds.

        Raises:
            NoTime: the time of the part is over.
            JobFailed: the process ended otherwise.
        """
        with self._time(at_most) as left:
            run([[sys.executable, *command]], {**_environment(), **environment}, left, expected)

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

    def rows(self, work: Callable[[str], Row], names: Sequence[str]) -> Iterator[Row]:
        """``work(name)`` for each name, in their order; several run at a time. An error becomes a row."""

        def attempt(name: str) -> Row:
            try:
                return work(name)
            except Exception as error:
                return failed(name, error)

        with ThreadPoolExecutor(max(1, min(len(names), cores() // 2))) as pool:
            yield from pool.map(attempt, names)


def _environment() -> dict[str, str]:
    """One GPU, the first one that this process may use. All processes are on this machine, so Gloo need not find out
    where the machine's name leads to."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return {"CUDA_VISIBLE_DEVICES": first, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
