"""Readers of what runs leave behind."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from training.run.costs import COSTS

CLOCKS = set(COSTS)


def tensors(run_folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a run's model and of its newest checkpoint, except those that belong to a single process."""
    newest = max((run_folder / "checkpoints").glob("step_*"))
    files = [path for path in newest.glob("*.safetensors") if "random" not in path.name]
    files.append(run_folder / "model" / "model.safetensors")
    return {f"{path.name}/{name}": tensor for path in files for name, tensor in load_file(path).items()}


def unequal(run_folder: Path, other: Path) -> list[str]:
    """Names of tensors whose bits differ between the two runs, or that only one of the runs has."""
    ours, expected = tensors(run_folder), tensors(other)
    alone = set(ours) ^ set(expected)
    return sorted(alone | {name for name in set(ours) - alone if not torch.equal(ours[name], expected[name])})


def lines(run_folder: Path) -> list[dict[str, float]]:
    """The complete lines of metrics.jsonl; empty if the file does not exist yet."""
    path = run_folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
