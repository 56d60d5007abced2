"""What `make` and scripts/install_horovod.sh refuse before they install anything: one line that names what is wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def install_horovod(tmp_path: Path, *arguments: str, path: str = os.environ["PATH"], **variables: str) -> str:
    """What the script says on its way to exit code 1. It leaves nothing behind."""
    (tmp_path / "tmp").mkdir()
    bash = shutil.which("bash")
    assert bash is not None
    finished = subprocess.run(
        [bash, str(ROOT / "scripts" / "install_horovod.sh"), *arguments],
        env={"PATH": path, "TMPDIR": str(tmp_path / "tmp"), "TANDEM_CACHE": str(tmp_path / "cache"), **variables},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 1 and finished.stdout == ""
    assert not list((tmp_path / "tmp").iterdir())
    return finished.stderr


def no_such_python(wanted: str) -> str:
    return f"install_horovod: error: no such Python: {wanted}. Give one: scripts/install_horovod.sh .venv/bin/python\n"


def test_horovod_names_the_python_that_was_given(tmp_path: Path) -> None:
    assert install_horovod(tmp_path, "nowhere/python") == no_such_python("nowhere/python")


def test_horovod_names_the_python_of_an_environment_that_is_gone(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    assert install_horovod(tmp_path, VIRTUAL_ENV=gone) == no_such_python(f"{gone}/bin/python")


def test_horovod_names_the_python_that_is_not_on_the_path(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("mktemp", "rm"):
        found = shutil.which(tool)
        assert found is not None
        (tools / tool).symlink_to(found)
    assert install_horovod(tmp_path, path=str(tools)) == no_such_python("python3")


def test_horovod_names_an_archive_that_is_not_there(tmp_path: Path) -> None:
    said = install_horovod(tmp_path, sys.executable, HOROVOD_SDIST="/nowhere/horovod.tgz")
    assert said == "install_horovod: error: HOROVOD_SDIST=/nowhere/horovod.tgz: no such file\n"


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
    said, error = make_venv(tmp_path, fake_python(tmp_path / "old", version)).splitlines()
    assert said == "Python 3.10 or later is needed, old is {}.{}: name another with make PYTHON=...".format(*version)
    assert error.startswith("make: ***") and not (tmp_path / "venv").exists()


def test_make_says_to_remove_an_environment_of_an_old_python(tmp_path: Path) -> None:
    fake_python(tmp_path / "venv" / "bin" / "python", (3, 9))
    said, error = make_venv(tmp_path, fake_python(tmp_path / "new", (3, 10))).splitlines()
    assert said == f"Python 3.10 or later is needed, python is 3.9: remove {tmp_path / 'venv'} and run make again"
    assert error.startswith("make: ***")


def test_make_goes_on_with_the_oldest_python_that_will_do(tmp_path: Path) -> None:
    said = make_venv(tmp_path, fake_python(tmp_path / "new", (3, 10)))
    assert f"ran with -m venv {tmp_path / 'venv'}" in said and "is needed" not in said
