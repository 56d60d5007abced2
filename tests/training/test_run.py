"""What a full disk, a kill, a request to stop, an edit or another run in its place leaves of a run, and how it goes on.

What is so of every script stands in tests/test_every_script.py; here one script stands for all."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tandem.distributed.engines import replicated
from tandem.distributed.engines.arithmetic import gradient_norm
from tandem.training.checkpoint.store import Checkpoints
from tandem.training.run_folder.folder import RunFolder, read_config_to_resume
from tandem.training.run_folder.starts import starts
from tests.processes import on_processes
from tests.scripts import VAE, assert_same_run, edit_checkpoint, files, metrics, names
from tests.training.disk import failing

SIX = ("--max_steps", "6", "--save_every_n_steps", "2")


def wait_for_saves() -> None:
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()


@contextlib.contextmanager
def in_updates(actions: Mapping[int, Callable[[], object]]) -> Iterator[None]:
    """Call functions at the beginning of updates, by their numbers, from 0."""
    with contextlib.ExitStack() as stack:
        for step, do in actions.items():
            stack.enter_context(VAE.in_update(step, do))
        yield


@contextlib.contextmanager
def full_disk(first: int, last: int) -> Iterator[None]:
    """The disk takes nothing from the beginning of one update to that of another."""
    with pytest.MonkeyPatch.context() as disk:

        def fill() -> None:
            wait_for_saves()
            failing(disk, 1, ("fsync", "replace"), any_thread=True)

        def empty() -> None:
            wait_for_saves()
            disk.undo()

        with in_updates({first: fill, last: empty}):
            yield


def exit_code(folder: Path, *flags: str) -> Any:
    with pytest.raises(SystemExit) as raised:
        VAE.train(folder, *flags)
    return raised.value.code


def test_the_norm_of_gradients_is_taken_where_a_line_shows_it_and_where_it_is_clipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated, "gradient_norm", norm := Mock(wraps=gradient_norm))
    for limit, norms in (("0", 2), ("1", 6)):
        norm.reset_mock()
        VAE.train(tmp_path / limit, "--max_steps", "6", "--log_every_n_steps", "3", "--max_grad_norm", limit)
        assert norm.call_count == norms and all(line["grad_norm"] > 0 for line in metrics(tmp_path / limit))


# A full disk.


def test_a_full_disk_is_reported_training_goes_on_and_the_next_save_and_picture_succeed(tmp_path: Path) -> None:
    with full_disk(1, 4):
        said = VAE.output_of(tmp_path, *SIX, "--sample_every_n_steps", "2")
    assert said.count("step_00000002: No space left on device; training goes on") == 1
    assert said.count("cannot write the checkpoint") == 1  # not at every save
    assert said.count(f"checkpoints are written again: {tmp_path}/checkpoints/step_00000006") == 1
    for step in (2, 4):
        assert said.count(f"cannot write the picture of update {step}: No space left on device") == 1
    assert names(tmp_path / "checkpoints") == ["latest", "step_00000006"]
    assert names(tmp_path / "samples") == ["step_00000006.png"]
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_last_save_that_fails_is_exit_code_1_and_names_the_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with full_disk(5, 99):
        assert exit_code(tmp_path, *SIX) == 1
    said = capsys.readouterr().err
    assert re.search("step_00000006.*; free space on that disk, and run the same command again .*step_00000004", said)
    assert "training goes on" not in said


def test_a_model_that_the_disk_does_not_take_is_exit_code_1_and_written_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(VAE.model, "save_pretrained", refuse)
        assert exit_code(tmp_path, *SIX) == 1
    assert "No space left on device; free space on that disk" in capsys.readouterr().err
    assert "finished: " in VAE.output_of(tmp_path, *SIX) and (tmp_path / "model" / "training.json").exists()


# The folder is renamed, or becomes that of another run.


def test_a_folder_that_is_renamed_under_a_run_does_not_reappear_and_the_run_says_that_it_ends_unsaved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    with VAE.in_update(2, lambda: os.rename(a, b)):
        assert exit_code(a, *SIX) == 1
    assert names(tmp_path) == ["b"] and f"the run folder {a} is gone" in capsys.readouterr().err
    VAE.train(b, *SIX)
    assert [line["step"] for line in metrics(b)] == [1, 2, 3, 4, 5, 6]


def test_a_folder_that_is_renamed_and_renamed_back_has_all_its_lines_and_needs_no_lock(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    with in_updates({2: lambda: os.rename(a, b), 3: lambda: os.rename(b, a), 4: (a / ".lock").unlink}):
        VAE.train(a, *SIX)
    assert [line["step"] for line in metrics(a)] == [1, 2, 3, 4, 5, 6] and b"\0" not in files(a)["metrics.jsonl"]


def test_a_run_that_began_where_another_one_was_is_left_alone(copied: Path, tmp_path: Path) -> None:
    def replace() -> None:
        wait_for_saves()
        os.rename(tmp_path / "a", tmp_path / "b")
        os.rename(copied, tmp_path / "a")
        (tmp_path / "a" / ".lock").write_text("process 1 on another")
        before.update(files(tmp_path / "a"))

    before: dict[str, bytes] = {}
    with VAE.in_update(2, replace):
        assert exit_code(tmp_path / "a", *SIX) == 1
    assert before and files(tmp_path / "a") == before


def synced(descriptor: int) -> str:
    return os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))


def test_a_save_is_not_committed_into_a_folder_that_became_that_of_another_run_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def taken_over(descriptor: int) -> None:
        fsync(descriptor)
        if synced(descriptor) == "state.json":
            (tmp_path / ".lock").unlink()
            (tmp_path / ".lock").write_text("process 1 on another")

    monkeypatch.setattr(os, "fsync", taken_over)
    assert exit_code(tmp_path, *SIX) == 1 and names(tmp_path / "checkpoints") == []


def test_the_lines_before_a_checkpoint_are_synced_before_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append(synced(descriptor)), sync(descriptor)))
    monkeypatch.setattr(os, "rename", lambda *paths: (events.append("rename"), rename(*paths)))
    VAE.train(tmp_path, *SIX)
    assert events[events.index("rename") - 1] == "metrics.jsonl"


# Asked to stop, killed, and started again.


def test_a_stopped_run_says_how_to_go_on_and_each_start_how_it_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    VAE.train_stopped(1, tmp_path, *SIX)
    assert "command again to go on" in capsys.readouterr().err
    VAE.train_killed(3, tmp_path, *SIX)
    VAE.train(tmp_path, *SIX)
    ended = ["asked to stop at update 2", None, "finished at update 6"]
    assert [start["ended"] for start in starts(tmp_path)] == ended
    capsys.readouterr()
    VAE.train_stopped(1, tmp_path, *SIX, "--fresh")
    assert "without --fresh" in capsys.readouterr().err


def test_a_run_that_is_nearly_out_of_time_saves_first_and_what_no_start_can_finish_in_time_ends_it_for_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = [*SIX, "--validate_every_n_steps", "1", "--save_before_minutes", "0.001"]
    assert exit_code(tmp_path, *short) == 75, "an update was made"
    assert "step_00000001" in names(tmp_path / "checkpoints")
    said = capsys.readouterr().err
    assert "--save_before_minutes 0.001: saved update 1; run the same command again" in said, said
    assert "asked to stop" not in said
    assert starts(tmp_path)[-1]["ended"] == "asked to stop by --save_before_minutes 0.001 at update 1"
    assert "--save_before_minutes" in VAE.refused(tmp_path, *short)
    VAE.train(tmp_path, *SIX)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


OVER = ("--max_minutes", "1e-9")


def test_a_run_whose_time_is_over_finishes_with_a_last_update_and_can_be_extended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    VAE.train(run, *SIX, *OVER, "--ema_decay", "0.5")
    said = capsys.readouterr().err
    assert (
        "the 1e-09 minutes of --max_minutes are over: the next update is the last" in said
        and "finished: 2 updates" in said
    )
    assert names(run / "checkpoints") == ["latest", "step_00000002"] and (run / "model" / "config.json").is_file()
    assert names(run / "samples") == ["step_00000002.png"] and "valid/ema/loss" in metrics(run)[-1]
    VAE.train(run, *SIX, *OVER, "--ema_decay", "0.5")
    assert "this run is finished" in (said := capsys.readouterr().err) and "a larger --max_minutes" in said
    shutil.rmtree(run / "model")  # as if it had been killed before it was written
    VAE.train(run, *SIX, *OVER, "--ema_decay", "0.5")
    assert len(metrics(run)) == 2 and (run / "model" / "config.json").is_file()
    VAE.train(run, *SIX, "--max_minutes", "100", "--ema_decay", "0.5")
    VAE.train(whole, *SIX, "--ema_decay", "0.5")
    assert [line["loss"] for line in metrics(run)] == [line["loss"] for line in metrics(whole)]
    assert (run / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()


def test_a_run_that_was_killed_when_its_time_was_over_makes_its_last_update(tmp_path: Path) -> None:
    VAE.train_killed(3, tmp_path, *SIX, "--save_every_n_steps", "1")
    VAE.train(tmp_path, *SIX, *OVER)
    assert "valid/loss" in metrics(tmp_path)[-1] and metrics(tmp_path)[-1]["step"] == 4
    assert "step_00000004.png" in names(tmp_path / "samples")


def test_a_checkpoint_is_written_when_the_newest_is_as_old_as_was_asked_for(tmp_path: Path) -> None:
    for flags, saved in {
        "--save_every_n_steps 4 --save_every_minutes 1e-9": [1, 2, 3, 4, 5],
        "--save_every_n_steps 0 --save_every_minutes 1e-9": [1, 2, 3, 4, 5],
        "--save_every_n_steps 4": [4, 5],
        "--save_every_n_steps 0": [5],
    }.items():
        run = VAE.train(tmp_path / "run", "--fresh", "--max_steps", "5", "--keep_n_checkpoints", "9", *flags.split())
        assert names(run / "checkpoints") == ["latest", *(f"step_{step:08d}" for step in saved)], flags
    assert VAE.parsed().save_every_minutes == 20
    assert VAE.parsed("--save_every_n_steps", "0").save_every_minutes == 0


@pytest.mark.parametrize("step", [1, 3])
def test_a_run_that_is_killed_in_a_validation_goes_on_to_the_same_bits(
    step: int, run_of_eight: Callable[..., Path], tmp_path: Path
) -> None:
    """In that of the averaged weights: the checkpoint before it knows that both are still to be made."""
    VAE.train_killed_in_validation(step, tmp_path, *VAE.eight)
    assert f"step_{step + 1:08d}" in names(tmp_path / "checkpoints")
    VAE.train(tmp_path, *VAE.eight)
    assert_same_run(tmp_path, run_of_eight(VAE))


@pytest.mark.parametrize("is_logged", [False, True])
def test_a_checkpoint_of_an_earlier_version_that_holds_the_line_of_its_update_is_resumed(
    is_logged: bool, run_of_eight: Callable[..., Path], tmp_path: Path
) -> None:
    """It wrote the line of an update after its evaluation, and the checkpoint before that kept the line."""
    VAE.train_killed_in_validation(3, tmp_path, *VAE.eight)
    *before, line = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join([*before, line] if is_logged else before))
    kept = [item for item in json.loads(line).items() if item[0] not in ("step", "samples", "epoch")]

    def as_before(parts: Any) -> None:
        del parts["progress"]["finished"]
        parts["progress"]["unfinished_line"] = kept

    edit_checkpoint(tmp_path / "checkpoints" / "step_00000004", as_before)
    VAE.train(tmp_path, *VAE.eight)
    assert_same_run(tmp_path, run_of_eight(VAE))


def test_a_run_that_is_killed_before_its_first_save_begins_again(
    run_of_eight: Callable[..., Path], tmp_path: Path
) -> None:
    VAE.train_killed(1, tmp_path, *VAE.eight)
    VAE.train(tmp_path, *VAE.eight)
    assert_same_run(tmp_path, run_of_eight(VAE))


def test_a_resumed_run_says_its_validation_and_what_changed_of_its_precision(tmp_path: Path) -> None:
    VAE.train(tmp_path, "--max_steps", "2", "--precision", "fp32")
    said = VAE.output_of(tmp_path, "--max_steps", "3", "--precision", "bf16").splitlines()
    assert any("fp32" in line and "bf16" in line for line in said)
    (shown,) = (line.split() for line in said if line.startswith("valid "))
    assert float(shown[3]) == pytest.approx(metrics(tmp_path)[-1][f"valid/{shown[2]}"], rel=1e-3)


def test_a_run_that_was_killed_before_its_first_checkpoint_says_that_it_begins_again(tmp_path: Path) -> None:
    text, killed = "an earlier start of this run left no checkpoint", tmp_path / "killed"
    assert text not in VAE.output_of(tmp_path / "whole", "--max_steps", "1")
    killed.mkdir()
    for name in ("starts.jsonl", "config.yaml"):
        shutil.copy(tmp_path / "whole" / name, killed)
    assert text in VAE.output_of(killed, "--max_steps", "1")


@pytest.mark.parametrize("gone", ["checkpoints", "checkpoints/step_*"])
def test_a_run_whose_checkpoints_are_gone_does_not_start_afresh(copied: Path, gone: str) -> None:
    for path in copied.glob(gone):
        shutil.rmtree(path)
    before = files(copied)
    assert "--fresh" in VAE.refused(copied, *VAE.eight) and files(copied) == before


@pytest.mark.parametrize(("edit", "expected"), [
    (lambda parts: parts["progress"].update(samples="x"), "x samples"),
    (lambda parts: parts["progress"].update(samples=-8), "-8 samples"),
    (lambda parts: parts["progress"].update(samples=8 * 10**30), "of update 1000000"),
    (lambda parts: parts["progress"].clear(), "KeyError: 'batch_size'"),
    (lambda parts: parts["progress"].update(unfinished_line=[7]), "progress is "),
    (lambda parts: parts.update(engine=[]), "'engine'"),
])  # fmt: skip
def test_a_checkpoint_that_was_edited_and_summed_again_is_one_line(
    copied: Path, edit: Callable[[Any], object], expected: str
) -> None:
    edit_checkpoint(max((copied / "checkpoints").glob("step_*")), edit)
    assert expected in VAE.refused(copied, *VAE.eight, "--max_steps", "9")


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (["--seed", "1"], "--seed was 3 and is now 1"),
        (["--batch_size", "4"], "--batch_size 8, now it is 4"),
        (["--image_folder", "demo:shapes:65"], "51 samples per epoch, now there are 52"),
    ],
)
def test_a_run_is_not_resumed_with_another_seed_batch_size_or_data_set(
    copied: Path, said: list[str], text: str
) -> None:
    before = files(copied)
    assert text in VAE.refused(copied, *VAE.eight, "--max_steps", "9", *said) and files(copied) == before


def test_a_folder_that_another_process_does_not_see_is_told_before_a_resume_needs_it(tmp_path: Path) -> None:
    """Each of two machines has its own disk."""

    def load(process: Any) -> str:
        said: list[str] = []
        folder = RunFolder(tmp_path / f"disk{process.rank}", process)
        checkpoints = Checkpoints(folder.checkpoints_dir, 1, process)
        try:
            checkpoints.load_newest(folder, ["model"], said.append)
        except ValueError as error:
            return f"refused: {error}"
        checkpoints.save(1, {"model": {}}, {})
        checkpoints.wait()
        return said[0]

    unseen = f"rank 1 does not see {tmp_path}/disk0; put --output_dir on a disk that all machines see"
    assert unseen in on_processes(2, load)[0]
    assert all(f"refused: cannot resume: {unseen}" in line for line in on_processes(2, load))


def test_a_process_that_does_not_see_the_run_is_told_before_anything_else_of_it_is_read(tmp_path: Path) -> None:
    VAE.train(tmp_path / "disk0", "--max_steps", "1")

    def read(process: Any) -> str:
        flags = {"output_dir": str(tmp_path / f"disk{process.rank}"), "fresh": False, "dry_run": False}
        try:
            read_config_to_resume(argparse.Namespace(**flags, script="train_vae.py"), process)
        except ValueError as error:
            return f"refused: {error}"
        return "goes on"

    assert all(
        f"refused: cannot resume: rank 1 does not see {tmp_path}/disk1" in line for line in on_processes(2, read)
    )


# What else a run writes.


def test_nothing_of_the_environment_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "not-to-be-written")
    VAE.train(tmp_path, "--max_steps", "1")
    assert not [name for name, content in files(tmp_path).items() if b"not-to-be-written" in content]


def test_updates_are_profiled_as_far_as_there_are_any(tmp_path: Path) -> None:
    said = VAE.output_of(tmp_path, "--max_steps", "3", "--profile_steps", "2:9")
    assert names(tmp_path / "profile") == ["updates_2-3.json.gz", "updates_2-3.txt"] and "updates_2-3.json.gz" in said
    said = VAE.output_of(tmp_path, "--max_steps", "4", "--profile_steps", "8:9")
    assert "--profile_steps 8:9: " in said
