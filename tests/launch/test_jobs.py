"""A job of several tasks goes on after one that fails, and what not every rank has finished counts as failed."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from types import ModuleType

import pytest
from jobs import Jobs, Task

from benchmarks.launching import Launcher
from tandem.distributed import Backend

TWO = Launcher("torchrun", 2)


def fails_on_rank_1(args: argparse.Namespace, backend: Backend) -> None:
    """After the root has done it."""
    done = Path(args.output_dir, "done")
    if backend.processes.is_root:
        done.touch()
        return
    while not done.exists():
        time.sleep(0.01)
    raise KeyError("on rank 1 alone")


def passes(args: argparse.Namespace, backend: Backend) -> None:
    assert backend.processes.sum({"here": 1.0}) == {"here": 2.0}


def jobs_of(folder: Path, *functions: str) -> Jobs:
    module = ModuleType("module")
    listed = [Task(name, f"test_jobs.{name}", ["--batch_size", "2"]) for name in functions]
    vars(module)["tasks"] = lambda launcher, kind, jobs: listed
    return Jobs(folder, [module])


def test_a_task_that_fails_on_one_rank_alone_has_failed_with_its_error_and_the_next_is_done_in_the_same_job(
    tmp_path: Path,
) -> None:
    jobs = jobs_of(tmp_path, "fails_on_rank_1", "passes")
    with pytest.raises(AssertionError, match=r"failed on rank 1:\n(.*\n)*KeyError: 'on rank 1 alone'"):
        jobs.output(TWO, "rounded", "fails_on_rank_1")
    assert jobs.output(TWO, "rounded", "passes") == jobs.path(TWO, "rounded", "passes")
