"""The format of a checkpoint on the disk: a folder of safetensors and JSON files, with a checksum for each file."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.files.writing import NEW_FILE_MODE, sync

STATE, SUMS = "state.json", "SHA256SUMS"
_CHUNK_BYTES = 1 << 24
_PART_NAME = re.compile(r"\w[\w.-]*")  # a file name that cannot lead out of the folder

# Nested dicts with string keys, whose leaves are tensors and JSON values.
Tree = dict[str, Any]


def write_folder(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    """Write and sync a new `folder`: one safetensors file per part, state.json, SHA256SUMS (as `sha256sum -c` reads).

    Training goes on in other threads meanwhile: the library writes without holding Python's global interpreter lock
    (since safetensors 0.8) and without a second copy of the tensors. The checksums are computed from the files as they
    are read back from the disk.

    Args:
        folder: Must not exist.
        tensors: Tensors by part and name: contiguous, on the CPU; no two may overlap in memory.
    """
    folder.mkdir()
    for part, of_part in tensors.items():
        path = folder / f"{part}.safetensors"
        save_file(dict(of_part), path)
        path.chmod(NEW_FILE_MODE)  # the library makes files that only their owner can read
    (folder / STATE).write_bytes(json.dumps(state, indent=1).encode())
    sums = [f"{_sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / SUMS).write_text("".join(sums))
    for path in (*folder.iterdir(), folder):
        sync(path)


def read_checkpoint(folder: Path, *, verify: bool = True) -> tuple[dict[str, Tree], dict[str, Any]]:
    """Parts and meta of a checkpoint, with tensors on the CPU. No code from the files is executed. Tuples come back as
    lists.

    The tensors are memory-mapped: a page is read from the file when it is used. `verify` compares every file with its
    checksum first, which reads all of them.

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
                raise ValueError(f"{name!r} is not the name of a part, or its value is not a mapping")
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
    """Read every file of a checkpoint and compare it with SHA256SUMS. `mark` is called now and then, to show that the
    process is alive.

    Raises:
        ValueError: one line naming the first file that is missing, damaged, or not listed.
    """
    sums = _read_sums(folder)
    names = {STATE, *sums} | {file.name for file in folder.glob("*.safetensors")}
    for name in sorted(names):
        mark(f"checking {name}")
        if (folder / name).exists() and not (folder / name).is_file():  # reading a device might never end
            raise damaged(folder / name, "it is not a regular file")
        try:
            found = _sha256(folder / name, mark)
        except OSError as error:
            raise damaged(folder / name, error.strerror or str(error)) from None
        if sums.get(name) != found:
            raise damaged(folder / name, f"its content is not what was written: its checksum differs from {SUMS}")


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


def _sha256(path: Path, mark: Callable[[str], None] = lambda phase: None) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            mark(f"checking {path.name}")
    return digest.hexdigest()


def damaged(path: Path, reason: str) -> ValueError:
    """The error for a checkpoint that cannot be used, in one line."""
    return ValueError(f"cannot load the checkpoint: {path}: {' '.join(reason.split())}")
