"""A run on one process: what it leaves behind, and how it goes on."""

import errno
import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from tests.processes import Process, Root, on_processes
from tests.training.disk import failing
from training.flags.converters import positive_int
from training.flags.parser import ArgumentParser
from training.flags.shared import add_run_arguments
from training.pictures.images import Sample
from training.run.best import BestModel
from training.run.costs import without_costs
from training.run.loop import Evaluation
from training.run.run import Run
from training.run.starts import starts
from training.run.stopwatch import Deadline

ROOT = Path(__file__).resolve().parents[3]


class Weights:
    """Adds one to its weight at each update. An engine, its module and its average in one."""

    skipped_updates = 0

    def __init__(self):
        self.weight = torch.zeros(2)
        self.told: list[str] = []

    def state_dict(self):
        self.told.append(f"save {int(self.weight[0])}")
        return {"weight": self.weight}

    def load_state_dict(self, state):
        self.weight = state["weight"].clone()

    def gathered(self):
        return nullcontext(self)

    def step(self):
        self.weight += 1
        return SimpleNamespace(grad_norm=torch.tensor(0.5), lr=0.1)

    def averages(self):
        return {"ema": self.gathered}

    def kept(self, trained):
        return self.gathered


class Numbers:
    """A feed whose batches are the numbers of their first samples."""

    noun, train_set, valid_set, samples_per_epoch = "number", range(16), range(4), 16

    def __init__(self):
        self.bad_samples = SimpleNamespace(
            counts={"bad_samples": 0}, state_dict=dict, load_state_dict=lambda state: None
        )
        self.validated = self.valid_set

    def summary(self):
        return "16 numbers to train on"

    def skipped(self):
        return "2 files are skipped: 2 .txt"

    def start(self, start_samples):
        self._at = start_samples
        return self._at

    def next(self):
        self._at += 4
        return self._at

    def preview(self, count):
        return list(range(count))

    def report_bad_samples(self, say):
        pass


def write_model(model: Weights, path: Path) -> None:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(model.weight.tolist()))


class Killed(Exception):
    """The process is gone."""


def parsed(folder, *flags: str):
    parser = ArgumentParser("toy.py")
    parser.add_argument("--width", type=positive_int, default=2)
    add_run_arguments(parser, output_dir=str(folder), batch_size=4, save_every_n_steps=2)
    args = parser.parse(["--log_every_n_steps", "1", "--max_steps", "6", *flags])
    return args, parser.settings(args)


def train(
    folder,
    *flags: str,
    stop_at: int | None = None,
    stop_after: int | None = None,
    here: Process | None = None,
    events: list | None = None,
    model: Weights | None = None,
    write: Callable[[Weights, Path], None] = write_model,
) -> Weights:
    """Train for --max_steps updates of 4 samples, or be killed after `stop_at` of them; a signal arrives in update
    `stop_after` of this start."""
    args, settings = parsed(folder, *flags)
    told = events if events is not None else []
    here = here or Process()
    feed = Numbers()
    run = Run(args, settings, here, feed, model_arguments=("width",))
    model = model or Weights()
    model.told = told

    def validate(model, step):
        told.append(f"validate {step}")
        feed.ask(False)
        return {"weight": model.weight[0].item(), "picture": Image.new("RGB", (4, 4))}

    def draw(models, shown, step):
        told.append(f"draw {step}")
        return Image.new("RGB", (4, 4))

    best = BestModel(run.folder.path, True, metric="valid/ema/weight")
    evaluation = Evaluation(model, model, validate, draw, write={"model": write}, best=best)
    run.resume(model=model, best=best)
    for made, (step, batch) in enumerate(run.updates(evaluation, preview=2), 1):
        assert batch == 4 * step
        told.append(f"update {step}")
        if made == stop_after:
            here.received.add(signal.SIGTERM)
        here.about_to_update()  # as engines do
        update = model.step()
        run.add(loss=torch.tensor(1.0 / (step + 1)))
        run.log(update, weight=model.weight[0], **{"of/two": 2.0})
        if step + 1 == stop_at:
            killed(run)
            return model
    return model


