"""Where a dry run works, and what is left of it."""

import os
import signal
from pathlib import Path

from tandem.training.run_folder.dry_run_folder import folder_beside
from tandem.training.run_folder.starts import add_start
from tests.processes import Process


def killed_dry_run(output_dir) -> None:
    if (child := os.fork()) == 0:
        try:
            folder_beside(str(output_dir), Process())
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def only_one(folder):
    (found,) = folder.glob(".dry-run-*")
    return found


def test_a_dry_run_deletes_what_one_that_was_killed_left_and_leaves_every_other_folder(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    for name in ("run", "linked"):
        killed_dry_run(elsewhere / name / "vae")
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
    add_start(Path(begun), {"command": ["train_vae.py", "--dry_run"]})
    (Path(begun) / "checkpoints").mkdir()
    folder_beside(str(tmp_path / "vae"), Process())
    assert not os.path.exists(begun), "it was killed"
