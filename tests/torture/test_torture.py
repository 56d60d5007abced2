"""Tests of torture.py: a short torture loses nothing, and the checks find the losses that they are made for."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torture_checks as checks
from torture_plan import draw_plan


def test_a_short_torture_loses_nothing() -> None:
    """Rank 0 of two is killed in a save, then an old checkpoint cannot be deleted, and the result is compared bit for
    bit."""
    plan = ["--seed", "2353", "--trials", "1", "--launchers", "python", "torchrun", "--kills", "2", "--minutes", "60"]
    command = [sys.executable, str(Path(__file__).with_name("torture.py")), *plan]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as torture:
        try:
            output, _ = torture.communicate()
        finally:
            torture.terminate()  # torture.py then ends the processes that it has started
    assert torture.returncode == 0, output
    assert output.endswith("nothing was lost\n")
    # Planned faults may be missing: a run may be finished before their moment comes.
    assert (counted := re.search(r"(\d+) faults", output)) and int(counted[1]) >= 1, output


def write_checkpoint(run: Path, step: int, left_out: Sequence[str] = ()) -> Path:
    folder = run / "checkpoints" / f"step_{step:08d}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    contents = {"model.safetensors": b"weights of %d" % step, "state.json": b'{"parts": {"progress": {}}}'}
    for name in left_out:
        del contents[name]
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    sums = [f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in contents.items()]
    (folder / "SHA256SUMS").write_text("".join(sums))
    return folder


FILES = {"model.safetensors", "state.json"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of nine updates that saved every three, beside its reference, which is equal."""
    for folder in (tmp_path / "run", tmp_path / "reference"):
        for step in (3, 6, 9):
            write_checkpoint(folder, step)
        for name in ("samples/step_00000009.png", "model/model.safetensors"):
            (folder / name).parent.mkdir()
            (folder / name).write_bytes(b"0")
        lines = [json.dumps({"step": step, "loss": 0.25, "valid/loss": 0.25}) for step in range(1, 10)]
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return tmp_path / "run"


def check(run: Path) -> None:
    """All that is checked of the files of a run which was asked to stop, and of one that ended."""
    checks.check_checkpoints(run, [3, 6, 9], 2, FILES)
    checks.check_kept_up(run, [9], 3)
    checks.check_same_run(run, run.with_name("reference"))
    checks.check_polite_end("asked to stop: saved update 9; run the same", run, 20)


def replace(name: str, old: str, new: str) -> Callable[[Path], object]:
    """Changes the last such text in a file of a run."""
    return lambda run: (run / name).write_text(new.join((run / name).read_text().rsplit(old, 1)))


def log_another(run: Path) -> None:
    for folder in (run, run.with_name("reference")):
        with (folder / "metrics.jsonl").open("a") as metrics:
            metrics.write('{"step": 10}\n')


LAST = "checkpoints/step_00000009"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit of the newest": (replace(f"{LAST}/model.safetensors", "9", "8"), "step_00000009 is damaged"),
    "missing sums": (lambda run: (run / LAST / "SHA256SUMS").unlink(), "has no SHA256SUMS"),
    "an unlisted file": (lambda run: (run / LAST / "ema.safetensors").touch(), "damaged: ema"),
    "a part that is missing with its sum": (lambda run: write_checkpoint(run, 9, ["state.json"]), "instead of"),
    "a newest checkpoint that is gone": (lambda run: shutil.rmtree(run / LAST), "are gone"),
    "an update that is missing": (replace("metrics.jsonl", '"step": 8', '"step": 9'), "twice or missing"),
    "a bit of a loss": (replace("metrics.jsonl", '"loss": 0.25,', '"loss": 0.25000000000000006,'), "update 9"),
    "a bit of a validation": (replace("metrics.jsonl", "0.25}", "0.25000000000000006}"), "valid/loss"),
    "a bit of the weights": (replace("model/model.safetensors", "0", "1"), "model/model.safetensors"),
    "a bit of a picture": (replace("samples/step_00000009.png", "0", "1"), "samples/"),
    "an update after the save of a stop": (log_another, "logged 10 updates"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_kind_of_loss_is_found(damage: str, run: Path) -> None:
    check(run)
    harm, complaint = DAMAGES[damage]
    harm(run)
    with pytest.raises(checks.Lost, match=complaint):
        check(run)


TRAINED = "61 images to train on\nupdate {step:>2}/20  0.5000\n"


@pytest.mark.parametrize(
    ("log", "newest", "complaint"),
    [
        (TRAINED.format(step=8), 6, "went on with update 8"),
        (TRAINED.format(step=7), 6, "did not say"),
        ("resumed from {run}/checkpoints/step_00000003\n", 6, "step_00000003, though the newest checkpoint was 6"),
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


NAMES = ["python", "torchrun", "deepspeed", "horovodrun"]


def test_a_plan_follows_from_its_seed_and_plans_hold_every_fault_of_every_launcher() -> None:
    plans = [draw_plan(7, trial, NAMES, 4) for trial in range(200)]
    assert plans[:16] == [draw_plan(7, trial, NAMES, 4) for trial in range(16)]
    assert plans[:16] != [draw_plan(8, trial, NAMES, 4) for trial in range(16)]
    # Every launcher, ZeRO stage and other backend occurs in a trial that is compared bit for bit.
    assert len({plan.last for plan in plans[:16] if plan.stays}) == 8
    assert all(blow.launcher == plan.last for plan in plans if plan.stays for blow in plan.blows)
    what = {"SIGHUP to root", "SIGHUP to all", "SIGSTOP to everything for a moment", "a protected checkpoint",
            "a taken port", "SIGKILL to worker", "SIGTERM to last, in a validation",
            "SIGKILL to everything"}  # fmt: skip
    assert what <= {blow.fault for plan in plans for blow in plan.blows}
