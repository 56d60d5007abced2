"""Trained weights on the disk: a folder of safetensors and JSON, and the .pt files of public systems.

Files may come from anywhere. No code in them is ever run, nothing outside of a folder is read for it, and no number in
them takes memory before the file has shown as much data.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from .archive import check_archive

_WEIGHTS, CONFIG_FILE, _INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"

# Far more than a config or an index needs; what is longer, or endless, is not read.
_LONGEST_JSON_BYTES = 1 << 26

_LONGEST_ERROR = 500

# Whole numbers up to this cost a constructor little, whatever it does with them (2**n, [0] * n, a loop).
_HARMLESS_NUMBER = 1 << 22

# A model may have this many parameters more than its file, so that the first one that is missing can be named.
_SPARE_PARAMETERS = 1000

Model = TypeVar("Model", bound=nn.Module)

# Dtype as safetensors names it (F32, BF16, I64, ...) and shape of tensors by name.
Headers = dict[str, tuple[str, tuple[int, ...]]]


def save_pretrained_folder(folder: Path, model: str, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write weights, then the config that makes the folder loadable; each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with _replacing(folder / _WEIGHTS) as path:
        save_file(_on_cpu(weights), path)
    with _replacing(folder / CONFIG_FILE) as path:
        path.write_text(json.dumps({"model": model, **config}, indent=2) + "\n")


def load_pretrained_folder(folder: Path, model: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config (constructor arguments) and weights of a folder, in one file or in several with an index.

    Raises:
        ValueError: one line, where a file is missing, damaged, hostile or of another model.
    """
    found, config = read_config(folder)
    if found != model:
        raise ValueError(f"{folder} holds a {found}, not a {model}")
    with _errors_of(folder):
        weights: dict[str, Tensor] = {}
        for path, names in _weight_files(folder).items():
            with safe_open(_regular(path), framework="pt") as file:
                weights |= {name: file.get_tensor(name) for name in names or file.keys()}
        check_arguments(config, weights)
    return config, weights


def take_weights(model: Any, folder: str | Path, may_differ: Collection[str]) -> None:
    """Give ``model`` the weights of a folder that its class saved.

    Args:
        model: With ``config`` and ``from_pretrained``.
        folder: Of ``save_pretrained``.
        may_differ: Arguments that the weights do not depend on.

    Raises:
        ValueError: one line, naming the other arguments that differ.
    """
    other = model.from_pretrained(folder)
    keys = [key for key in model.config if key not in may_differ]
    differing = [f"{key} {other.config[key]}" for key in keys if other.config[key] != model.config[key]]
    if differing:
        raise ValueError(f"the weights in {folder} are of another model; they need {', '.join(differing)}")
    model.load_state_dict(other.state_dict())


def read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """Name of the model's class and its constructor arguments, unchecked.

    Raises:
        ValueError: one line, where there is no such config.json.
    """
    with _errors_of(folder):
        config = _read_json(folder / CONFIG_FILE)
        model = config.pop("model", None)
        if not (isinstance(model, str) and model.isidentifier()):
            raise ValueError(f"its {CONFIG_FILE} names no model")
        return model, config


def read_headers(folder: Path) -> dict[str, Headers]:
    """The tensors of a folder's weights by file name, without reading them.

    Raises:
        ValueError: one line, where a file is missing, damaged or hostile.
    """
    with _errors_of(folder):
        return {path.name: _headers(path, names) for path, names in _weight_files(folder).items()}


def _headers(path: Path, names: Collection[str]) -> Headers:
    with safe_open(_regular(path), framework="numpy") as file:  # "pt" would reserve memory for all of it
        slices = {name: file.get_slice(name) for name in names or file.keys()}
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        OSError, ValueError: it cannot be read, or is none.
    """
    with _regular(path).open("rb") as file:
        text = file.read(_LONGEST_JSON_BYTES + 1)
    if len(text) > _LONGEST_JSON_BYTES:
        raise ValueError(f"{path.name} is longer than {_LONGEST_JSON_BYTES} bytes")
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return content


def save_dalle_file(path: Path, hparams: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """DALLE-pytorch's format: {"hparams": ..., "weights": ...}; the file appears whole or not at all."""
    content = io.BytesIO()  # its own writer hides what is wrong with a disk
    torch.save({"hparams": dict(hparams), "weights": _on_cpu(weights)}, content)
    with _replacing(path) as unfinished:
        unfinished.write_bytes(content.getbuffer())


