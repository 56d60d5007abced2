"""What runs leave behind."""

from __future__ import annotations

import json
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
    """The whole lines of metrics.jsonl; none before there is such a file."""
    path = run_folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
