"""The temporary folder of a dry run."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tandem.io.writing import acquire_lock, is_stale_lock

from .starts import starts

if TYPE_CHECKING:
    from tandem.distributed import ProcessGroup

_FOLDER_PREFIX = ".dry-run-"
_FOLDER_LOCK = ".dry_run"  # only in the folder of a dry run


def folder_beside(output_dir: str, processes: ProcessGroup) -> str:
    """Create a temporary folder beside a run folder, and return its path. The root deletes it, and the parents that it
    created, at the latest when its process ends. It also deletes folders that dry runs left when they were killed on
    its machine.

    Raises:
        UserMistake: one line, if it cannot be made.
    """
    path = None
    with processes.raise_on_all_ranks():
        if processes.is_root:
            parent = Path(os.path.abspath(output_dir)).parent
            missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
            parent.mkdir(parents=True, exist_ok=True)
            for old_folder in filter(_is_left_behind, parent.glob(f"{_FOLDER_PREFIX}*")):
                shutil.rmtree(old_folder, ignore_errors=True)
            path = tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent)
            atexit.register(_delete_folder, Path(path), missing, acquire_lock(Path(path, _FOLDER_LOCK)))
    return str(processes.broadcast_object(path))


def _is_left_behind(folder: Path) -> bool:
    """Whether a dry run left this folder when it was killed on this machine, and no other run has begun in it."""
    is_old = not folder.is_symlink() and is_stale_lock(folder / _FOLDER_LOCK)
    return is_old and all("--dry_run" in start.get("command", ()) for start in starts(folder))


def _delete_folder(folder: Path, parents: Sequence[Path], lock: BinaryIO) -> None:
    """Delete a folder and its empty parents, then release `lock`."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        for parent in parents:
            parent.rmdir()
    lock.close()
