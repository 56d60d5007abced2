"""The commands that messages name can be typed where they are printed."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.io.installed import similar_files
from tests.scripts import ROOT

PROGRAMS = Path(sys.executable).parent


def said_in(folder: Path, path: str, what: str) -> str:
    """What tandem.io.installed says in a folder, where a shell has this PATH."""
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tandem.io.installed import *; print({what})"
    done = subprocess.run(
        [sys.executable, "-c", f"import shlex; {program}"],
        cwd=folder,
        env={"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("place", [".", "docs", "elsewhere with a space"])
@pytest.mark.parametrize("programs", ["of this environment", "of the system alone", "of another environment first"])
def test_a_script_is_started_by_the_command_that_is_named(place: str, programs: str, tmp_path: Path) -> None:
    folder = tmp_path / place if " " in place else ROOT / place
    folder.mkdir(exist_ok=True)
    other = tmp_path / "other" / "python"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\nexit 7\n")
    other.chmod(0o755)
    before = {"this": f"{PROGRAMS}:", "the": "", "another": f"{other.parent}:{PROGRAMS}:"}[programs.split()[1]]
    path = f"{before}/usr/bin:/bin"
    command = said_in(folder, path, "shlex.join(command_of('report.py'))")
    done = subprocess.run(
        f"{command} --help", shell=True, cwd=folder, env={"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("usage: report.py"), command
    assert (command == "python report.py") == (place == "." and programs == "of this environment")


@pytest.mark.parametrize("place", [".", "docs"])
def test_an_extra_and_horovod_are_installed_from_where_the_sources_are(place: str) -> None:
    said = said_in(ROOT / place, os.environ["PATH"], "how_to_install('video')")
    *_, target = shlex.split(said)
    assert said.startswith("pip install -e ") and target.endswith("[video]")
    assert (ROOT / place / target.removesuffix("[video]")).samefile(ROOT)
    hint = "__import__('tandem.distributed.backends.horovod').distributed.backends.horovod.HorovodBackend.install_hint"
    _, script = shlex.split(said_in(ROOT / place, os.environ["PATH"], hint))
    assert (ROOT / place / script).samefile(ROOT / "scripts" / "install_horovod.sh")


def test_a_file_of_a_near_name_is_meant_only_where_there_is_none_of_this_name(tmp_path: Path) -> None:
    (tmp_path / "hot.yaml").touch()
    assert similar_files(f"{tmp_path}/hut.yaml", FileNotFoundError()) == f"; did you mean {tmp_path}/hot.yaml?"
    assert similar_files(f"{tmp_path}/hot.yaml", PermissionError()) == ""
    too_long = OSError(errno.ENAMETOOLONG, "")
    assert similar_files(f"{'x' * 300}/hot.yaml", too_long) == ""
