"""Shared by the tests of training/."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.training.checkpoint.store import Checkpoints
from tests.processes import Process
from tests.scripts import VAE, Script


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", 2, Process())


@pytest.fixture
def copied(run_of_eight: Callable[[Script], Path], tmp_path: Path) -> Path:
    """A finished run of eight updates, to be changed."""
    return Path(shutil.copytree(run_of_eight(VAE), tmp_path / "copied", symlinks=True))
