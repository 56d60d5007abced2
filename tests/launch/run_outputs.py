"""What runs leave behind, and jobs that are stopped on the way."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

CLOCKS = {"seconds", "samples_per_second"}


def tensors(run_folder: Path) -> dict[str, torch.Tensor]:
    """Everything of a run's newest checkpoint that all processes share, and its model."""
    newest = max((run_folder / "checkpoints").glob("step_*"))
    files = [path for path in newest.glob("*.safetensors") if "random" not in path.name]
    files.append(run_folder / "model" / "model.safetensors")
    return {f"{path.name}/{name}": tensor for path in files for name, tensor in load_file(path).items()}


def unequal(run_folder: Path, other: Path) -> list[str]:
    """Names of tensors that have other bits in one run than in the other, or are in one of them alone."""
    ours, expected = tensors(run_folder), tensors(other)
    alone = set(ours) ^ set(expected)
    return sorted(alone | {name for name in set(ours) - alone if not torch.equal(ours[name], expected[name])})


def lines(run_folder: Path) -> list[dict[str, float]]:
    """metrics.jsonl."""
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def wait_for_update(folder: Path, step: int, began: float) -> None:
    """Until the log of a job that began then tells of an update."""
    log = folder / "metrics.jsonl"
    for _ in range(900):
        if log.exists() and log.stat().st_mtime > began:
            told = [json.loads(line) for line in log.read_text().split("\n")[:-1]]
            if any(line["step"] >= step for line in told) and log.stat().st_mtime > began:
                return
        time.sleep(0.1)
    raise AssertionError("no update in 90 seconds")


def cut_back(folder: Path, step: int) -> None:
    """Set aside checkpoints after ``step``: however long the job took to die, the next one begins before the end."""
    later = [path for path in (folder / "checkpoints").glob("step_*") if int(path.name[5:]) > step]
    for path in later:
        path.rename(folder / f"later-{time.time_ns()}")
    assert any((folder / "checkpoints").glob("step_*"))
