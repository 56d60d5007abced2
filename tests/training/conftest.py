"""Shared by the tests of training/."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.processes import Process
from tests.scripts import VAE, Script
from training.checkpoints.store import Checkpoints


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", 2, Process())


@pytest.fixture
def copied(run_of_eight: Callable[[Script], Path], tmp_path: Path) -> Path:
    """A finished run of eight updates, to be changed."""
    return Path(shutil.copytree(run_of_eight(VAE), tmp_path / "copied", symlinks=True))


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
