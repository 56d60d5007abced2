"""What a start says of the machine and of the source."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import ROOT


def git(folder: Path, *command: str) -> str:
    """What git prints, with an author of its own."""
    author = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(["git", *command], cwd=folder, env={**os.environ, **author}, check=True, capture_output=True)
    return done.stdout.decode().strip()


def committed(folder: Path, file: str) -> str:
    """Make a repository of a folder, with this file alone in it; returns the commit."""
    git(folder, "init", "--quiet")
    git(folder, "add", "--force", file)
    git(folder, "commit", "--quiet", "--message", "First")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of this source in the repository of somebody's project, as pip or git archive put it there."""
    copy = tmp_path / "project" / "lib"
    shutil.copytree(ROOT / "tandem", copy / "tandem", ignore=shutil.ignore_patterns("__pycache__"))
    (copy.parent / "notes.txt").write_text("of the project")
    committed(copy.parent, "notes.txt")
    return copy


def commit_of(source: Path, **environment: str) -> str:
    program = "from tandem.training.run_folder.starts import environment; print(environment()['git_commit'])"
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, cwd=source, env={**os.environ, **environment}, check=True, capture_output=True)
    return found.stdout.decode().strip()


def test_the_commit_is_that_of_this_source_and_of_no_repository_around_it_or_in_the_environment(source: Path) -> None:
    elsewhere = {"GIT_DIR": str(source.parent / ".git"), "GIT_WORK_TREE": str(source.parent)}  # as hooks of git have it
    assert commit_of(source) == commit_of(source, **elsewhere) == "None"
    commit = committed(source, "tandem/__init__.py")
    assert commit_of(source) == commit_of(source, **elsewhere) == commit
    with open(source / "tandem" / "__init__.py", "a") as file:
        file.write("# changed\n")
    assert commit_of(source) == f"{commit}-dirty"
    git(source, "add", ".")
    git(source, "commit", "--quiet", "--message", "Second")
    git(source, "worktree", "add", "--quiet", "../other")  # of which .git is a file
    assert commit_of(source.parent / "other") == git(source, "rev-parse", "HEAD")
