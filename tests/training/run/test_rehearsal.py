"""Where a dry run works, and what is left of it."""

import os
import signal

import pytest

from tests.processes import Process
from training.run import rehearsal
from training.run.rehearsal import folder_beside
from training.run.starts import add_start


@pytest.fixture
def at_exit(monkeypatch):
    """What is called when the process ends."""
    calls = []
    monkeypatch.setattr(rehearsal.atexit, "register", lambda *call: calls.append(call))
    return calls


def killed_dry_run(output_dir) -> None:
    folder_beside(str(output_dir), Process())
    os.kill(os.getpid(), signal.SIGKILL)


def only_one(folder, besides=()):
    (found,) = set(folder.glob(".dry-run-*")) - {*besides}
    return found


def test_folders_that_were_made_for_a_dry_run_are_deleted_when_it_ends_and_no_others(tmp_path, at_exit):
    (tmp_path / "runs").mkdir()
    made = folder_beside(str(tmp_path / "runs" / "new" / "newer" / "vae"), Process())
    assert os.path.dirname(made) == str(tmp_path / "runs" / "new" / "newer")
    ((delete, *args),) = at_exit
    delete(*args)
    assert os.listdir(tmp_path) == ["runs"] and not os.listdir(tmp_path / "runs")
    made = folder_beside(str(tmp_path / "runs" / "new" / "vae"), Process())
    (tmp_path / "runs" / "new" / "notes.txt").touch()
    delete, *args = at_exit[-1]
    delete(*args)
    assert os.listdir(tmp_path / "runs" / "new") == ["notes.txt"]


def test_a_dry_run_deletes_what_one_that_was_killed_left(tmp_path, at_exit, in_a_child):
    assert in_a_child(lambda: killed_dry_run(tmp_path / "vae")) == signal.SIGKILL
    left = only_one(tmp_path)
    add_start(left, {"command": ["train_vae.py", "--dry_run"]})
    (left / "checkpoints").mkdir()
    made = folder_beside(str(tmp_path / "vae"), Process())
    assert not left.exists() and [str(path) for path in tmp_path.iterdir()] == [made]


def test_a_dry_run_leaves_every_folder_that_it_does_not_know_as_left_by_one(tmp_path, at_exit, in_a_child):
    elsewhere = tmp_path / "elsewhere"
    for name in ("run", "linked"):
        assert in_a_child(lambda name=name: killed_dry_run(elsewhere / name / "vae")) == signal.SIGKILL
    real, linked = only_one(elsewhere / "run").rename(tmp_path / ".dry-run-real"), only_one(elsewhere / "linked")
    add_start(real, {"command": ["train_vae.py"]})
    (tmp_path / ".dry-run-link").symlink_to(linked)
    for name, said in (("mine", None), ("away", "process 7 on node9 since 2026"), ("empty", "")):
        (tmp_path / f".dry-run-{name}").mkdir()
        if said is not None:
            (tmp_path / f".dry-run-{name}" / ".dry_run").write_text(said)
    before = {*tmp_path.rglob("*")}
    in_it, answer = os.pipe()
    if (other := os.fork()) == 0:
        try:
            os.write(answer, folder_beside(str(tmp_path / "vae"), Process()).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(answer)
    try:
        begun = os.read(in_it, 4096).decode()
        made = folder_beside(str(tmp_path / "vae"), Process())
        assert {str(path) for path in {*tmp_path.iterdir()} - before} == {begun, made}
        assert before <= {*tmp_path.rglob("*")}
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        os.close(in_it)
    folder_beside(str(tmp_path / "vae"), Process())
    assert not os.path.exists(begun)
