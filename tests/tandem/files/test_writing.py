"""A file is written whole or not at all, and never through a link that somebody put where a file is going to be."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tandem.files import writing
from tandem.files.writing import hold, open_appending, replacing, write_atomically


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
    write_atomically(path, b"old")
    assert stat.S_IMODE(path.stat().st_mode) == writing.NEW_FILE_MODE

    def full(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(writing.os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("opened", [hold, open_appending])
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


def test_a_growing_file_is_appended_to(tmp_path):
    for text in (b"a", b"b"):
        with open_appending(tmp_path / "lines") as file:
            file.write(text)
    assert (tmp_path / "lines").read_bytes() == b"ab"