def run_of(folder, *flags: str, here: Process | None = None, feed: Numbers | None = None) -> Run:
    args, settings = parsed(folder, *flags)
    return Run(args, settings, here or Process(), feed or Numbers(), model_arguments=())


def evaluated(run: Run, each: Callable[[int], None] = lambda step: None, **evaluation) -> None:
    """Train and do something in `each` update; what is not said of the evaluation is blank."""
    model = Weights()
    evaluation = {"validate": lambda *_: {}, "draw": lambda *_: Image.new("RGB", (4, 4)), **evaluation}
    run.resume(model=model)
    for step, _ in run.updates(Evaluation(model, model, **evaluation), preview=1):
        each(step)
        model.step()


def killed(run: Run) -> None:
    """What the loop would do before the process is killed, without its evaluation: the line and the save."""
    run.advance()
    run.write_line(run.line())
    if run.due(run.args.save_every_n_steps):
        run.save()
    run.close()


def logged(folder, name: str) -> list:
    return [json.loads(line)[name] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("stop_at", "flags"), [(1, []), (5, []), (3, ["--save_every_n_steps", "3"])])
def test_a_killed_run_goes_on_from_its_checkpoint_if_any_and_logs_no_step_twice(tmp_path, capsys, stop_at, flags):
    train(tmp_path, stop_at=stop_at)
    assert logged(tmp_path, "step") == list(range(1, stop_at + 1))
    model = train(tmp_path, *flags)
    assert ("resumed from" in capsys.readouterr().err) is (stop_at > 1)
    assert logged(tmp_path, "step") == [1, 2, 3, 4, 5, 6]
    assert logged(tmp_path, "weight") == [1, 2, 3, 4, 5, 6] and model.weight.tolist() == [6, 6]


def test_codes_are_counted_with_each_line_and_drawn_without_a_validation_split(tmp_path, monkeypatch):
    drawn: list[tuple[int, str]] = []
    monkeypatch.setattr(Run, "log_image", lambda run, name, image: drawn.append((run.progress.step, name)))
    for n_valid in (0, 4):
        feed, was_due = Numbers(), []
        feed.valid_set = feed.validated = range(n_valid)
        flags = ["--validate_every_n_steps", "3", "--log_every_n_steps", "4"]
        run = run_of(tmp_path / str(n_valid), *flags, feed=feed)

        def each(step, run=run, was_due=was_due):
            was_due.append(run.codes_due)
            run.log_codes([torch.tensor([0, step]), torch.tensor([[0, 1]])] if run.codes_due else [], 8)
            run.log(Weights().step())

        evaluated(run, each)
        histograms, drawn = [step for step, name in drawn if name == "codes"], []
        assert histograms == ([3, 6] if not n_valid else [])
        assert [step for step, due in enumerate(was_due, 1) if due] == ([3, 4, 6] if not n_valid else [4, 6])
        assert logged(tmp_path / str(n_valid), "codes_used") == [3, 3]


