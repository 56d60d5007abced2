"""What a checkpoint is on the disk: a folder of safetensors and JSON, with a checksum per file.

The safetensors files are written here, tensor by tensor: the library's own writer first copies all of them, and holds
Python's lock meanwhile, which would stop the training that goes on beside it. They are read by the library.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..files import sync

STATE, SUMS = "state.json", "SHA256SUMS"
_CHUNK_BYTES = 1 << 24
_PART_NAME = re.compile(r"\w[\w.-]*")  # becomes a file name: nothing that could lead out of the folder

# Nested dicts with string keys, whose leaves are tensors and JSON values.
Tree = dict[str, Any]

# https://huggingface.co/docs/safetensors: 8 bytes of header length, a JSON header, the tensors' bytes without gaps.
_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_folder(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    """Write and sync a new `folder`: one safetensors file per part, state.json, SHA256SUMS (as `sha256sum -c` reads).

    Args:
        folder: Is made.
        tensors: By part and name, contiguous, on the CPU.
        state: JSON values.
    """
    folder.mkdir()
    sums = {f"{part}.safetensors": _write(folder / f"{part}.safetensors", _chunks(t)) for part, t in tensors.items()}
    sums[STATE] = _write(folder / STATE, [json.dumps(state, indent=1).encode()])
    _write(folder / SUMS, ["".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())).encode()])
    sync(folder)


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> str:
    """Write and sync a file; returns its SHA-256."""
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    # Wide types first, so that every tensor is aligned to its type.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, offset = {}, 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little") + encoded
    for _, tensor in ordered:
        content = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
        for start in range(0, len(content), _CHUNK_BYTES):
            yield content[start : start + _CHUNK_BYTES]


def read_checkpoint(folder: Path, *, verify: bool = True) -> tuple[dict[str, Tree], dict[str, Any]]:
    """Parts and meta of a checkpoint, tensors on the CPU. Runs no code from it. Tuples come back as lists.

    The tensors are mapped from the files: memory is taken only for what is copied out of them.

    Args:
        folder: The checkpoint.
        verify: Compare every file with its checksum, which reads all of them.

    Raises:
        ValueError: one line naming the file that is missing or damaged.
    """
    if verify:
        check_sums(folder)
    try:
        state = json.loads((folder / STATE).read_bytes())
        parts: dict[str, Tree] = state["parts"]
        for name, part in parts.items():
            if not _PART_NAME.fullmatch(name) or not isinstance(part, dict):
                raise ValueError(f"{name!r} cannot be the name of a part, or is none")
            for path, tensor in load_file(folder / f"{name}.safetensors").items():
                *branches, leaf = path.split("/")
                tree = part
                for branch in branches:
                    tree = tree[branch]
                tree[leaf] = tensor
        return parts, dict(state["meta"])
    except OSError as error:
        raise damaged(Path(error.filename or folder), error.strerror or str(error)) from None
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, SafetensorError) as error:
        raise damaged(folder, f"{type(error).__name__}: {error}") from None


def check_sums(folder: Path, mark: Callable[[str], None] = lambda phase: None) -> None:
    """Read every file of a checkpoint and compare it with SHA256SUMS.

    Args:
        folder: The checkpoint.
        mark: Is told now and then that this goes on.

    Raises:
        ValueError: one line naming the first file that is missing, damaged, or not listed.
    """
    sums = _read_sums(folder)
    names = {STATE, *sums} | {file.name for file in folder.glob("*.safetensors")}
    for name in sorted(names):
        mark(f"checking {name}")
        if (folder / name).exists() and not (folder / name).is_file():  # a device may have no end
            raise damaged(folder / name, "it is no regular file")
        try:
            found = _sha256(folder / name, mark)
        except OSError as error:
            raise damaged(folder / name, error.strerror or str(error)) from None
        if sums.get(name) != found:
            raise damaged(folder / name, f"its content is not what was written ({SUMS})")


def _read_sums(folder: Path) -> dict[str, str]:
    path = folder / SUMS
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from None
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if strange := [name for name in sums if Path(name).name != name or name in ("", ".", "..")]:
        raise damaged(path, f"{strange[0]!r} is no file of this folder")
    return sums


def _sha256(path: Path, mark: Callable[[str], None]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            mark(f"checking {path.name}")
    return digest.hexdigest()


def damaged(path: Path, reason: str) -> ValueError:
    """The error for a checkpoint that cannot be used, in one line."""
    return ValueError(f"cannot load the checkpoint: {path}: {' '.join(reason.split())}")
