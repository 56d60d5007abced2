"""A file is written whole or not at all, and never through a link that somebody put where a file is going to be."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.io import writing
from tandem.io.writing import acquire_lock, open_appending, replacing, write_atomically
from tests.training.disk import failing


@pytest.fixture
def treasure(tmp_path: Path) -> Path:
    path = tmp_path / "treasure"
    path.write_text("of the user")
    return path


def test_a_temporary_file_that_is_a_link_is_not_followed(tmp_path, treasure):
    path, temporary = tmp_path / "run" / "config.yaml", tmp_path / "run" / ".config.yaml.tmp"
    path.parent.mkdir()
    temporary.symlink_to(treasure)
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new" and not path.is_symlink()
    assert treasure.read_text() == "of the user" and os.listdir(path.parent) == ["config.yaml"]
    os.mkfifo(temporary)  # an open() of it would wait for a reader
    write_atomically(path, b"newer")
    assert path.read_bytes() == b"newer" and not temporary.exists()


def test_a_link_that_appears_between_deletion_and_creation_is_an_error(tmp_path, treasure):
    path = tmp_path / "a"
    with pytest.raises(FileExistsError), replacing(path) as temporary:
        temporary.symlink_to(treasure)
        writing.create(temporary)
    assert treasure.read_text() == "of the user" and not path.exists()


def test_a_file_has_the_rights_of_the_umask_and_a_failed_write_leaves_the_old_one_alone(tmp_path, monkeypatch):
    path = tmp_path / "a"
    with replacing(path) as temporary:
        temporary.touch(mode=0o600)  # as safetensors makes files
    assert stat.S_IMODE(path.stat().st_mode) == writing.NEW_FILE_MODE
    write_atomically(path, b"old")
    assert stat.S_IMODE(path.stat().st_mode) == writing.NEW_FILE_MODE
    failing(monkeypatch, 1, ("fsync",))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("name", ["x" * 250, "x" * 251, "x" * 255, "é" * 127])
def test_a_file_may_have_the_longest_name(name, tmp_path):
    for content in (b"old", b"new"):
        write_atomically(tmp_path / name, content)
        assert (tmp_path / name).read_bytes() == content and os.listdir(tmp_path) == [name]
    with replacing(tmp_path / f"{name[:-1]}y") as other, replacing(tmp_path / name) as temporary:
        assert other != temporary
        other.touch()
        temporary.touch()


@pytest.mark.parametrize("opened", [acquire_lock, open_appending])
def test_a_lock_or_a_growing_file_that_is_a_link_or_a_pipe_is_an_error(opened, tmp_path, treasure):
    (tmp_path / "link").symlink_to(treasure)
    with pytest.raises(OSError, match="it is a link; remove it"):
        opened(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError):
        opened(tmp_path / "pipe")
    assert treasure.read_text() == "of the user"
    with opened(tmp_path / "new") as file:
        file.write(b"text")
    assert (tmp_path / "new").exists()


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Starts a process that holds the lock file `tmp_path / ".lock"`, which says who holds it, or `said` if given."""
    monkeypatch.setattr(writing, "LOCK_SECONDS", 0.0)
    fork, started = multiprocessing.get_context("fork"), []

    def start(said: str = "") -> Any:
        is_held = fork.Event()

        def work() -> None:
            lock = acquire_lock(tmp_path / ".lock")
            if said:
                lock.seek(0), lock.truncate(0), lock.write(said.encode()), lock.flush()
            is_held.set()
            signal.pause()

        started.append(process := fork.Process(target=work))
        process.start()
        assert is_held.wait(60)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


AWAY = "process 7 on node9 since 2026-01-31 12:00:00 UTC"


def test_a_lock_of_another_machine_is_waited_for_until_its_file_server_frees_it(held, tmp_path, capsys):
    other, marks = held(AWAY), []

    def mark(phase: str) -> None:
        marks.append(phase)
        if len(marks) == 3:
            other.kill()
            other.join()

    acquire_lock(tmp_path / ".lock", mark).close()
    assert marks == [f"waiting for {tmp_path}, which is in use by {AWAY}"] * 3
    [line] = capsys.readouterr().err.splitlines()
    assert f"{tmp_path} is in use by {AWAY}" in line and "2 minutes" in line


OTHERS = [f"{AWAY}\x1b[2J", "process 999999999 on {host}", "process {own} on {host}x", "nonsense"]


@pytest.mark.parametrize("said", OTHERS)
def test_a_lock_that_outlives_the_lease_is_that_of_a_process_that_runs_seen_here_or_not(said, held, tmp_path, capsys):
    said = said.format(own=os.getpid(), host=socket.gethostname())
    held(said)
    with pytest.raises(ValueError, match=re.escape(f"is in use by {said.replace(chr(27), '?')}; end it first, or")):
        acquire_lock(tmp_path / ".lock", lease_seconds=0.1)
    (line,) = capsys.readouterr().err.splitlines()
    assert "waiting for up to" in line


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_streams_that_are_closed_lead_to_the_null_device_and_no_file_takes_their_place(closed, tmp_path):
    code = (
        "import os, sys; from tandem.io.writing import open_standard_streams as mend, say; mend(); mend(); say('x');"
        "print('x', file=sys.stdout, flush=True); sys.stdin.read();"
        f"number = os.open(os.devnull, os.O_RDONLY); open({str(tmp_path / 'descriptor')!r}, 'w').write(str(number))"
    )
    script = f'exec "$@" </dev/null {closed}'
    ended = subprocess.run(["sh", "-c", script, "sh", sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended
    assert int((tmp_path / "descriptor").read_text()) >= 3