@pytest.mark.parametrize(("seconds", "is_told"), [(10.0, True), (2.0, False)])
def test_validations_that_take_more_than_a_tenth_of_the_time_are_told_once(
    tmp_path, monkeypatch, capsys, seconds, is_told
):
    """An update takes 50 s, a validation `seconds` for the weights and for their average each; the first one more."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def spend(more: float) -> dict:
        clock[0] += more
        return {}

    run = run_of(tmp_path, "--validate_every_n_steps", "1", "--max_steps", "9")
    evaluated(run, lambda step: spend(50.0), validate=lambda model, step: spend(seconds if step else 500.0))
    assert capsys.readouterr().err.count("lower --valid_samples") == is_told


def test_the_first_validation_after_a_resume_says_what_changed_since_the_one_before(tmp_path, capsys):
    train(tmp_path, "--validate_every_n_steps", "2", stop_at=5)
    assert capsys.readouterr().err.count("valid ") == 2
    train(tmp_path, "--validate_every_n_steps", "2")
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("valid "))
    assert line.split()[:5] == ["valid", "6/6", "weight", "6.000", "(+2.000)"]


def test_a_model_that_the_disk_does_not_take_is_exit_code_1_and_written_by_the_next_start(tmp_path, capsys):
    def refuse(model: Weights, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(SystemExit) as exit:
        train(tmp_path, write=refuse)
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


def test_another_seed_is_refused_and_the_run_left_as_it_was(tmp_path):
    train(tmp_path, stop_at=3)
    with pytest.raises(ValueError, match="--seed was 0 and is now 1"):
        train(tmp_path, "--seed", "1")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["seed"] == 0
    assert logged(tmp_path, "step") == [1, 2, 3]


def test_a_new_place_and_precision_are_named_with_what_they_mean(tmp_path, capsys):
    train(tmp_path, stop_at=2, here=Process(precision="fp32"))
    capsys.readouterr()
    new = {"backend": "deepspeed", "world_size": 4, "device": "cuda:0", "zero_stage": 3, "precision": "bf16"}
    here = Process()
    here.describe = lambda: new
    train(tmp_path, here=here)
    said = capsys.readouterr().err
    assert "it was written by threads on 1 x cpu and goes on with deepspeed on 4 x cuda, ZeRO 3" in said
    assert "it was trained in fp32 and goes on in bf16" in said


def test_a_run_that_is_nearly_out_of_time_saves_and_exits_with_75(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        train(tmp_path, "--save_before_minutes", "0.001")
    assert exit.value.code == 75 and "asked to stop: saved update 1" in capsys.readouterr().err
    assert (tmp_path / "checkpoints" / "step_00000001").is_dir()
    train(tmp_path)
    assert logged(tmp_path, "weight") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("flags", "hint"), [([], "command again to go on"), (["--fresh"], "without --fresh to go on")])
def test_a_stopped_run_says_which_command_goes_on(tmp_path, capsys, flags, hint):
    with pytest.raises(SystemExit):
        train(tmp_path, *flags, stop_after=1)
    assert hint in capsys.readouterr().err


def test_each_start_says_how_it_ended(tmp_path):
    with pytest.raises(SystemExit):
        train(tmp_path, stop_after=1)
    assert starts(tmp_path)[-1]["ended"] == "asked to stop at update 1"
    train(tmp_path, stop_at=2)  # killed
    train(tmp_path)
    ended = [start["ended"] for start in starts(tmp_path)]
    last = json.loads((tmp_path / "model" / "training.json").read_text())["step"]
    assert ended == ["asked to stop at update 1", None, f"finished at update {last}"]


def train_on_a_full_disk(tmp_path, first, last):
    """The disk is full while the weight is in a range."""
    disk = pytest.MonkeyPatch()

    class Full(Weights):
        def state_dict(self):
            disk.undo()
            if first <= self.weight[0] <= last:
                failing(disk, 1, ("fsync",), any_thread=True)
            return super().state_dict()

    try:
        train(tmp_path, model=Full())
    finally:
        disk.undo()


def test_a_full_disk_is_reported_once_training_goes_on_and_the_next_save_succeeds(tmp_path, capsys):
    train_on_a_full_disk(tmp_path, 2, 4)
    said = capsys.readouterr().err
    assert said.count("step_00000002: No space left on device; training goes on") == 1
    assert said.count("step_00000004: No space left on device; training goes on") == 1
    assert [path.name for path in sorted((tmp_path / "checkpoints").glob("s*"))] == ["step_00000006"]


def test_a_last_save_that_fails_is_exit_code_1_and_names_the_newest_checkpoint(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        train_on_a_full_disk(tmp_path, 6, 6)
    assert exit.value.code == 1
    assert "step_00000006: No space left on device; the newest checkpoint is step_00000004" in capsys.readouterr().err


def wait_for_saves() -> None:
    """Threads outlive a start that is killed in a test."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()


def synced(descriptor: int) -> str:
    return os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))


class Acting(Weights):
    """Calls functions in the middle of updates, by their numbers."""

    def __init__(self, actions: dict[int, Callable[[], object]]):
        super().__init__()
        self._actions = actions

    def step(self):
        self._actions.get(int(self.weight[0]) + 1, lambda: None)()
        return super().step()


