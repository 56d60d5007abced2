"""Saves checkpoints, by a thread during training, and loads them; a rename makes a complete one visible."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from tandem.io.reading import error_text
from tandem.io.writing import WRITER, delete, free_name, processor_time, sync, write_atomically

from .format import Tree, check_sums, damage_error, explain_errors, read_checkpoint, write_checkpoint
from .listing import latest_checkpoint, list_checkpoints, unseen_folder_message
from .models import MODELS, read_descriptions
from .snapshot import CopyBuffers, Snapshot, pinned_shapes

if TYPE_CHECKING:
    from tandem.distributed import ProcessGroup
    from tandem.training.run_folder.folder import RunFolder

_UNFINISHED, _UNWANTED, _DAMAGED = ".unfinished-", ".unwanted-", "damaged-"

# Writes files beside a checkpoint, such as snapshots: (step, tensors by part and name, JSON values by part).
WriteExtra = Callable[[int, Mapping[str, Mapping[str, Tensor]], Mapping[str, Tree]], None]


class Stateful(Protocol):
    """A part of a checkpoint. Both methods are called on every process, `load_state_dict` inside `raise_on_all_ranks`.

    `state_dict` need not copy: its tensors may be those that the next update changes, and in the place of a tensor
    there may be a function that returns it. If a part has `live_state()`, as an engine, that is called instead.
    """

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Checkpoints:
    """The checkpoints of a run: folders `step_00000100/` and so on, and a file `latest` with the name of the newest.

    Args:
        folder: Holds the checkpoints. The first save creates it, but not its parents.
        keep: Number of newest checkpoints that are not deleted, at least 1.
        processes: The processes of the run; all of them call `save` and `wait`.
        sync_first: A file that is synced to the disk before each checkpoint, if it exists.
        check: Raises OSError if nothing may be written to `folder` now.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        processes: ProcessGroup,
        *,
        sync_first: Path | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        assert keep >= 1, keep
        self.folder = folder
        #: Why the newest checkpoint is not on the disk, in one line; None if it is. Set on the root alone.
        self.failure: str | None = None
        #: What could not be deleted, in one line each, until `messages` yields it. Set on the root alone.
        self.undeleted: list[str] = []
        #: Step of the last call of `save`.
        self.requested_step: int | None = None
        #: Seconds of the longest write so far, from the copy to the rename.
        self.longest_seconds = 0.0
        self._keep, self._processes, self._sync_first, self._check = keep, processes, sync_first, check
        self._has_reported_failure = False  # whether `messages` has reported that saves fail
        self._reported_names: set[str] = set()  # names that were in `undeleted` before
        self._protected_names: set[str] = set()  # checkpoints that could not be deleted and that no save tries again
        self._buffers = CopyBuffers()
        self._thread: threading.Thread | None = None

    def prepare(self, parts: Mapping[str, Tree]) -> None:
        """Allocate the pinned memory for the copies of `parts`. For some gigabytes that takes seconds, which would
        otherwise delay training at the first save. Collective.

        Raises:
            UserMistake: one line, if the root's machine has too little memory.
        """
        tensors = pinned_shapes(parts)
        with self._processes.raise_on_all_ranks():
            if self._processes.is_root:
                self._buffers.pin(tensors)

    def save(
        self, step: int, parts: Mapping[str, Tree], meta: Mapping[str, Any], write_extra: WriteExtra | None = None
    ) -> None:
        """Start to write a checkpoint of this step, unless it exists already; then delete the oldest. Collective.

        Waits for the previous write, but not for this one. If this one fails, `failure` is the reason, and the older
        checkpoints stay as they are.

        Args:
            parts: Nested dicts of tensors, JSON values, and functions that return a tensor. Only the root's values are
                written, but every process calls the functions, because they are collective.
            meta: JSON values that describe the processes (`Backend.describe`).
            write_extra: Called on the root with the copy of the parts, by the thread that writes, before the checkpoint
                is complete. If it fails, so does the save.
        """
        self.join()
        self.requested_step = step
        is_needed = self._processes.is_root and not self._step_path(step).exists()
        snapshot = Snapshot(parts, buffers=self._buffers, keep=is_needed)
        if not is_needed:
            return
        self.failure = None
        state = {"step": step, "meta": json.loads(json.dumps(meta)), "parts": snapshot.values}

        def wait_for_copy() -> None:
            self._processes.heartbeat("copying the state for a checkpoint")
            snapshot.wait()

        # Not a daemon thread: the interpreter then waits for the write, however the main thread ends.
        self._thread = threading.Thread(target=self._write, args=(step, snapshot, state, write_extra), name=WRITER)
        self._thread.start()
        self._processes.before_update(wait_for_copy)

    def wait(self) -> None:
        """Return when the last save is on the disk or has failed. Collective."""
        self.join()
        self._processes.barrier()

    def save_failure(self) -> str | None:
        """Wait for the last save; return the root's `failure` on every process. Collective."""
        self.wait()
        failure: str | None = self._processes.broadcast_object(self.failure)
        return failure

    def messages(self, *, at_end: bool = False) -> Iterator[str]:
        """Lines for the user, on the root: that saves fail (once until one succeeds, and not `at_end`, where the caller
        prints it), that saves succeed again, and what could not be deleted."""
        while self.undeleted:
            yield f"{self.undeleted.pop(0)}; it stays"
        newest = None if self.requested_step is None else self._step_path(self.requested_step)
        if self.failure and not self._has_reported_failure and not at_end:
            self._has_reported_failure = True
            yield f"{self.failure}; training goes on, and each save tries again"
        elif self._has_reported_failure and not self.failure and newest and newest.exists():
            self._has_reported_failure = False
            yield f"checkpoints are written again: {newest}"

    def latest(self) -> Path | None:
        """The newest checkpoint, or None."""
        return latest_checkpoint(self.folder)

    def load_newest(
        self, folder: RunFolder, expected: Collection[str], say: Callable[[str], object]
    ) -> tuple[Path | None, dict[str, Tree], dict[str, Any]]:
        """Load the newest checkpoint that is whole. `say` is called with a line on each damaged one, and on a process
        that does not see the run folder. Collective.

        Args:
            expected: The names of the parts that the checkpoint must have.

        Returns:
            Its path, or None if none was ever saved; its parts and meta, see `read_checkpoint`.

        Raises:
            UserMistake: one line, if all checkpoints are damaged or gone, or a process does not see the folder.
        """
        processes, newest = self._processes, None
        with processes.raise_on_all_ranks():
            if processes.is_root:
                newest = self.newest_valid(say)
                if newest is None and folder.finished_step is not None:
                    raise ValueError(
                        f"{folder.path} holds a model of update {folder.finished_step} and no checkpoint; "
                        "restore one to go on, give another --output_dir, or start over with --fresh"
                    )
        # All processes use the root's answer: a process that does not see the folder must not start a new run.
        latest = processes.broadcast_object(str(newest) if newest else None)
        is_seen = processes.gather_objects(folder.is_seen)
        with processes.raise_on_all_ranks():
            if False in is_seen:
                message = unseen_folder_message(is_seen.index(False), folder.path)
                if latest:
                    raise ValueError(f"cannot resume: {message}")
                say(message)
            if latest:
                return Path(latest), *self.load(Path(latest), expected)
        return None, {}, {}

    def restore(self, path: Path, states: Mapping[str, Any], parts: Mapping[str, Stateful]) -> None:
        """Set the parts to the states that were loaded from a checkpoint. Collective.

        Raises:
            UserMistake: one line, if a state is not what its part wrote.
        """
        for name, state in states.items():
            # A context for each part: if one rank failed, others would wait for it in a collective of the next part.
            with self._processes.raise_on_all_ranks(), explain_errors(path, name):
                parts[name].load_state_dict(state)

    def newest_valid(self, say: Callable[[str], object]) -> Path | None:
        """The newest checkpoint whose files match their checksums, or None if none was ever saved. On the root.

        Newer checkpoints, which are damaged, are renamed, so that their steps can be saved again; `say` is called with
        a line on each.

        Raises:
            ValueError: one line, if all checkpoints are damaged or gone.
        """
        errors: list[tuple[Path, ValueError]] = []
        for path in reversed(list_checkpoints(self.folder)):
            try:
                check_sums(path, self._processes.heartbeat)
            except ValueError as error:
                errors.append((path, error))
                continue
            for damaged_path, reason in errors:  # not deleted, because somebody might repair it
                new_path = free_name(damaged_path.with_name(f"{_DAMAGED}{damaged_path.name}"))
                os.rename(damaged_path, new_path)
                say(f"{reason}; moved to {new_path}, going on from the one before")
            return path
        if errors:
            raise ValueError(
                f"{errors[0][1]}, and {_name_others(len(errors) - 1)}: restore one of them, or start over with --fresh"
            )
        if links := [path for path in self.folder.glob("step_*") if path.is_symlink()]:
            raise ValueError(f"{links[0]} is a link; put the checkpoint itself there, with `cp -rL`")
        if (self.folder / "latest").exists() or any(self.folder.glob(f"{_DAMAGED}*")):
            raise ValueError(f"{self.folder} held checkpoints that are gone; restore one, or start over with --fresh")
        return None

    def load(self, path: Path, expected: Collection[str] = ()) -> tuple[dict[str, Tree], dict[str, Any]]:
        """Parts and meta of a checkpoint that `newest_valid` has checked, on the CPU. Not collective.

        Raises:
            ValueError: one line, if the checkpoint cannot be read, or its parts are not those of `expected`, if any.
        """
        parts, meta = read_checkpoint(path, verify=False)
        if MODELS in expected:
            read_descriptions(parts, path)
        if expected and set(parts) != set(expected):
            raise damage_error(path, f"it holds {', '.join(sorted(parts))} instead of {', '.join(sorted(expected))}")
        return parts, meta

    def _step_path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def join(self) -> None:
        """Wait for this process's write, which may set `failure`."""
        last_seconds = None
        while self._thread is not None and self._thread.is_alive():
            seconds = processor_time(self._thread)
            if seconds is None or seconds != last_seconds:  # a write may take long, but a disk that hangs ends the run
                self._processes.heartbeat("writing a checkpoint")
            last_seconds = seconds
            self._thread.join(timeout=1.0)
        self._thread = None

    # The methods below run in the thread that writes.

    def _write(self, step: int, snapshot: Snapshot, state: Mapping[str, Any], write_extra: WriteExtra | None) -> None:
        start = time.monotonic()
        path, unfinished = self._step_path(step), None
        try:
            snapshot.finish()
            self._check()
            self._make_room()
            if write_extra is not None:
                write_extra(step, snapshot.tensors, snapshot.values)
            unfinished = free_name(self.folder / f"{_UNFINISHED}{path.name}")
            write_checkpoint(unfinished, snapshot.tensors, state)
            self._commit(unfinished, path)
        except Exception as error:  # training goes on: the next save may succeed
            if not path.exists():  # if it exists, only work after the rename failed, which the next save repeats
                self.failure = f"cannot write the checkpoint {path}: {error_text(error)}"
            if unfinished is not None:
                delete(unfinished)  # make room: the disk may be full
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - start)

    def _commit(self, unfinished: Path, path: Path) -> None:
        if self._sync_first is not None and self._sync_first.exists():
            sync(self._sync_first)
        self._check()  # again, because writing took a while
        os.rename(unfinished, path)
        sync(self.folder)
        try:
            write_atomically(self.folder / "latest", f"{path.name}\n".encode())
        finally:
            for old in list_checkpoints(self.folder)[: -self._keep]:
                # One that cannot be deleted would be renamed and renamed back at each save: a kill in between would
                # leave it renamed.
                if old.name not in self._protected_names:
                    self._delete_checkpoint(old)

    def _make_room(self) -> None:
        """Create the folder, and delete what killed saves left in it."""
        if not self.folder.exists():
            self.folder.mkdir()  # not its parents: a run folder that was renamed meanwhile must not be created again
            sync(self.folder.parent)
        for prefix in (_UNFINISHED, _UNWANTED):
            for leftover in self.folder.glob(f"{prefix}*"):
                if reason := delete(leftover):
                    self._note_undeleted(leftover, reason)

    def _delete_checkpoint(self, path: Path) -> None:
        # Rename first: a kill between two deletions must not leave a checkpoint without some of its files.
        unwanted = free_name(self.folder / f"{_UNWANTED}{path.name}")
        try:
            os.rename(path, unwanted)
        except OSError as error:
            self._note_undeleted(path, error_text(error))
            return
        files = sorted(os.listdir(unwanted))
        if reason := delete(unwanted):
            is_whole = sorted(os.listdir(unwanted)) == files  # write-protected, perhaps so that it stays
            if is_whole:
                self._protected_names.add(path.name)
                os.rename(unwanted, path)
            self._note_undeleted(path if is_whole else unwanted, reason)

    def _note_undeleted(self, path: Path, reason: str) -> None:
        """Record in `undeleted`, once for each name, what cannot be deleted. Saves go on."""
        if path.name not in self._reported_names:
            self._reported_names.add(path.name)
            self.undeleted.append(f"cannot delete {path}: {reason}")


def _name_others(n: int) -> str:
    return "there is no other one" if n == 0 else f"so are the {n} before it" if n > 1 else "so is the one before it"
