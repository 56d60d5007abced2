"""What `make` and scripts/install_horovod.sh refuse before they install anything: one line that names what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import ROOT


@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        (["nowhere/python"], {}, "nowhere/python"),
        ([], {"VIRTUAL_ENV": "/gone"}, "/gone/bin/python"),
        ([sys.executable], {"HOROVOD_SDIST": "/nowhere/h.tgz"}, "HOROVOD_SDIST=/nowhere/h.tgz"),
    ],
    ids=["given", "of the environment", "archive"],
)
def test_horovod_names_the_file_that_is_not_there_and_leaves_nothing_behind(
    arguments: list[str], variables: dict[str, str], named: str, tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path / "tmp"), "TANDEM_CACHE": str(tmp_path / "cache")}
    command = ["bash", str(ROOT / "scripts" / "install_horovod.sh"), *arguments]
    finished = subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True)
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr.startswith("install_horovod: error: ") and named in finished.stderr
    assert finished.stderr.count("\n") == 1 and not list((tmp_path / "tmp").iterdir())


def fake_python(path: Path, version: tuple[int, int]) -> Path:
    """A Python that takes itself for another version and does nothing but run a line of code."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pretend = f"import sys; sys.version_info = {(*version, 0, 'final', 0)}; sys.executable = {path.name!r}"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} -c "{pretend}\n$2"\necho "ran with $*" >&2\nexit 3\n'
    )
    path.chmod(0o755)
    return path


def make_venv(tmp_path: Path, python: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    command = ["make", "--no-print-directory", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}", "venv"]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert finished.returncode == 2
    return finished.stdout + finished.stderr


def test_make_refuses_an_old_python_before_it_makes_an_environment_and_takes_the_oldest_that_will_do(
    tmp_path: Path,
) -> None:
    said = make_venv(tmp_path, fake_python(tmp_path / "old", (3, 9)))
    assert "old is 3.9" in said and not (tmp_path / "venv").exists()
    assert f"ran with -m venv {tmp_path / 'venv'}" in make_venv(tmp_path, fake_python(tmp_path / "new", (3, 10)))
    fake_python(tmp_path / "venv" / "bin" / "python", (3, 9))
    assert f"remove {tmp_path / 'venv'}" in make_venv(tmp_path, tmp_path / "new")