def test_a_folder_that_is_renamed_under_a_run_does_not_reappear_and_the_run_says_that_it_ends_unsaved(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        train(tmp_path / "a", model=Acting({3: lambda: os.rename(tmp_path / "a", tmp_path / "b")}))
    assert exit.value.code == 1 and os.listdir(tmp_path) == ["b"]
    said = capsys.readouterr().err
    assert f"the run folder {tmp_path / 'a'} is gone; if it was renamed, rename it back" in said
    train(tmp_path / "b")
    assert logged(tmp_path / "b", "weight") == [1, 2, 3, 4, 5, 6]


def test_a_save_is_not_committed_into_a_folder_that_became_that_of_another_run_meanwhile(tmp_path, monkeypatch):
    fsync = os.fsync

    def taken_over(descriptor: int) -> None:
        fsync(descriptor)
        if synced(descriptor) == "state.json":
            (tmp_path / ".lock").unlink()
            (tmp_path / ".lock").write_text("process 1 on another")

    monkeypatch.setattr(os, "fsync", taken_over)
    with pytest.raises(SystemExit) as exit:
        train(tmp_path)
    assert exit.value.code == 1 and os.listdir(tmp_path / "checkpoints") == []


def test_a_folder_that_is_renamed_and_renamed_back_has_all_its_lines(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    train(a, model=Acting({3: lambda: os.rename(a, b), 5: lambda: os.rename(b, a)}))
    assert logged(a, "weight") == [1, 2, 3, 4, 5, 6] and b"\0" not in (a / "metrics.jsonl").read_bytes()


def test_a_run_that_began_where_another_one_was_is_left_alone(tmp_path):
    def content(folder) -> dict[Path, bytes]:
        return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def replace() -> None:
        train(tmp_path / "c", stop_at=2)
        wait_for_saves()  # of the run that is being replaced
        os.rename(tmp_path / "a", tmp_path / "b")
        os.rename(tmp_path / "c", tmp_path / "a")
        (tmp_path / "a" / ".lock").write_text("process 1 on another")
        before.update(content(tmp_path / "a"))

    before: dict[Path, bytes] = {}
    with pytest.raises(SystemExit) as exit:
        train(tmp_path / "a", model=Acting({3: replace}))
    assert exit.value.code == 1 and before and content(tmp_path / "a") == before


def edited(folder, edit) -> None:
    """Change the newest checkpoint, as somebody who also changes its checksums."""
    checkpoint = max((folder / "checkpoints").glob("step_*"))
    state = json.loads((checkpoint / "state.json").read_text())
    edit(state["parts"])
    (checkpoint / "state.json").write_text(json.dumps(state))
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
            for path in checkpoint.iterdir() if path.name != "SHA256SUMS"]  # fmt: skip
    (checkpoint / "SHA256SUMS").write_text("".join(sums))


@pytest.mark.parametrize(("edit", "expected"), [
    (lambda parts: parts["progress"].update(samples="x"), "x samples were seen"),
    (lambda parts: parts["progress"].update(samples=-4), "-4 samples were seen"),
    (lambda parts: parts["progress"].update(samples=4 * 10**30), "it holds the state of update 1000000"),
    (lambda parts: parts["progress"].clear(), "its part progress is not what was written: KeyError: 'batch_size'"),
    (lambda parts: parts["progress"].update(unfinished_line=[7]), "its part progress is not what was written"),
    (lambda parts: parts["best"].clear(), "its part best is not what was written: KeyError"),
    (lambda parts: parts["best"].update(value=[]), "best"),
    (lambda parts: parts.update(random=[]), "ValueError: 'random' is not the name of a part"),
    (lambda parts: parts.update(progress=7), "'progress' is not the name of a part"),
])  # fmt: skip
def test_a_checkpoint_that_was_edited_and_summed_again_is_one_line(tmp_path, edit, expected):
    train(tmp_path, stop_at=2)
    edited(tmp_path, edit)
    with pytest.raises(ValueError) as error:
        train(tmp_path)
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_the_lines_before_a_checkpoint_are_synced_before_it_is_there(tmp_path, monkeypatch):
    events = []
    sync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append(synced(descriptor)), sync(descriptor)))
    monkeypatch.setattr(os, "rename", lambda *paths: (events.append("rename"), rename(*paths)))
    train(tmp_path, stop_at=2)
    assert events[events.index("rename") - 1] == "metrics.jsonl"


