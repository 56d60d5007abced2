"""What `make` and scripts/install_horovod.sh refuse before they install anything: one line that names what is wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import ROOT

NO_SUCH_PYTHON = "no such Python: {}. Give one: scripts/install_horovod.sh .venv/bin/python"


@pytest.mark.parametrize(
    ("arguments", "variables", "error"),
    [
        (["nowhere/python"], {}, NO_SUCH_PYTHON.format("nowhere/python")),
        ([], {"VIRTUAL_ENV": "/gone"}, NO_SUCH_PYTHON.format("/gone/bin/python")),
        ([], {"PATH": "TOOLS"}, NO_SUCH_PYTHON.format("python3")),
        ([sys.executable], {"HOROVOD_SDIST": "/nowhere/h.tgz"}, "HOROVOD_SDIST=/nowhere/h.tgz: no such file"),
    ],
    ids=["given", "of the environment", "on the path", "archive"],
)
def test_horovod_names_the_file_that_is_not_there_and_leaves_nothing_behind(
    arguments: list[str], variables: dict[str, str], error: str, tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    tools = tmp_path / "tools"  # without a Python
    tools.mkdir()
    for tool in ("mktemp", "rm"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path / "tmp"), "TANDEM_CACHE": str(tmp_path / "cache")}
    environment |= {name: str(tools) if value == "TOOLS" else value for name, value in variables.items()}
    command = [str(shutil.which("bash")), str(ROOT / "scripts" / "install_horovod.sh"), *arguments]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr == f"install_horovod: error: {error}\n"
    assert not list((tmp_path / "tmp").iterdir())


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
    finished = subprocess.run(
        ["make", "--no-print-directory", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}", "venv"],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("MAKE")},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 2
    return finished.stdout + finished.stderr


@pytest.mark.parametrize("version", [(2, 7), (3, 9)])
def test_make_refuses_an_old_python_before_it_makes_an_environment(tmp_path: Path, version: tuple[int, int]) -> None:
    said = make_venv(tmp_path, fake_python(tmp_path / "old", version))
    assert "old is {}.{}".format(*version) in said and not (tmp_path / "venv").exists()


def test_make_says_to_remove_an_environment_of_an_old_python(tmp_path: Path) -> None:
    fake_python(tmp_path / "venv" / "bin" / "python", (3, 9))
    assert f"remove {tmp_path / 'venv'}" in make_venv(tmp_path, fake_python(tmp_path / "new", (3, 10)))


def test_make_goes_on_with_the_oldest_python_that_will_do(tmp_path: Path) -> None:
    said = make_venv(tmp_path, fake_python(tmp_path / "new", (3, 10)))
    assert f"ran with -m venv {tmp_path / 'venv'}" in said and "is needed" not in said
