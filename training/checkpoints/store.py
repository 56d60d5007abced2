"""Checkpoints that are complete or not there: written beside the training, committed by a rename."""

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ..files import sync, write_atomically
from .format import Tree, check_sums, damaged, read_checkpoint, write_folder
from .snapshot import Snapshot

__all__ = ["Checkpoints", "Tree", "read_checkpoint"]

_UNFINISHED, _UNWANTED, _DAMAGED = ".unfinished-", ".unwanted-", "damaged-"
_NAME = re.compile(r"step_(\d{8,})")


def _nothing(*_: Any) -> None:
    return None


class Checkpoints:
    """The checkpoints of a run: `step_00000100/` and so on in one folder, and the name of the newest in `latest`.

    Args:
        folder: Where they are; made at the first save.
        keep: How many of the newest stay, at least 1.
        is_root: Whether this process writes.
        barrier: Waits for all processes.
        mark: Gives a sign of life while something takes long.
        before_commit: Is called by the thread that writes, when all but the rename is done.
        before_update: Has a function called before the state next changes. Without it `save` itself waits until it
            holds a copy.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        is_root: bool,
        barrier: Callable[[], None] = _nothing,
        mark: Callable[[str], None] = _nothing,
        before_update: Callable[[Callable[[], None]], None] | None = None,
        before_commit: Callable[[], None] = _nothing,
    ) -> None:
        assert keep >= 1, keep
        self.folder = folder
        #: Why the newest checkpoint is not on the disk, in one line; None while all is well. Known to the root.
        self.failure: str | None = None
        #: Step of the newest checkpoint that was asked for.
        self.requested_step: int | None = None
        #: How long the longest save took so far, from `save` to the rename.
        self.longest_seconds = 0.0
        self._keep = keep
        self._is_root = is_root
        self._barrier, self._mark = barrier, mark
        self._before_update, self._before_commit = before_update, before_commit
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None

    def save(self, step: int, parts: Mapping[str, Tree], meta: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint of this step, unless there is one, and delete the oldest when it is there.
        Collective.

        Waits for the write before it, if that is still under way, but not for this one: `failure` tells later how it
        went. A disk that does not take it leaves the checkpoints before it as they are.

        Args:
            step: Completed updates.
            parts: Nested dicts of tensors, JSON values, and functions that fetch a tensor; looked at on the root only,
                but fetching is collective.
            meta: JSON values.
        """
        self.join()
        self.requested_step = step
        wanted = self._is_root and not self._path(step).exists()
        snapshot = Snapshot(parts, reuse=self._snapshot, keep=wanted)
        if not wanted:
            return
        self._snapshot, self.failure = snapshot, None
        state = {"step": step, "meta": json.loads(json.dumps(meta)), "parts": snapshot.values}
        # Not a daemon: the interpreter waits for it, whatever ends the main thread.
        self._thread = threading.Thread(target=self._write, args=(step, snapshot, state), name="checkpoint")
        self._thread.start()
        if self._before_update is None:
            self._wait_for_copy()
        else:
            self._before_update(self._wait_for_copy)

    def wait(self) -> None:
        """Return when everything saved so far is on the disk, or `failure` says why not. Collective."""
        self.join()
        self._barrier()

    def latest(self) -> Path | None:
        """The newest checkpoint, or None. A save that was killed does not count."""
        steps = self.steps()
        return self._path(steps[-1]) if steps else None

    def newest_good(self, say: Callable[[str], None]) -> Path | None:
        """The newest checkpoint whose files are what was written, or None where there never was one. On the root.

        Damaged ones that are newer are renamed, so that they are in nobody's way, and reported through `say`.

        Raises:
            ValueError: one line, if there are checkpoints and all are damaged.
        """
        errors: list[tuple[int, ValueError]] = []
        for step in reversed(self.steps()):
            try:
                check_sums(self._path(step), self._mark)
            except ValueError as error:
                errors.append((step, error))
                continue
            for bad, reason in errors:
                say(f"{reason}; moved to {self._set_aside(bad)}, going on from the one before")
            return self._path(step)
        if errors:
            raise ValueError(
                f"{errors[0][1]}, and {_others(len(errors) - 1)}: restore one of them, or start over with --fresh"
            )
        if (self.folder / "latest").exists() or any(self.folder.glob(f"{_DAMAGED}*")):
            raise ValueError(f"{self.folder} held checkpoints that are gone; restore one, or start over with --fresh")
        return None

    def load(self, path: Path, expected: Collection[str] = ()) -> tuple[dict[str, Tree], dict[str, Any]]:
        """Parts and meta of a checkpoint that `newest_good` has checked, on the CPU. Every process may call it.

        Args:
            path: Such as `latest` gives.
            expected: Names of the parts there must be, no more and no fewer; empty: any.

        Raises:
            ValueError: one line, if it cannot be read or has other parts.
        """
        parts, meta = read_checkpoint(path, verify=False)
        if expected and set(parts) != set(expected):
            raise damaged(path, f"it holds {', '.join(sorted(parts))} instead of {', '.join(sorted(expected))}")
        return parts, meta

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, ascending."""
        matches = [_NAME.fullmatch(path.name) for path in self.folder.glob("step_*")]
        return sorted(int(match[1]) for match in matches if match)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def _wait_for_copy(self) -> None:
        """Return when the state may change again."""
        if self._snapshot is not None:
            self._snapshot.wait(lambda: self._mark("copying the state for a checkpoint"))

    def join(self) -> None:
        """Wait for the write under way, if this process does it; then `failure` is known."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=1.0)
            self._mark("writing a checkpoint")
        self._thread = None

    # The thread.

    def _write(self, step: int, snapshot: Snapshot, state: Mapping[str, Any]) -> None:
        began = time.monotonic()
        path = self._path(step)
        unfinished = self.folder / f"{_UNFINISHED}{path.name}"
        try:
            snapshot.finish()
            self._make_room()
            write_folder(unfinished, snapshot.tensors, state)
            self._commit(unfinished, path)
        except Exception as error:  # whatever it is, training goes on: the next save may succeed
            reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{error}"
            if not path.exists():  # else it is there, and the next save deletes what is too old
                self.failure = f"cannot write the checkpoint {path}: {' '.join(reason.split()) or type(error).__name__}"
            shutil.rmtree(unfinished, ignore_errors=True)  # it may be what fills the disk
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)

    def _commit(self, unfinished: Path, path: Path) -> None:
        self._before_commit()
        os.rename(unfinished, path)
        sync(self.folder)
        write_atomically(self.folder / "latest", f"{path.name}\n".encode())
        for old in self.steps()[: -self._keep]:
            # Renamed first: a kill while files are deleted must not leave a checkpoint with holes.
            unwanted = self.folder / f"{_UNWANTED}{self._path(old).name}"
            os.rename(self._path(old), unwanted)
            shutil.rmtree(unwanted)

    def _make_room(self) -> None:
        """Make the folder, and delete what killed saves left in it."""
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            sync(self.folder.parent)
        for prefix in (_UNFINISHED, _UNWANTED):
            for leftover in self.folder.glob(f"{prefix}*"):
                shutil.rmtree(leftover)

    def _set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint; nothing is deleted that somebody might repair."""
        number, target = 1, self.folder / f"{_DAMAGED}{self._path(step).name}"
        while target.exists():
            number += 1
            target = self.folder / f"{_DAMAGED}{self._path(step).name}-{number}"
        os.rename(self._path(step), target)
        return target


def _others(n: int) -> str:
    return "there is no other one" if n == 0 else f"so are the {n} before it" if n > 1 else "so is the one before it"