def without_clocks(folder) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [without_costs(line) for line in lines]


DUE = ["--validate_every_n_steps", "2", "--sample_every_n_steps", "3", "--save_every_n_steps", "4"]


def test_what_is_due_follows_each_update_in_one_order(tmp_path):
    saves = []
    train(tmp_path, *DUE, events=saves)
    validation = {step: [f"validate {step}"] * 2 for step in (1, 3, 5)}  # trained weights, then their average
    assert saves == [
        "update 0", "update 1", *validation[1], "update 2", "draw 2", "update 3", "save 4", *validation[3], "update 4",
        "update 5", "save 6", *validation[5], "draw 5",
    ]  # fmt: skip
    assert list(json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])) == [
        "step", "samples", "epoch", "loss", "weight", "of/two", "lr", "grad_norm", "skipped_updates",
        "data_seconds", "communication_seconds", "save_seconds", "peak_host_memory_gb", "valid/weight",
        "valid/ema/weight", "bad_samples", "samples_per_second", "seconds", "time",
    ]  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["step_00000003.png", "step_00000006.png"]
    assert json.loads((tmp_path / "best" / "best.json").read_text())["value"] == 6.0
    assert json.loads((tmp_path / "model" / "config.json").read_text()) == [6.0, 6.0]


@pytest.mark.parametrize(("stop_after", "stopped_at"), [(1, 2), (2, 2), (3, 3), (4, 4)])
def test_a_request_that_is_known_late_does_not_wait_for_an_evaluation(tmp_path, stop_after, stopped_at):
    saves = []
    with pytest.raises(SystemExit):
        train(tmp_path, *DUE, here=Process(Root(2)), stop_after=stop_after, events=saves)
    assert saves[-2:] == [f"update {stopped_at - 1}", f"save {stopped_at}"]


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4, 6])
def test_a_stopped_run_saves_at_once_and_the_next_start_evaluates(tmp_path, stop_after, capsys):
    saves = []
    train(tmp_path / "whole", *DUE)
    saves.clear()
    with pytest.raises(SystemExit) as exit:
        train(tmp_path / "run", *DUE, stop_after=stop_after, events=saves)
    assert exit.value.code == 75 and f"asked to stop: saved update {stop_after}" in capsys.readouterr().err
    assert saves[-2:] == [f"update {stop_after - 1}", f"save {stop_after}"], "nothing comes before the save, or after"
    is_evaluation_due = stop_after != 1
    assert logged(tmp_path / "run", "step") == list(range(1, stop_after + 1 - is_evaluation_due))
    saves.clear()
    train(tmp_path / "run", *DUE, events=saves)
    assert saves[0].split()[0] == ("update" if stop_after == 1 else "draw" if stop_after == 3 else "validate")
    assert without_clocks(tmp_path / "run") == without_clocks(tmp_path / "whole")
    assert min(logged(tmp_path / "run", "samples_per_second")) > 0, "the rate of a late line is that of its own start"
    for name in ("best/config.json", "model/config.json", "best/best.json"):
        assert (tmp_path / "run" / name).read_text() == (tmp_path / "whole" / name).read_text()
    for flags in ([], ["--max_steps", "8"]):  # started once more, and extended
        for name in ("run", "whole"):
            train(tmp_path / name, *DUE, *flags)
        assert without_clocks(tmp_path / "run") == without_clocks(tmp_path / "whole")


class StoppedIn(Process):
    """A signal arrives while the newest event is this one."""

    def __init__(self, event, events):
        super().__init__()
        self._event, self._events = event, events

    def stop_requested(self, here=False, now=False):
        return here or self._events[-1:] == [self._event]


