"""`python -m benchmarks.gpu`: its rows, its time, and two parts at toy size with real processes."""

from __future__ import annotations

import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import checks, worker
from benchmarks.gpu import speed as speed_part
from benchmarks.gpu.rows import NEEDS_A_GPU, NoTime, Plan, Row
from benchmarks.jobs import JobFailed
from tests.scripts import SCRIPTS


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(True, False, ["train_vae"], ["fp32"], tmp_path).until("speed", time.monotonic() + 3600)


def test_without_a_gpu_it_ends_with_one_line_and_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--json", str(tmp_path / "gpu.json")])
    assert ended.value.code == 2 and not list(tmp_path.iterdir())
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: " in line and "--scale toy" in line


def test_a_part_that_fails_is_a_row_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(error: Exception) -> Callable[[Plan], Iterator[Row]]:
        def part(plan: Plan) -> Iterator[Row]:
            yield plan.row("before", {"x": 1.0})
            raise error

        return part

    errors = {"tests": KeyError("x"), "resume": JobFailed("exit code 3: why"), "waits": NoTime("too late")}
    monkeypatch.setattr(command, "PARTS", {name: (broken(error), 1) for name, error in errors.items()})
    with pytest.raises(SystemExit) as ended:
        command.main(["--scale", "toy", "--json", str(tmp_path / "gpu.json")])
    assert ended.value.code == 1 and "2 of 6 rows" in capsys.readouterr().err
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [(row["part"], row["note"], row["is_bad"]) for row in rows if not row["values"]] == [
        ("tests", "failed: KeyError: 'x'", True), ("resume", "exit code 3: why", True), ("waits", "too late", False)
    ]  # fmt: skip


def test_a_job_ends_with_its_part_and_is_not_started_after_it(plan: Plan) -> None:
    sleep = ["-c", "import time; time.sleep(3600)"]
    with pytest.raises(NoTime, match=r"ended at its limit of 1 s"):
        plan.job(sleep, at_most=1.0)
    with pytest.raises(NoTime, match="not started"):
        plan.until("speed", time.monotonic()).job(sleep)
    with pytest.raises(JobFailed, match=r"exit code 1: ValueError: no") as failed:
        plan.job(["-c", "raise ValueError('no')"])
    assert not isinstance(failed.value, NoTime)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=str)
@pytest.mark.parametrize("flags_of", ["demonstration", "tiny", "large"])
def test_every_script_takes_the_flags_of_its_models(script: Any, flags_of: str, plan: Plan) -> None:
    full = Plan(False, True, plan.scripts, plan.precisions, plan.folder)
    flags = {
        "demonstration": lambda: [*checks.model_flags(script.name, False), "--deterministic"],
        "tiny": lambda: speed_part.model_flags_of(plan, script.name),
        "large": lambda: [
            f"--{script.data.flag}",
            script.data.demonstration,
            *speed_part.model_flags_of(full, script.name),
        ],
    }[flags_of]()
    args = script.parsed(*flags)
    assert ":" in str(getattr(args, script.data.flag)) and args.batch_size % 2 == 0


def test_a_script_is_measured_beside_its_reference(plan: Plan) -> None:
    values: Any = speed_part.compared(plan, "train_mulan", "bf16").values
    assert list(values) == ["samples/s", "peak MiB", "reference's samples/s", "reference's peak MiB", "ratio"]
    assert min(values.values()) > 0


def test_waits_are_counted_per_update_where_this_repository_causes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plan: Plan
) -> None:
    modes, result = ["default"], tmp_path / "result.jsonl"

    def waits_twice(*_: Any) -> None:
        for _ in range(2 if modes[-1] == "warn" else 0):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    flags = [*speed_part.model_flags_of(plan, "train_vae"), *checks.QUIET]
    with register_optimizer_step_pre_hook(waits_twice):
        worker.main(["waits", "--script", "train_vae", "--result", str(result), "--output_dir", str(tmp_path), *flags])
    found = json.loads(result.read_text())
    assert modes[1:] == ["warn", "default"]
    assert found["waits_per_update"] == 2 and list(found["places"].values()) == [2]
    assert re.fullmatch(r"test_gpu\.py:\d+ < \w+\.py:\d+", *found["places"])


def test_a_resumed_run_with_other_bits_is_found(tmp_path: Path, plan: Plan) -> None:
    def change_the_rate(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 1 + os.getpid() % 1000 * 1e-3

    result = tmp_path / "result.jsonl"
    flags = [*checks.model_flags("train_vae", True), *checks.QUIET, "--max_steps", "12", "--save_every_n_steps", "8"]
    with register_optimizer_step_pre_hook(change_the_rate):
        worker.main(["kill", "--script", "train_vae", "--result", str(result), "--output_dir", str(tmp_path), *flags])
    found = json.loads(result.read_text())
    assert found["starts"] == [0, 8] and not found["same_bits"]
    assert found["differing"] == ["checkpoints/step_00000012/engine.safetensors", "model/model.safetensors"]


def test_jobs_see_one_gpu(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    say = ["-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    found = []
    for visible in ("3,1", "", None):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found.append(plan.job(say).strip())
    assert found == ["3", "", "0"]


def test_the_toy_size_shows_on_a_cpu_what_it_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "gpu.json"
    command.main(["--scale", "toy", "--minutes", "60", "--only", "tests,resume,waits", "--scripts", "train_vae",
                  "--json", str(results)])  # fmt: skip
    content = json.loads(results.read_text())
    rows = {part: [row for row in content["rows"] if row["part"] == part] for part in ("tests", "resume", "waits")}
    assert (
        content["machine"]["scale"] == "toy"
        and content["machine"]["packages"]["torch"]
        and "cuda" in content["machine"]
    )
    assert len(rows["tests"]) >= 10 and all(
        row["note"] == f"Skipped: {NEEDS_A_GPU}" or row["note"] == NEEDS_A_GPU for row in rows["tests"]
    )
    assert rows["resume"] == [
        {"part": "resume", "name": "train_vae.py", "values": {"the same bits": "yes"}, "note": "", "is_bad": False}
    ]
    assert [row["note"] for row in rows["waits"]] == [NEEDS_A_GPU]
    assert "## The same bits after a kill" in capsys.readouterr().out
