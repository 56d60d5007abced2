"""Trained weights on the disk: a folder of safetensors and JSON, and the .pt files of public systems. No code in them
is ever run."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"


def save_pretrained_folder(folder: Path, model: str, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write weights, then the config that makes the folder loadable; each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(on_cpu, _beside(folder / _WEIGHTS))
    os.replace(_beside(folder / _WEIGHTS), folder / _WEIGHTS)
    _beside(folder / _CONFIG).write_text(json.dumps({"model": model, **config}, indent=2) + "\n")
    os.replace(_beside(folder / _CONFIG), folder / _CONFIG)


def load_pretrained_folder(folder: Path, model: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config (constructor arguments) and weights of a folder.

    Raises:
        ValueError: one line, where a file is missing, damaged or of another model.
    """
    try:
        config = json.loads((folder / _CONFIG).read_text())
        weights = load_file(folder / _WEIGHTS)
        found = config.pop("model")
    except OSError as error:
        raise ValueError(f"cannot read {error.filename or folder}: {error.strerror or error}") from None
    except (ValueError, KeyError, AttributeError, TypeError, SafetensorError) as error:
        raise ValueError(f"{folder} is not a model folder: {' '.join(str(error).split())}") from None
    if found != model:
        raise ValueError(f"{folder} holds a {found}, not a {model}")
    return config, weights


def save_dalle_file(path: Path, hparams: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """DALLE-pytorch's format: {"hparams": ..., "weights": ...}."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    torch.save({"hparams": dict(hparams), "weights": on_cpu}, _beside(path))
    os.replace(_beside(path), path)


def load_dalle_file(path: Path, keys: Collection[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Hparams and weights of a vae-final.pt, read with ``weights_only=True``.

    Raises:
        ValueError: one line, where it is missing, damaged, hostile or something else.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        hparams, weights = dict(content["hparams"]), dict(content["weights"])
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError, ValueError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path} is not a vae-final.pt that can be read without running code: {reason}") from None
    if missing := sorted(set(keys) - set(hparams)):
        raise ValueError(f"{path}: its hparams lack {', '.join(missing)}")
    if not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise ValueError(f"{path}: its weights hold something that is not a tensor")
    return {key: hparams[key] for key in keys}, weights


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.unfinished")
