"""A run on one process: what it leaves behind, and how it goes on."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from training.checkpoints import store
from training.flags.converters import positive_int
from training.flags.parser import ArgumentParser
from training.flags.shared import add_run_arguments
from training.run import stopwatch
from training.run.random_state import RandomState
from training.run.run import Run
from training.run.stopwatch import Deadline
from training.run.tracking import JsonlTracker

ROOT = Path(__file__).resolve().parents[3]


class OneProcess:
    rank, world_size, device = 0, 1, torch.device("cpu")
    is_root, is_restart = True, False

    def __init__(self, **description):
        self._description = {"backend": "single", "world_size": 1, "device": "cpu", **description}

    def agreement(self):
        return nullcontext()

    def barrier(self):
        pass

    def before_update(self, wait):
        wait()

    def gather(self, tensor):
        return tensor

    def mark(self, phase):
        pass

    def broadcast_object(self, value):
        return json.loads(json.dumps(value))

    def describe(self):
        return self._description

    def summary(self):
        return "single: 1 process"


class Weights:
    """Adds one to its weight at each update."""

    def __init__(self):
        self.weight = torch.zeros(2)

    def state_dict(self):
        return {"weight": self.weight}

    def load_state_dict(self, state):
        self.weight = state["weight"].clone()


def write_model(path: Path) -> None:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")


def train(folder, *flags: str, stop_at: int | None = None, here: OneProcess | None = None) -> Weights:
    """Train for --max_steps updates of 4 samples, or be killed after `stop_at` of them."""
    parser = ArgumentParser("toy.py")
    parser.add_argument("--width", type=positive_int, default=2)
    add_run_arguments(parser, output_dir=str(folder), batch_size=4, save_every_n_steps=2)
    args = parser.parse(["--log_every_n_steps", "1", "--max_steps", "6", *flags])
    run = Run(args, parser.settings(args), here or OneProcess(), model_arguments=("width",), samples_per_epoch=16)
    model = Weights()
    run.resume(model=model)
    while not run.progress.finished and run.progress.step != stop_at:
        model.weight += 1
        run.advance()
        run.log({"loss": 1.0 / run.progress.step, "weight": model.weight[0].item()})
        if run.due(args.save_every_n_steps):
            run.save()
        if run.out_of_time:
            run.save_and_exit()
    if run.progress.finished and not run.is_complete:
        run.finish(write_model, run.folder.model_dir)
    run.close()
    return model


def logged(folder, name: str) -> list:
    return [json.loads(line)[name] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_its_settings_environment_metrics_and_checkpoints(tmp_path):
    train(tmp_path)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["max_steps"] == 6
    assert json.loads((tmp_path / "environment.json").read_text())["backend"] == "single"
    assert logged(tmp_path, "step") == [1, 2, 3, 4, 5, 6]
    assert logged(tmp_path, "samples") == [4, 8, 12, 16, 20, 24]
    assert logged(tmp_path, "epoch") == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
    assert {"loss", "samples_per_second", "seconds"} <= json.loads(
        (tmp_path / "metrics.jsonl").read_text().splitlines()[0]
    ).keys()
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "latest",
        "step_00000002",
        "step_00000004",
        "step_00000006",
    ]


def test_a_killed_run_goes_on_from_its_checkpoint_and_logs_no_step_twice(tmp_path, capsys):
    train(tmp_path, stop_at=5)
    assert logged(tmp_path, "step") == [1, 2, 3, 4, 5]
    model = train(tmp_path)
    assert "resumed from" in capsys.readouterr().err
    assert logged(tmp_path, "step") == [1, 2, 3, 4, 5, 6]
    assert logged(tmp_path, "weight") == [1, 2, 3, 4, 5, 6] and model.weight.tolist() == [6, 6]


def test_a_run_killed_before_its_first_checkpoint_starts_at_the_beginning(tmp_path):
    train(tmp_path, stop_at=1)
    train(tmp_path)
    assert logged(tmp_path, "weight") == [1, 2, 3, 4, 5, 6]


def test_a_finished_run_says_so_and_can_be_extended(tmp_path, capsys):
    train(tmp_path)
    train(tmp_path)
    assert "this run is finished" in capsys.readouterr().err
    train(tmp_path, "--max_steps", "8")
    assert logged(tmp_path, "weight") == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_model_that_the_disk_does_not_take_is_exit_code_1_and_written_by_the_next_start(
    tmp_path, monkeypatch, capsys
):
    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setitem(globals(), "write_model", refuse)
        with pytest.raises(SystemExit) as exit:
            train(tmp_path)
    assert exit.value.code == 1 and "No space left on device; the newest checkpoint" in capsys.readouterr().err
    train(tmp_path)
    assert "finished: " in capsys.readouterr().err and (tmp_path / "model" / "training.json").exists()


@pytest.mark.parametrize("gone", ["checkpoints", "checkpoints/step_*"])
def test_a_run_whose_checkpoints_are_gone_does_not_start_afresh(tmp_path, gone):
    train(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    for path in tmp_path.glob(gone):
        shutil.rmtree(path)
    with pytest.raises(ValueError, match="--fresh"):
        train(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_fresh_starts_over_and_keeps_the_old_run(tmp_path, capsys):
    train(tmp_path / "run")
    assert train(tmp_path / "run", "--fresh", stop_at=1).weight.tolist() == [1, 1]
    assert logged(tmp_path / "run", "step") == [1] and logged(tmp_path / "run.old-1", "step") == [1, 2, 3, 4, 5, 6]
    assert "starting over" in capsys.readouterr().err


def test_another_model_is_refused_and_the_run_left_as_it_was(tmp_path):
    train(tmp_path, stop_at=3)
    with pytest.raises(ValueError, match="--width was 2 and is now 3"):
        train(tmp_path, "--width", "3")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["width"] == 2
    assert logged(tmp_path, "step") == [1, 2, 3]


def test_settings_that_leave_the_model_alone_may_change(tmp_path):
    train(tmp_path, stop_at=3)
    train(tmp_path, "--save_every_n_steps", "3")
    assert logged(tmp_path, "step") == [1, 2, 3, 4, 5, 6]


def test_random_generators_go_on_where_they_were(tmp_path):
    def draw():
        return random.random(), np.random.rand(), np.random.randn(), random.gauss(0, 1), torch.rand(1).item()  # noqa: NPY002

    # The last of two processes.
    state = RandomState(1, 2, torch.device("cpu"), lambda tensor: torch.cat([torch.zeros_like(tensor), tensor]))
    draw()  # leaves half of a pair of normal numbers in the generators
    saved = state.state_dict()
    expected = draw()
    state.load_state_dict(saved)
    assert draw() == expected


def test_generators_of_another_number_of_processes_are_left_as_they_were_seeded():
    saved = RandomState(0, 1, torch.device("cpu"), lambda tensor: torch.cat([tensor, tensor])).state_dict()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    RandomState(0, 1, torch.device("cpu"), lambda tensor: tensor).load_state_dict(saved)
    assert torch.rand(1) == expected


def test_a_new_place_and_precision_are_named_with_what_they_mean(tmp_path, capsys):
    train(tmp_path, stop_at=2, here=OneProcess(precision="fp32"))
    capsys.readouterr()
    new = {"backend": "deepspeed", "world_size": 4, "device": "cuda:0", "zero_stage": 3, "precision": "bf16"}
    train(tmp_path, here=OneProcess(**new))
    said = capsys.readouterr().err
    assert "it was written by single on 1 x cpu and goes on with deepspeed on 4 x cuda, ZeRO 3" in said
    assert "it was trained in fp32 and goes on in bf16" in said


def test_a_run_that_is_nearly_out_of_time_saves_and_exits_with_75(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        train(tmp_path, "--save_before_minutes", "0.001")
    assert exit.value.code == 75 and "asked to stop: saved update 1" in capsys.readouterr().err
    assert (tmp_path / "checkpoints" / "step_00000001").is_dir()
    train(tmp_path)
    assert logged(tmp_path, "weight") == [1, 2, 3, 4, 5, 6]


def test_room_for_the_last_save_grows_with_updates_and_saves(monkeypatch):
    now = 100.0
    monkeypatch.setattr(stopwatch, "process_seconds", lambda: now)
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: now)
    deadline = Deadline(minutes=60)
    for _ in range(3):
        deadline.update_done()
        now += 30.0
    now = 3600 - 2 * (2 * 30 + 20) - 1
    assert not deadline.near(save_seconds=20.0) and deadline.near(save_seconds=21.0)
    assert not Deadline(minutes=None).near(save_seconds=1e9)


def test_the_age_of_the_process_includes_its_start():
    code = "import time; time.sleep(0.3); from training.run.stopwatch import process_seconds; print(process_seconds())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert 0.3 <= float(result.stdout) < 30


def refuse_writes(monkeypatch, reason=errno.ENOSPC):
    def fsync(descriptor):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "fsync", fsync)


class FullFrom(Weights):
    """The disk is full while the weight is in a range."""

    def __init__(self, monkeypatch, first, last):
        super().__init__()
        self._monkeypatch, self._first, self._last = monkeypatch, first, last

    def state_dict(self):
        self._monkeypatch.undo()
        if self._first <= self.weight[0] <= self._last:
            refuse_writes(self._monkeypatch)
        return super().state_dict()


def train_on_a_full_disk(tmp_path, monkeypatch, first, last):
    monkeypatch.setitem(globals(), "Weights", lambda: FullFrom(disk, first, last))
    disk = pytest.MonkeyPatch()
    try:
        train(tmp_path)
    finally:
        disk.undo()
        monkeypatch.undo()


def test_a_full_disk_is_reported_once_training_goes_on_and_the_next_save_succeeds(tmp_path, monkeypatch, capsys):
    train_on_a_full_disk(tmp_path, monkeypatch, 2, 4)
    said = capsys.readouterr().err
    assert said.count("step_00000002: No space left on device; training goes on") == 1
    assert said.count("step_00000004: No space left on device; training goes on") == 1
    assert [path.name for path in sorted((tmp_path / "checkpoints").glob("s*"))] == ["step_00000006"]


def test_a_last_save_that_fails_is_exit_code_1_and_names_the_newest_checkpoint(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit:
        train_on_a_full_disk(tmp_path, monkeypatch, 6, 6)
    assert exit.value.code == 1
    assert "step_00000006: No space left on device; the newest checkpoint is step_00000004" in capsys.readouterr().err


def test_lines_that_the_disk_did_not_take_are_written_later(tmp_path, capsys):
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {})
    os.rename(tmp_path / "metrics.jsonl", tmp_path / "kept")
    (tmp_path / "metrics.jsonl").mkdir()  # cannot be opened for writing
    tracker.log(2, {})
    tracker.log(3, {})
    assert capsys.readouterr().err.count("cannot write") == 1 and tracker.failure
    (tmp_path / "metrics.jsonl").rmdir()
    os.rename(tmp_path / "kept", tmp_path / "metrics.jsonl")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2')  # as a disk that fills in the middle of a line leaves it
    tracker.log(4, {})
    assert logged(tmp_path, "step") == [1, 2, 3, 4] and tracker.failure is None


def test_the_lines_before_a_checkpoint_are_synced_before_it_is_there(tmp_path, monkeypatch):
    events = []
    sync, rename = store.sync, os.rename
    monkeypatch.setattr(store, "sync", lambda path: (events.append(path.name), sync(path)))
    monkeypatch.setattr(os, "rename", lambda *paths: (events.append("rename"), rename(*paths)))
    train(tmp_path, stop_at=2)
    assert events[events.index("rename") - 1] == "metrics.jsonl"


def test_another_seed_is_refused(tmp_path):
    train(tmp_path, stop_at=2)
    with pytest.raises(ValueError, match="--seed was 0 and is now 1"):
        train(tmp_path, "--seed", "1")


def test_a_picture_is_written_by_the_root_alone(tmp_path, monkeypatch):
    """The public VQGAN trainer had every rank write the same file at once."""
    written = []
    monkeypatch.setattr("training.run.folder.RunFolder.write_sample", lambda folder, step, png: written.append(step))
    parser = ArgumentParser("toy.py")
    add_run_arguments(parser, output_dir=str(tmp_path), batch_size=4)
    args = parser.parse(["--max_steps", "1"])
    here = OneProcess()
    run = Run(args, parser.settings(args), here, model_arguments=(), samples_per_epoch=16)
    run.resume()
    here.is_root = False
    run.log_sample("reconstructions", Image.new("RGB", (4, 4)))
    assert written == []
    here.is_root = True
    run.log_sample("reconstructions", Image.new("RGB", (4, 4)))
    assert written == [0]
    run.close()
