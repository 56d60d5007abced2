"""Tests of torture.py: a short torture loses nothing, and the checks find the losses that they are made for."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torture_checks as checks
from lab import missing
from torture import TOOLS, main
from torture_plan import draw_plan, draw_plan_over_machines

# Rank 0 of two is killed in a save, then an old checkpoint cannot be deleted, and the result is compared bit for bit.
ON_ONE = ["--seed", "2353", "--trials", "1", "--launchers", "python", "torchrun"]
# A link is cut in a save, then all processes of a machine are killed in one, and one machine finishes the run.
ON_TWO = ["--machines", "2", "--seed", "20", "--trials", "1", "--launchers", "torchrun"]


@pytest.mark.parametrize("flags", [ON_ONE, pytest.param(ON_TWO, marks=pytest.mark.long)], ids=["one", "two machines"])
def test_a_short_torture_loses_nothing(flags: list[str]) -> None:
    if flags is ON_TWO and (lacks := missing(*TOOLS)):
        pytest.skip(f"no machines here: {lacks}")
    plan = [*flags, "--kills", "2", "--minutes", "60"]
    command = [sys.executable, str(Path(__file__).with_name("torture.py")), *plan]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as torture:
        try:
            output, _ = torture.communicate()
        finally:
            torture.terminate()  # torture.py then ends the processes that it has started
    assert torture.returncode == 0, output
    assert output.endswith("nothing was lost\n")
    # Planned faults may be missing: a run may be finished before their moment comes.
    counts = re.search(r"(\d+) kills and (\d+) polite signals, (\d+) other faults", output)
    assert counts and sum(map(int, counts.groups())) >= 1, output


def test_what_a_torture_over_machines_lacks_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(SystemExit):
        main(["--machines", "2"])
    assert capsys.readouterr().err.endswith("error: no machines here: network namespaces need Linux and root\n")


def write_checkpoint(run: Path, step: int) -> Path:
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    contents = {"model.safetensors": b"weights of %d" % step, "state.json": b'{"parts": {"progress": {}}}'}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    sums = [f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in contents.items()]
    (folder / "SHA256SUMS").write_text("".join(sums))
    return folder


def write_metrics(run: Path, losses: list[float]) -> None:
    lines = [json.dumps({"step": step, "loss": loss, "seconds": id(run)}) for step, loss in enumerate(losses, 1)]
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


FILES = {"model.safetensors", "state.json"}
DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda folder: (folder / "model.safetensors").write_bytes(b"weights of 8"),
    "a missing file": lambda folder: (folder / "state.json").unlink(),
    "missing sums": lambda folder: (folder / "SHA256SUMS").unlink(),
    "empty sums": lambda folder: (folder / "SHA256SUMS").write_text(""),
    "an unlisted file": lambda folder: (folder / "ema.safetensors").write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("step", [3, 6, 9])
def test_damage_to_any_checkpoint_is_found(damage: str, step: int, tmp_path: Path) -> None:
    folders = {each: write_checkpoint(tmp_path, each) for each in (3, 6, 9)}
    checks.check_checkpoints(tmp_path, [3, 6, 9], 3, FILES)
    DAMAGES[damage](folders[step])
    with pytest.raises(checks.Lost, match=f"step_0000000{step}"):
        checks.check_checkpoints(tmp_path, [3, 6, 9], 3, FILES)


def test_a_checkpoint_that_lacks_a_part_with_its_checksum_is_found(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 3)
    with pytest.raises(checks.Lost, match="instead of"):
        checks.check_checkpoints(tmp_path, [3], 3, FILES | {"ema.safetensors"})


@pytest.mark.parametrize(("there", "lost"), [([6, 9], False), ([9, 12], False), ([9], True), ([3, 6], True)])
def test_only_the_oldest_checkpoints_may_go(there: list[int], lost: bool, tmp_path: Path) -> None:
    for step in there:
        write_checkpoint(tmp_path, step)
    if lost:
        with pytest.raises(checks.Lost, match="are gone"):
            checks.check_checkpoints(tmp_path, [3, 6, 9], 2, FILES)
    else:
        checks.check_checkpoints(tmp_path, [3, 6, 9], 2, FILES)


@pytest.mark.parametrize(
    ("there", "reached", "lost"), [([], 6, False), ([], 7, True), ([3], 7, False), ([3], 10, True)]
)
def test_a_run_that_falls_behind_with_its_saves_is_found(
    there: list[int], reached: int, lost: bool, tmp_path: Path
) -> None:
    for step in there:
        write_checkpoint(tmp_path, step)
    if lost:
        with pytest.raises(checks.Lost, match=f"though update {reached} was reached"):
            checks.check_kept_up(tmp_path, [reached], 3)
    else:
        checks.check_kept_up(tmp_path, [reached], 3)


@pytest.mark.parametrize("steps", [[1, 2, 2, 3], [1, 3], [2, 3], [1, 2, 3, 2]])
def test_an_update_that_is_missing_or_there_twice_is_found(steps: list[int], tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in steps))
    with pytest.raises(checks.Lost, match="twice or missing"):
        checks.read_metrics(tmp_path)


def test_a_torn_last_line_is_no_loss(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert [line["step"] for line in checks.read_metrics(tmp_path)] == [1, 2]


TRAINED = "61 images to train on\nupdate {step:>2}/20  0.5000\n"


@pytest.mark.parametrize(
    ("log", "newest", "complaint"),
    [
        (TRAINED.format(step=1), 6, "went on with update 1"),
        (TRAINED.format(step=8), 6, "went on with update 8"),
        (TRAINED.format(step=7), 6, "did not say"),
        ("resumed from {run}/checkpoints/step_00000003\n", 6, "step_00000003, though the newest checkpoint was 6"),
        ("resumed from {run}/checkpoints/step_00000003\n", None, "was None"),
        ("[0]<stderr>:resumed from {run}/checkpoints/step_00000006\n" + TRAINED.format(step=7), 6, None),
        (TRAINED.format(step=1), None, None),
        ("killed before it said anything\n", 6, None),
    ],
)
def test_a_silent_fresh_start_is_found(log: str, newest: int | None, complaint: str | None, tmp_path: Path) -> None:
    log = log.replace("{run}", str(tmp_path))
    if complaint is None:
        checks.check_continuation(log, newest, (newest or 0) + 1, tmp_path)
    else:
        with pytest.raises(checks.Lost, match=complaint):
            checks.check_continuation(log, newest, (newest or 0) + 1, tmp_path)


def test_a_run_that_was_stopped_before_its_evaluation_logs_the_update_again(tmp_path: Path) -> None:
    assert checks.next_line(tmp_path) == 1
    folder = write_checkpoint(tmp_path, 6)
    assert checks.next_line(tmp_path) == 7
    (folder / "state.json").write_text('{"parts": {"progress": {"unfinished_line": {"loss": 1.0}}}}')
    write_metrics(tmp_path, [1.0] * 6)
    assert checks.next_line(tmp_path) == 7, "the line follows the evaluation"
    write_metrics(tmp_path, [1.0] * 5)
    assert checks.next_line(tmp_path) == 6
    checks.check_polite_end("asked to stop: saved update 6; run the same", tmp_path, 20)


def test_a_stop_that_was_asked_for_and_not_saved_is_found(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 6)
    write_metrics(tmp_path, [1.0] * 6)
    checks.check_polite_end("asked to stop: saved update 6; run the same", tmp_path, 20)
    for log in ("asked to stop: saved update 7; run the same", "stopped"):
        with pytest.raises(checks.Lost):
            checks.check_polite_end(log, tmp_path, 20)
    checks.check_polite_end("nothing is heard", tmp_path, 20, is_heard=False)
    write_metrics(tmp_path, [1.0] * 7)
    with pytest.raises(checks.Lost):
        checks.check_polite_end("nothing is heard", tmp_path, 20, is_heard=False)


def test_one_bit_of_a_loss_or_of_the_weights_is_found(tmp_path: Path) -> None:
    losses, next_float = [1.0, 0.5, 0.25], 0.25000000000000006
    runs = {name: tmp_path / name for name in ("reference", "same", "other loss", "other weights")}
    runs["other picture"] = tmp_path / "other picture"
    for name, run in runs.items():
        write_checkpoint(run, 3)
        (run / "samples").mkdir()
        (run / "samples" / "step_00000003.png").write_bytes(b"1" if name == "other picture" else b"0")
        (run / "model").mkdir()
        (run / "model" / "model.safetensors").write_bytes(b"1" if name == "other weights" else b"0")
        write_metrics(run, [*losses[:2], next_float] if name == "other loss" else losses)
    checks.check_same_run(runs["same"], runs["reference"], 3)
    complaints = {"other loss": "update 3", "other weights": "model/model.safetensors", "other picture": "samples/"}
    for name, complaint in complaints.items():
        with pytest.raises(checks.Lost, match=complaint):
            checks.check_same_run(runs[name], runs["reference"], 3)
    assert checks.loss_difference(runs["other loss"], runs["reference"]) == pytest.approx(2.2e-16, rel=0.1)


def test_only_a_validation_may_differ_by_rounding(tmp_path: Path) -> None:
    for run, value in (("ours", 0.25000000000000006), ("theirs", 0.25)):
        write_checkpoint(tmp_path / run, 1)
        (tmp_path / run / "model").mkdir()
        (tmp_path / run / "model" / "model.safetensors").touch()
        (tmp_path / run / "metrics.jsonl").write_text(json.dumps({"step": 1, "valid/loss": value}) + "\n")
    checks.check_same_run(tmp_path / "ours", tmp_path / "theirs", 1, tolerance=1e-5)
    for tolerance in (0.0, 1e-17):
        with pytest.raises(checks.Lost, match="valid/loss"):
            checks.check_same_run(tmp_path / "ours", tmp_path / "theirs", 1, tolerance)


def test_a_traceback_of_a_process_is_found_and_one_of_a_launcher_is_not() -> None:
    of_torchrun = 'Traceback (most recent call last):\n  File "/bin/torchrun", line 8\nChildFailedError: train_vae.py\n'
    checks.check_last_words(of_torchrun, "train_vae.py")
    with pytest.raises(checks.Lost, match="ended with a traceback"):
        checks.check_last_words(
            of_torchrun + '[0]:  File "/a/train_vae.py", line 3, in main\nKeyError: 1', "train_vae.py"
        )
    said = "node2: stopped: rank 1: lost contact with rank 0 at update 6\nupdate  7/20\n"
    assert checks.last_words(said) == ["stopped: rank 1: lost contact with rank 0 at update 6"]


def test_a_plan_over_machines_follows_from_its_seed() -> None:
    names = ["python", "torchrun", "deepspeed", "horovodrun", "mpirun"]
    plans = [draw_plan_over_machines(7, trial, names, 4) for trial in range(60)]
    assert plans == [draw_plan_over_machines(7, trial, names, 4) for trial in range(60)]
    blows = [blow for plan in plans for blow in plan.blows]
    on_two = {(blow.launcher.name, blow.victims) for blow in blows if blow.launcher.machines == 2}
    assert on_two == {
        (name, what) for name in names[1:] for what in ("root", "last", "launcher", "machine", "power", "link")
    }
    assert not any(blow.victims in ("machine", "power", "link") for blow in blows if blow.launcher.machines == 1)
    assert {blow.launcher.name for blow in blows if blow.launcher.machines == 1} == set(names[:4])


def test_plans_hold_every_fault() -> None:
    names = ["python", "torchrun", "deepspeed", "horovodrun"]
    faults = {blow.fault for trial in range(200) for blow in draw_plan(7, trial, names, 4).blows}
    what = {"SIGHUP to root", "SIGHUP to all", "SIGSTOP to everything for a moment", "a protected checkpoint",
            "a taken port", "SIGKILL to worker", "SIGTERM to last, in a validation",
            "SIGKILL to everything"}  # fmt: skip
    assert what <= faults


def test_a_plan_follows_from_its_seed() -> None:
    names = ["python", "torchrun", "deepspeed", "horovodrun"]
    plans = [draw_plan(7, trial, names, 4) for trial in range(16)]
    assert plans == [draw_plan(7, trial, names, 4) for trial in range(16)]
    assert plans != [draw_plan(8, trial, names, 4) for trial in range(16)]
    # Every launcher, ZeRO stage and other backend occurs in a trial that is compared bit for bit.
    assert len({plan.last for plan in plans if plan.stays}) == 8
    assert all(blow.launcher == plan.last for plan in plans if plan.stays for blow in plan.blows)
