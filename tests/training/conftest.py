"""Shared by the tests of training/."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from tests.processes import Process
from training.checkpoints.store import Checkpoints

# Names of the C functions and methods that change the disk.
FILE_OPERATIONS = {
    "open", "write", "flush", "fsync", "mkdir", "rename", "replace", "truncate", "unlink", "rmdir", "scandir",
    "serialize_file", "__exit__",
}  # fmt: skip


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", 2, Process())


def _in_a_child(action: Callable[[], None]) -> int:
    """Runs the action in a child process; returns the signal that killed it, or 0."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


@pytest.fixture
def in_a_child() -> Callable[[Callable[[], None]], int]:
    return _in_a_child


@pytest.fixture
def is_killed() -> Callable[..., bool]:
    """Runs an action in a child process and kills it before (even stage) or after (odd stage) a file operation of its
    main thread, or of the threads that it starts; returns whether the action got that far."""

    def run(stage: int, action: Callable[[], None], *, in_threads: bool) -> bool:
        seen = 0

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal seen
            if event in ("c_call", "c_return") and getattr(argument, "__name__", "") in FILE_OPERATIONS:
                if seen == stage:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        def profiled() -> None:
            (threading if in_threads else sys).setprofile(profile)
            action()

        return _in_a_child(profiled) == signal.SIGKILL

    return run