def load_dalle_file(path: Path, keys: Collection[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Hparams and weights of a vae-final.pt, read with ``weights_only=True``. The weights are mapped from the file and
    take memory only where they are looked at.

    Raises:
        ValueError: one line, where it is missing, damaged, hostile or something else.
    """
    try:
        check_archive(_regular(path))
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
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
    # Strides of 0 and names that share data make much of little.
    if sum(tensor.nbytes for tensor in weights.values()) > path.stat().st_size:
        raise ValueError(f"{path}: its weights are larger than the file that holds them")
    arguments = {key: hparams[key] for key in keys}
    try:
        check_arguments(arguments, weights)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return arguments, weights


def check_arguments(arguments: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Constructor arguments hold JSON's kinds of values, and no number that these weights do not account for.

    Raises:
        ValueError: one line, naming the argument.
    """
    # An empty tensor can have any dimension beside its 0.
    sizes = [size for tensor in weights.values() if tensor.numel() for size in tensor.shape]
    largest = max(_HARMLESS_NUMBER, *sizes, 0)
    for name, value in arguments.items():
        try:
            numbers = [number for number in _plain_values(name, value) if isinstance(number, int)]
        except RecursionError:
            raise ValueError(f"{name} is nested too deeply") from None
        for number in numbers:
            if abs(number) > largest:
                raise ValueError(f"{name} {str(number)[:24]} is larger than any dimension of the weights")


def _plain_values(name: str, value: Any) -> Iterator[Any]:
    """The numbers, words and so on in a value of lists."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _plain_values(name, item)
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield value
    else:
        raise ValueError(f"{name} holds a {type(value).__name__}")


def build_with_weights(build: Callable[[], Model], weights: Mapping[str, Tensor]) -> Model:
    """The model that ``build`` makes, holding ``weights``. Memory is taken only once names and shapes are known to fit.

    Raises:
        ValueError: one line that names the first weight that is missing, superfluous, or of another shape or kind.
    """
    try:
        with torch.device("meta"), _at_most(len(weights) + _SPARE_PARAMETERS):
            expected = dict(build().state_dict())
    except Exception as error:  # what a constructor does with a file's values is anybody's guess
        raise ValueError(one_line(error)) from None
    for name in [*expected, *weights]:
        ours, theirs = (tuple(of[name].shape) if name in of else "none" for of in (expected, weights))
        if ours != theirs:
            raise ValueError(f"{name} should have shape {ours}, not {theirs}")
        if expected[name].is_floating_point() != weights[name].is_floating_point():
            raise ValueError(f"{name} should be of the kind {expected[name].dtype}, not {weights[name].dtype}")
    model = build()
    model.load_state_dict(weights)
    return model


@contextmanager
def _at_most(parameters: int) -> Iterator[None]:
    """No module may be given more parameters than this in all: a file's numbers must not build models without end."""
    left = parameters

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError("the model would have many more weights than the file")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _weight_files(folder: Path) -> dict[Path, list[str]]:
    """The files of a folder's weights, each with the names to take from it; no names: all."""
    if (folder / _WEIGHTS).exists() or not (folder / _INDEX).exists():
        return {folder / _WEIGHTS: []}
    weight_map = _read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"its {_INDEX} has no weight_map")
    files: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", ".", "..") or any(sign in file for sign in "/\\:\0"):
            raise ValueError(f"its {_INDEX} names {str(file)[:80]!r}, which is no file in the folder")
        files.setdefault(folder / file, []).append(name)
    for path in files:
        if path.resolve().parent != folder.resolve():
            raise ValueError(f"{path.name} is a link that leaves the folder; copy the folder with `cp -rL`")
    return files


def _regular(path: Path) -> Path:
    """``path``, unless it is there and is a device, a pipe or the like, which may have no end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path.name} is not a regular file")
    return path


@contextmanager
def _errors_of(folder: Path) -> Iterator[None]:
    """Whatever reading a model folder raises, as a ValueError of one line."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot read {error.filename or folder / _WEIGHTS}: {error.strerror or error}") from None
    except (ValueError, KeyError, AttributeError, TypeError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{folder} is not a model folder: {one_line(error)}") from None


def one_line(error: BaseException) -> str:
    """The first line of what an exception says, or else its type."""
    lines = str(error).strip().splitlines()
    return printable(lines[0].strip()[:_LONGEST_ERROR]) if lines else type(error).__name__


def printable(text: str) -> str:
    """Text that may quote a file: nothing in it moves the terminal's cursor."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def _on_cpu(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A path to write to, moved onto ``path`` once it is complete and on the disk."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except (OSError, SafetensorError) as error:  # the library's word for any error of the disk
        reason = getattr(error, "strerror", None) or one_line(error)
        raise OSError(f"cannot write {path}: {reason}") from None
    finally:
        unfinished.unlink(missing_ok=True)
