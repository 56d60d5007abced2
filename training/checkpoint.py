"""Checkpoints that are complete or not there: safetensors and JSON, committed by a rename."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .files import sync

_STATE, _SUMS = "state.json", "SHA256SUMS"
_UNFINISHED, _UNWANTED = ".unfinished-", ".unwanted-"
_NAME = re.compile(r"step_(\d{8,})")

# Nested dicts with string keys, whose leaves are tensors and JSON values.
Tree = dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """Everything a checkpoint holds, on the CPU, shared with nothing that training changes."""

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def take_snapshot(step: int, parts: Mapping[str, Tree], meta: Mapping[str, Any]) -> Snapshot:
    """Copy the tensors of each part to the CPU, and set them apart from the JSON values."""
    tensors: dict[str, dict[str, Tensor]] = {name: {} for name in parts}
    values = {name: _without_tensors(part, (), tensors[name]) for name, part in parts.items()}
    state = {"step": step, "meta": dict(meta), "parts": values}
    return Snapshot(tensors, json.loads(json.dumps(state)))


def _without_tensors(tree: Mapping[str, Any], path: tuple[str, ...], tensors: dict[str, Tensor]) -> Tree:
    """`tree` without its tensors, which go into `tensors` under their '/'-joined path."""
    values: Tree = {}
    for key, value in tree.items():
        assert isinstance(key, str) and "/" not in key, f"{key!r} in {path} must be a string without '/'"
        if isinstance(value, Tensor):
            tensors["/".join((*path, key))] = value.detach().to("cpu", copy=True).contiguous()
        elif isinstance(value, Mapping):
            values[key] = _without_tensors(value, (*path, key), tensors)
        else:
            values[key] = value
    return values


def write_snapshot(snapshot: Snapshot, folder: Path) -> None:
    """Write and sync `folder`: one safetensors file per part, state.json, and SHA256SUMS (as `sha256sum -c` reads)."""
    folder.mkdir()
    for name, tensors in snapshot.tensors.items():
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / _STATE).write_text(json.dumps(snapshot.state, indent=1))
    names = sorted(file.name for file in folder.iterdir())
    (folder / _SUMS).write_text("".join(f"{_sha256(folder / name)}  {name}\n" for name in names))
    for name in (*names, _SUMS):
        sync(folder / name)
    sync(folder)


def read_checkpoint(folder: Path) -> tuple[dict[str, Tree], dict[str, Any]]:
    """Parts and meta of a checkpoint, tensors on the CPU. Runs no code from it. Tuples come back as lists.

    Raises:
        ValueError: one line naming the file that is missing or damaged.
    """
    sums = _read_sums(folder / _SUMS)
    try:
        state = json.loads(_checked(folder / _STATE, sums).read_bytes())
        parts: dict[str, Tree] = state["parts"]
        for name, part in parts.items():
            for path, tensor in load_file(_checked(folder / f"{name}.safetensors", sums)).items():
                *branches, leaf = path.split("/")
                tree = part
                for branch in branches:
                    tree = tree[branch]
                tree[leaf] = tensor
        return parts, state["meta"]
    except (KeyError, TypeError, OSError, SafetensorError, json.JSONDecodeError) as error:
        raise _damaged(folder, f"{type(error).__name__}: {error}") from None


def _read_sums(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from None
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def _checked(path: Path, sums: Mapping[str, str]) -> Path:
    try:
        digest = _sha256(path)
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from None
    if sums.get(path.name) != digest:
        raise _damaged(path, f"its content is not what was written ({_SUMS})")
    return path


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"cannot load the checkpoint: {path}: {' '.join(reason.split())}; delete its folder to continue from the one "
        "before, or start over with --fresh"
    )


class Checkpoints:
    """The checkpoints of a run: `step_00000100/` and so on in one folder.

    Args:
        folder: Where they are; made at the first save.
        keep: How many of the newest stay, at least 1.
        is_root: Whether this process writes.
        barrier: Waits for all processes.
    """

    def __init__(self, folder: Path, keep: int, is_root: bool, barrier: Callable[[], None]) -> None:
        assert keep >= 1, keep
        self.folder = folder
        self._keep = keep
        self._is_root = is_root
        self._barrier = barrier

    def save(self, step: int, parts: Mapping[str, Tree], meta: Mapping[str, Any]) -> None:
        """Write a checkpoint of this step, unless there is one, and delete the oldest. Collective.

        When it returns, the state may change again; `wait` before counting on what is on the disk.

        Args:
            step: Completed updates.
            parts: Nested dicts of tensors and JSON values by name; looked at on the root only.
            meta: JSON values.

        Raises:
            OSError: on the root, if the disk does not take it. The checkpoints before it stay.
        """
        if self._is_root and not self._path(step).exists():
            self._commit(step, take_snapshot(step, parts, meta))

    def wait(self) -> None:
        """Return when everything saved so far is on the disk. Collective."""
        self._barrier()

    def latest(self) -> Path | None:
        """The newest checkpoint, or None. A save that was killed does not count."""
        steps = self._steps()
        return self._path(steps[-1]) if steps else None

    def load(self, path: Path, expected: Collection[str] = ()) -> tuple[dict[str, Tree], dict[str, Any]]:
        """Parts and meta of a checkpoint, on the CPU. Every process may call it.

        Args:
            path: Such as `latest` gives.
            expected: Names of the parts there must be, no more and no fewer; empty: any.

        Raises:
            ValueError: one line, if it is damaged or has other parts.
        """
        parts, meta = read_checkpoint(path)
        if expected and set(parts) != set(expected):
            raise _damaged(path, f"it holds {', '.join(sorted(parts))} instead of {', '.join(sorted(expected))}")
        return parts, meta

    def _steps(self) -> list[int]:
        matches = [_NAME.fullmatch(path.name) for path in self.folder.glob("step_*")]
        return sorted(int(match[1]) for match in matches if match)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def _commit(self, step: int, snapshot: Snapshot) -> None:
        self._clear_leftovers()
        path = self._path(step)
        unfinished = self.folder / f"{_UNFINISHED}{path.name}"
        write_snapshot(snapshot, unfinished)
        os.rename(unfinished, path)
        sync(self.folder)
        for old in self._steps()[: -self._keep]:
            # Renamed first: a kill while files are deleted must not leave a checkpoint with holes.
            unwanted = self.folder / f"{_UNWANTED}{self._path(old).name}"
            os.rename(self._path(old), unwanted)
            shutil.rmtree(unwanted)

    def _clear_leftovers(self) -> None:
        """Make the folder, and delete what killed saves left in it."""
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            sync(self.folder.parent)
        for prefix in (_UNFINISHED, _UNWANTED):
            for leftover in self.folder.glob(f"{prefix}*"):
                shutil.rmtree(leftover)
