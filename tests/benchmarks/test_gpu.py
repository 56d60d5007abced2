"""`python -m benchmarks.gpu`: its rows, its time, and two parts at toy size with real processes."""

from __future__ import annotations

import json
import re
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import checks
from benchmarks.gpu import speed as speed_part
from benchmarks.gpu import waits as waits_of
from benchmarks.gpu.plan import NEEDS_A_GPU, Plan
from benchmarks.references import REFERENCES
from tests.scripts import SCRIPTS, VAE


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(True, False, ["train_vae"], ["fp32"], tmp_path, time.monotonic() + 3600)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=str)
@pytest.mark.parametrize("flags_of", ["demonstration", "tiny", "large"])
def test_every_script_takes_the_flags_of_its_models(script: Any, flags_of: str, plan: Plan) -> None:
    full = Plan(False, True, plan.scripts, plan.precisions, plan.folder)
    data = [f"--{script.data.flag}", script.data.demonstration]
    flags = {
        "demonstration": lambda: [*checks.model_flags(script.name, False), "--deterministic"],
        "tiny": lambda: speed_part.model_flags_of(plan, script.name),
        "large": lambda: [*data, *speed_part.model_flags_of(full, script.name)],
    }[flags_of]()
    if flags_of != "demonstration":  # its reference trains the same
        flags += REFERENCES[script.name].flags
    args = script.parsed(*flags)
    assert ":" in str(getattr(args, script.data.flag)) and args.batch_size % 2 == 0


def test_a_script_is_measured_beside_its_reference(plan: Plan) -> None:
    values: Any = speed_part.speed_row(plan, "train_mulan", "bf16").values
    assert list(values) == ["samples/s", "peak MiB", "reference's samples/s", "reference's peak MiB", "ratio"]
    assert min(values.values()) > 0


def test_waits_are_counted_per_update_where_this_repository_causes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plan: Plan
) -> None:
    modes, result = ["default"], tmp_path / "result.jsonl"

    def waits_twice(*_: Any) -> None:
        for _ in range(2 if modes[-1] == "warn" else 0):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at)", stacklevel=1)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(torch, "get_device_module", lambda: SimpleNamespace(set_sync_debug_mode=modes.append))
    flags = [*speed_part.model_flags_of(plan, "train_vae"), *checks.QUIET]
    with register_optimizer_step_pre_hook(waits_twice):
        waits_of.main(["--script", "train_vae", "--result", str(result), "--output_dir", str(tmp_path), *flags])
    found = json.loads(result.read_text())
    assert modes[1:] == ["warn", "default"]
    assert found["waits_per_update"] == 2 and list(found["places"].values()) == [2]
    assert re.fullmatch(r"test_gpu\.py:\d+ < \w+\.py:\d+", *found["places"])


def test_runs_with_other_bits_are_found(tmp_path: Path) -> None:
    flags = [*checks.model_flags("train_vae", True), *checks.QUIET, "--max_steps", "4", "--save_every_n_steps", "2"]
    for name, rate in {"one": "1e-3", "same": "1e-3", "other": "2e-3"}.items():
        VAE.module.main([*flags, "--learning_rate", rate, "--output_dir", str(tmp_path / name)])
    found = [checks.different_tensors(tmp_path / "one", tmp_path / name) for name in ("same", "other")]
    assert found == [[], ["checkpoints/step_00000004/engine.safetensors", "model/model.safetensors"]]
    rows = [checks.bits("train_vae", differing, {}) for differing in found]
    assert [(row.values["the same bits"], row.is_bad) for row in rows] == [("yes", False), ("NO", True)]


def test_the_toy_size_shows_on_a_cpu_what_it_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "gpu.json"
    command.main(["--scale", "toy", "--minutes", "60", "--only", "tests,resume,waits", "--scripts", "train_vae",
                  "--json", str(results)])  # fmt: skip
    content = json.loads(results.read_text())
    rows = {part: [row for row in content["rows"] if row["part"] == part] for part in ("tests", "resume", "waits")}
    assert content["machine"]["scale"] == "toy" and "cuda" in content["machine"]
    notes = {row["note"] for row in rows["tests"]}
    assert len(rows["tests"]) >= 10 and notes <= {f"Skipped: {NEEDS_A_GPU}", NEEDS_A_GPU}
    assert [(row["name"], row["values"], row["note"]) for row in rows["resume"]] == [
        ("train_vae", {"the same bits": "yes"}, "")
    ]
    assert rows["waits"] and {row["note"] for row in rows["waits"]} == {NEEDS_A_GPU}
    assert "## resume" in capsys.readouterr().out
