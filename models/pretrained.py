"""Trained weights on the disk: a folder of safetensors and JSON, and the .pt files of public systems. No code in them
is ever run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"

Model = TypeVar("Model", bound=nn.Module)


def save_pretrained_folder(folder: Path, model: str, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write weights, then the config that makes the folder loadable; each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with _replacing(folder / _WEIGHTS) as path:
        save_file(_on_cpu(weights), path)
    with _replacing(folder / _CONFIG) as path:
        path.write_text(json.dumps({"model": model, **config}, indent=2) + "\n")


def load_pretrained_folder(folder: Path, model: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config (constructor arguments) and weights of a folder.

    Raises:
        ValueError: one line, where a file is missing, damaged or of another model.
    """
    try:
        config = json.loads((folder / _CONFIG).read_text())
        found = config.pop("model")
        if found == model:
            return config, load_file(folder / _WEIGHTS)
    except OSError as error:
        raise ValueError(f"cannot read {error.filename or folder / _WEIGHTS}: {error.strerror or error}") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, SafetensorError) as error:
        raise ValueError(f"{folder} is not a model folder: {one_line(error)}") from None
    raise ValueError(f"{folder} holds a {found}, not a {model}")


def save_dalle_file(path: Path, hparams: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """DALLE-pytorch's format: {"hparams": ..., "weights": ...}; the file appears whole or not at all."""
    with _replacing(path) as unfinished:
        torch.save({"hparams": dict(hparams), "weights": _on_cpu(weights)}, unfinished)


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
    except Exception as error:  # what a damaged pickle raises is anybody's guess
        raise ValueError(
            f"{path} is not a vae-final.pt that can be read without running code: {one_line(error)}"
        ) from None
    if missing := sorted(set(keys) - set(hparams)):
        raise ValueError(f"{path}: its hparams lack {', '.join(missing)}")
    if not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise ValueError(f"{path}: its weights hold something that is not a tensor")
    return {key: hparams[key] for key in keys}, weights


def build_with_weights(build: Callable[[], Model], weights: Mapping[str, Tensor]) -> Model:
    """The model that ``build`` makes, holding ``weights``. Memory is taken only once names and shapes are known to fit.

    Raises:
        ValueError: one line that names the first weight that is missing, superfluous or of another shape.
    """
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in build().state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name in [*expected, *found]:
        if expected.get(name) != found.get(name):
            raise ValueError(f"{name} should have shape {expected.get(name, 'none')}, not {found.get(name, 'none')}")
    model = build()
    model.load_state_dict(weights)
    return model


def one_line(error: BaseException) -> str:
    """The first line of what an exception says, or else its type."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def _on_cpu(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A path to write to, moved onto ``path`` once it is complete and on the disk."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    yield unfinished
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)