@pytest.mark.parametrize(("event", "is_due"), [("validate 1", False), ("validate 3", True), ("validate 5", True)])
def test_a_run_that_is_stopped_in_an_evaluation_has_saved_and_the_next_start_makes_it(tmp_path, event, is_due):
    saves = []
    train(tmp_path / "whole", *DUE)
    step = int(event[-1]) + 1
    for _ in range(2):  # the start that makes it is stopped too
        saves.clear()
        with pytest.raises(SystemExit) as exit:
            train(tmp_path / "run", *DUE, here=StoppedIn(event, saves), events=saves)
        assert exit.value.code == 75 and logged(tmp_path / "run", "step") == list(range(1, step))
        saved = f"save {step}"
        if saves[0] == "update 0":
            assert saves[-2:] == ([saved, event] if is_due else [event, saved]), "first, where a save is due as well"
        else:
            assert saves == [event, saved], "there is nothing to save any more"
        assert (tmp_path / "run" / "checkpoints" / f"step_{step:08d}").is_dir()
    train(tmp_path / "run", *DUE)
    assert without_clocks(tmp_path / "run") == without_clocks(tmp_path / "whole")
    for name in ("best/config.json", "model/config.json", "best/best.json"):
        assert (tmp_path / "run" / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_an_evaluation_that_no_start_can_finish_before_its_deadline_ends_the_run_for_good(tmp_path, monkeypatch):
    saves = []
    monkeypatch.setattr(Deadline, "near", lambda *_: saves[-1:] == ["validate 1"])
    flags = [*DUE, "--save_before_minutes", "60"]
    with pytest.raises(SystemExit) as exit:
        train(tmp_path, *flags, events=saves)
    assert exit.value.code == 75, "an update was made"
    with pytest.raises(ValueError, match="the evaluation of update 2 alone takes longer than --save_before_minutes 60"):
        train(tmp_path, *flags, events=saves)


def test_an_evaluation_after_whose_save_the_run_was_killed_is_repeated_only_if_it_did_not_end(tmp_path):
    """Or if it met samples that could not be read, which the checkpoint does not know then."""
    train(tmp_path / "whole", *DUE)

    def killed_in_update_5():
        wait_for_saves()
        raise Killed

    for repeats, bad in ((False, '"bad_samples": 0'), (True, '"bad_samples": 1'),
                         (True, '"bad_samples": 0, "partial_samples": 1')):  # fmt: skip
        folder, events = tmp_path / f"{len(bad)} {bad[15]}", []
        with pytest.raises(Killed):
            train(folder, *DUE, model=Acting({5: killed_in_update_5}))
        metrics = (folder / "metrics.jsonl").read_text()
        assert '"valid/weight": 4.0' in metrics
        (folder / "metrics.jsonl").write_text(metrics.replace('"bad_samples": 0', bad))
        train(folder, *DUE, events=events)
        assert events[0] == ("validate 3" if repeats else "update 4")
        lines, expected = without_clocks(folder), without_clocks(tmp_path / "whole")
        assert lines[3:] == expected[3:] and len(lines) == len(expected)


def test_a_start_that_is_killed_in_its_evaluation_is_made_up_for_by_the_next(tmp_path, monkeypatch):
    train(tmp_path / "whole", *DUE)
    with pytest.raises(SystemExit):
        train(tmp_path / "run", *DUE, stop_after=2)
    write_line = Run.write_line
    for is_line_written in (False, True):
        with monkeypatch.context() as killer:

            def killed_there(run, line, is_line_written=is_line_written):
                if is_line_written:
                    write_line(run, line)
                raise Killed

            killer.setattr(Run, "write_line", killed_there)
            with pytest.raises(Killed):
                train(tmp_path / "run", *DUE)
        assert logged(tmp_path / "run", "step") == [1, 2][: 1 + is_line_written]
    train(tmp_path / "run", *DUE)
    assert without_clocks(tmp_path / "run") == without_clocks(tmp_path / "whole")


def test_films_stand_beside_their_picture_and_a_full_disk_does_not_stop_the_run(tmp_path, monkeypatch, capsys):
    sample = Sample(Image.new("RGB", (4, 4)), {"gif": b"film", "mp4": b"better film"})
    run = run_of(tmp_path, "--max_steps", "2", "--sample_every_n_steps", "1")
    evaluated(run, lambda step: step == 1 and failing(monkeypatch, 2, ("replace",)), draw=lambda *_: sample)
    samples = {path.name: path.read_bytes() for path in (tmp_path / "samples").iterdir()}
    names = ["step_00000001.gif", "step_00000001.mp4", "step_00000001.png", "step_00000002.png"]
    assert sorted(samples) == names and samples["step_00000001.gif"] == b"film"
    assert "cannot write the picture of update 2: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("drawn_together", [False, True])
@pytest.mark.parametrize("is_root", [True, False])
def test_a_picture_is_written_by_the_root_alone_and_drawn_by_it_or_by_all(tmp_path, is_root, drawn_together):
    """The public VQGAN trainer had every rank write the same file at once."""
    here, drawn = Process(), []
    run = run_of(tmp_path, "--max_steps", "1", here=here)
    draw = lambda models, *_: (drawn.append(list(models)), Image.new("RGB", (4, 4)))[1]  # noqa: E731
    evaluated(run, lambda step: setattr(here, "rank", int(not is_root)), draw=draw, drawn_together=drawn_together)
    assert drawn == [["online", "ema"]] * (is_root or drawn_together)
    assert (tmp_path / "samples").exists() == is_root


def test_a_picture_that_is_drawn_together_may_hold_collectives(tmp_path):
    """Each of two processes draws its part, and the root writes the whole."""

    def work(process):
        def draw(models, shown, step):
            rows = process.gather(torch.full((2, 4, 3), 100 * (process.rank + 1), dtype=torch.uint8))
            return Image.fromarray(rows.numpy())

        evaluated(run_of(tmp_path, "--max_steps", "1", here=process), draw=draw, drawn_together=True)

    assert on_processes(2, work) == [None, None]
    drawn = np.asarray(Image.open(tmp_path / "samples" / "step_00000001.png"))
    assert drawn[:, 0, 0].tolist() == [100, 100, 200, 200]


def test_what_is_watched_is_the_line_of_all_processes_and_a_warning_is_printed_once_by_the_root(tmp_path, capsys):
    """Each of two processes sees the mean of their losses and what the validation gave."""

    def work(process):
        seen = []

        def watch(step, line):
            seen.append((step, line["loss"], line.get("valid/psnr")))
            return [f"warning: {number} at {step}" for number in ("one", "another")] if step == 2 else []

        def each(step):
            run.add(loss=torch.tensor(1.0 + 2 * process.rank))

        run = run_of(tmp_path, "--max_steps", "2", "--validate_every_n_steps", "2", here=process)
        evaluated(run, each, validate=lambda *_: {"psnr": 9.0}, watch=watch)
        return seen

    assert on_processes(2, work) == [[(1, 2.0, None), (2, 2.0, 9.0)]] * 2
    said = capsys.readouterr().err.splitlines()
    warnings = [line for line in said if "warning" in line]
    assert warnings == ["warning: one at 2", "warning: another at 2"]
    assert said.index(warnings[0]) > max(n for n, line in enumerate(said) if line.startswith("update 2/2"))


def test_a_folder_that_another_process_does_not_see_is_told_before_a_resume_needs_it(tmp_path, capsys):
    """Each of two machines has its own disk."""

    def start(process, max_steps):
        evaluated(run_of(tmp_path / f"disk{process.rank}", "--max_steps", str(max_steps), here=process))

    on_processes(2, lambda process: start(process, 2))
    advice = f"rank 1 does not see {tmp_path}/disk0; put --output_dir on a disk that all machines see"
    assert advice in capsys.readouterr().err

    def resume(process):
        with pytest.raises(ValueError, match="rank 1 does not see") as raised:
            start(process, 4)
        return str(raised.value).partition("; ")[0]

    refused = f"cannot resume: rank 1 does not see {tmp_path}/disk"
    assert on_processes(2, resume) == [f"{refused}0"] * 2


def test_a_run_that_is_in_its_samples_on_one_machine_alone_is_refused_on_all(tmp_path):
    (tmp_path / "photos").mkdir()

    def start(process):
        args, settings = parsed(tmp_path / ("photos/run" if process.rank else "run"))
        args.image_folder = str(tmp_path / "photos")
        Run(args, settings, process, Numbers(), model_arguments=())

    errors = on_processes(2, start, catches=ValueError)
    assert all("would become samples" in str(error) for error in errors)
