"""The format of a checkpoint: a folder with a safetensors file for each part, state.json, and checksums."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.io.reading import (
    READ_ERRORS,
    check_inside,
    check_regular,
    error_text,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
)
from tandem.io.renamed import FORMER_WEIGHTS
from tandem.io.writing import NEW_FILE_MODE, sync

STATE, SUMS = "state.json", "SHA256SUMS"
_CHUNK_BYTES = 1 << 24
# state.json holds numbers and the names of at most a thousand bad samples; other programs may write longer ones.
LONGEST_STATE_BYTES, _LONGEST_SUMS_BYTES = 1 << 28, 1 << 20
_LONGEST_HEADER_BYTES = 100_000_000  # the limit of safetensors
_READ_ERRORS: tuple[type[Exception], ...] = (*READ_ERRORS, RuntimeError, SafetensorError)
_PART_NAME = re.compile(r"\w[\w.-]*")  # a file name that cannot lead out of the folder

# Nested dicts with string keys, whose leaves are tensors and JSON values.
Tree = dict[str, Any]


def write_checkpoint(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    """Write and sync a new `folder`: one safetensors file per part, state.json, SHA256SUMS (as `sha256sum -c` reads).

    Training goes on in other threads meanwhile: safetensors (from 0.8 on) writes without Python's global interpreter
    lock and without a second copy of the tensors. The checksums are of the files as they are read back.

    Args:
        folder: Must not exist.
        tensors: Tensors by part and name: contiguous, on the CPU; no two may overlap in memory.
    """
    folder.mkdir()
    for part, part_tensors in tensors.items():
        path = folder / f"{part}.safetensors"
        save_file(dict(part_tensors), path)
        path.chmod(NEW_FILE_MODE)  # the library makes files that only their owner can read
    (folder / STATE).write_bytes(json.dumps(state, indent=1).encode())
    sums = [f"{_sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / SUMS).write_text("".join(sums))
    for path in (*folder.iterdir(), folder):
        sync(path)


def read_checkpoint(folder: Path, *, verify: bool = True) -> tuple[dict[str, Tree], dict[str, Any]]:
    """The parts of a checkpoint by name, with tensors on the CPU, and its meta: `Backend.describe` of the processes
    that wrote it. No code from the files is executed. Tuples become lists.

    The tensors are memory-mapped: all processes of a machine share one read of a file, and one copy in memory. With
    `verify`, all files are read first and compared with their checksums.

    Raises:
        ValueError: one line naming the file that is missing or damaged.
    """
    if verify:
        check_sums(folder)
    try:
        state = read_json(checkpoint_file(folder, STATE), LONGEST_STATE_BYTES)
        parts: dict[str, Tree] = state["parts"]
        for name, part in parts.items():
            if not _PART_NAME.fullmatch(name) or not isinstance(part, dict):
                raise ValueError(f"{name!r} is not the name of a part, or its value is not a mapping")
            for path, tensor in load_file(checkpoint_file(folder, f"{name}.safetensors")).items():
                *branches, leaf = path.split("/")
                tree = part
                for branch in branches:
                    tree = tree[branch]
                tree[FORMER_WEIGHTS.get(leaf, leaf)] = tensor
        return parts, dict(state["meta"])
    except OSError as error:
        raise damage_error(Path(error.filename or folder), error_text(error)) from None
    except _READ_ERRORS as error:
        raise damage_error(folder, f"{type(error).__name__}: {error}") from None


def check_sums(folder: Path, heartbeat: Callable[[str], None] = lambda phase: None) -> None:
    """Read every file of a checkpoint and compare it with SHA256SUMS. `heartbeat` is called with a text that names
    the file, several times for a long one.

    Raises:
        ValueError: one line naming the first file that is missing, damaged, or not listed.
    """
    sums = _read_sums(folder)
    names = {STATE, *sums} | {file.name for file in folder.glob("*.safetensors")}
    for name in sorted(names):
        heartbeat(f"checking {name}")
        try:
            path = checkpoint_file(folder, name)
            checksum = _sha256(path, heartbeat) if _has_full_length(path) else ""
        except (OSError, ValueError) as error:
            raise damage_error(folder / name, error_text(error)) from None
        if sums.get(name) != checksum:
            raise damage_error(folder / name, f"its content is not what was written: its checksum differs from {SUMS}")


def _read_sums(folder: Path) -> dict[str, str]:
    path = folder / SUMS
    try:
        lines = read_bytes(checkpoint_file(folder, SUMS), _LONGEST_SUMS_BYTES).decode(errors="replace").splitlines()
    except (OSError, ValueError) as error:
        raise damage_error(path, error_text(error)) from None
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if bad_names := [name for name in sums if Path(name).name != name or name in ("", ".", "..")]:
        raise damage_error(path, f"{bad_names[0]!r} is no file of this folder")
    return sums


def checkpoint_file(folder: Path, name: str) -> Path:
    """The path of a file of a checkpoint. Raises OSError and ValueError if it is no regular file in the folder."""
    return check_regular(check_inside(folder / name, folder))


def _has_full_length(path: Path) -> bool:
    """Whether a safetensors file is as long as its header says; True for other files. It is checked first, because the
    checksum of a damaged file of terabytes would take hours. Raises OSError and ValueError, in one line, if it is no
    regular file."""
    if path.suffix != ".safetensors":
        return True
    with open_regular(path) as file:
        header_size, file_size = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
        try:
            header = parse_json(file.read(min(header_size, _LONGEST_HEADER_BYTES)))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            return bool(8 + header_size + max(ends, default=0) == file_size)
        except READ_ERRORS:
            return False


def _sha256(path: Path, heartbeat: Callable[[str], None] = lambda phase: None) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            heartbeat(f"checking {path.name}")
    return digest.hexdigest()


@contextmanager
def explain_errors(folder: Path, part: str) -> Iterator[None]:
    """Context for `load_state_dict` of a part, in which an error about the form of the state becomes `damage_error`."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise damage_error(
            folder, f"its part {part} is not what was written: {type(error).__name__}: {error}"
        ) from None


def damage_error(path: Path, reason: str) -> ValueError:
    """The error for a checkpoint that cannot be used, in one line."""
    return ValueError(f"cannot load the checkpoint: {path}: {' '.join(reason.split())}")
