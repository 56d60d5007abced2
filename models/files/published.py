"""Weights of public networks, as their authors publish them: one file that maps names to tensors.

As in `pretrained`, no code in a file is run, and no number in it takes memory before the file has shown as much data.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from .archive import _CALLS, check_archive
from .pretrained import _regular, one_line

# The oldest files, such as torchvision's VGG, call this besides.
_OLD_CALLS = {*_CALLS, "torch._utils _rebuild_tensor"}

# Far more than the names and shapes of a state dict need; its values come after them.
_LONGEST_PICKLES_BYTES = 1 << 22

_NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG"}
_MEMOS = {"BINPUT", "LONG_BINPUT"}


def read_state_dict(path: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Tensors by name, on the CPU, from a .safetensors or from a .pt or .pth of any age.

    Args:
        path: The file.
        names: Those to take, where the file has them; None for all.

    Raises:
        ValueError: one line, where the file is missing, damaged, hostile or something else.
    """
    try:
        found = _read(path, names)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # what a damaged pickle raises is anybody's guess
        raise ValueError(f"{path} holds no weights that can be read without running code: {one_line(error)}") from None
    if not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in found.items()):
        raise ValueError(f"{path} holds something beside names and tensors; give a file of plain weights")
    # Strides of 0 and names that share data make much of little.
    if sum(tensor.nbytes for tensor in found.values()) > path.stat().st_size:
        raise ValueError(f"{path}: its weights are larger than the file that holds them")
    return found


def _read(path: Path, names: Collection[str] | None) -> dict[Any, Any]:
    if _regular(path).suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if names is None or name in names}  # noqa: SIM118
    in_archive = zipfile.is_zipfile(path)
    if in_archive:
        check_archive(path)
    else:
        _check_old(path)
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=in_archive)
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not a dict")
    return {name: value for name, value in content.items() if names is None or name in names}


def _check_old(path: Path) -> None:
    """The file is of the format before PyTorch 1.6, and calls for no more than plain tensors that it holds.

    It consists of five pickles (magic number, version, machine, state dict, names of storages), then the storages.

    Raises:
        OSError, ValueError: it is something else.
    """
    with path.open("rb") as file:
        pickles = io.BytesIO(file.read(_LONGEST_PICKLES_BYTES))
    elements = 0
    for _ in range(5):
        before: list[tuple[str, Any]] = []
        for opcode, argument, _ in pickletools.genops(pickles):
            if opcode.name == "GLOBAL" and argument not in _OLD_CALLS:
                raise ValueError(f"it calls for {'.'.join(str(argument).split())}, and no plain tensor needs that")
            if opcode.name == "BINPERSID":
                elements += _elements_of_storage(before)
            if opcode.name not in _MEMOS:
                before = [*before[-2:], (opcode.name, argument)]
    if elements > path.stat().st_size:  # PyTorch allocates storages before it looks for their data
        raise ValueError("its tensors are larger than the file")


def _elements_of_storage(before: list[tuple[str, Any]]) -> int:
    """Of the tuple (..., number of elements, None) that the last operations of a pickle have made."""
    match before:
        case [(kind, int(number)), ("NONE", _), ("TUPLE", _)] if kind in _NUMBERS and number >= 0:
            return number
    raise ValueError("it describes a tensor in a way that PyTorch does not")
