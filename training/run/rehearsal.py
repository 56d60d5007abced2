"""`--dry_run`: a few updates, a validation, a picture and a checkpoint, and what the whole run would cost."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from tandem.files.writing import hold, is_left_behind

from . import ASKED_TO_STOP
from .costs import counted, peak_flops
from .progress import duration
from .starts import starts

if TYPE_CHECKING:
    from ..contracts import Feed, Processes
    from .loop import Evaluation
    from .run import Run

_PREFIX = ".dry-run-"
_LOCK = ".dry_run"  # in the folder of a dry run, and of no other run
_UPDATES = 3  # of which the first one may compile, choose kernels and start loaders


def folder_beside(output_dir: str, processes: Processes) -> str:
    """A new folder beside a run folder. The root deletes it when its process ends, if not before, with the folders
    above that it made for it; and what dry runs that were killed on its machine left there.

    Raises:
        UserMistake: one line, if it cannot be made.
    """
    made = None
    with processes.agreement():
        if processes.is_root:
            parent = Path(os.path.abspath(output_dir)).parent
            missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
            parent.mkdir(parents=True, exist_ok=True)
            for left in filter(_is_left_behind, parent.glob(f"{_PREFIX}*")):
                shutil.rmtree(left, ignore_errors=True)
            made = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
            atexit.register(_delete, Path(made), missing, hold(Path(made, _LOCK)))
    folder: str = processes.broadcast_object(made)
    return folder


def _is_left_behind(folder: Path) -> bool:
    """Whether a folder is that of a dry run that was killed on this machine, in which no other run began since."""
    is_left = not folder.is_symlink() and is_left_behind(folder / _LOCK)
    return is_left and all("--dry_run" in start.get("command", ()) for start in starts(folder))


def _delete(folder: Path, parents: Sequence[Path], lock: BinaryIO) -> None:
    """Delete a folder, and those of the folders above it that are empty then; `lock` is held until now."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        for parent in parents:
            parent.rmdir()
    lock.close()


def rehearse(
    run: Run,
    feed: Feed,
    evaluations: Sequence[Evaluation],
    batch: Any,
    validate: Callable[[Evaluation], Any],
    draw: Callable[[], None],
) -> Iterator[tuple[int, Any]]:
    """Yields updates as `training.run.loop.updates`, then validates, draws and saves once, and prints what each takes
    and what the run would take with these flags."""
    seconds: list[float] = []
    operations: list[int] = []
    total = run.progress.total_steps
    for update in range(min(_UPDATES, total)):
        # Of the first one, which is slow anyway. A compiled model would not be compiled under the counter.
        is_counted = run.is_root and update == 0 and not run.args.compile
        with _timed(seconds, run.device), counted(operations) if is_counted else contextlib.nullcontext():
            yield run.progress.step, batch
            batch = feed.next()
        run.advance()
        if run.stop_requested(now=True):
            sys.exit(ASKED_TO_STOP)
    per_update = min(seconds)
    validation: list[float] = []
    picture: list[float] = []
    save: list[float] = []
    if len(feed.valid_set):
        with _timed(validation, run.device):
            for evaluation in evaluations:
                validate(evaluation)
    feed.report_bad_samples(run.say)
    with _timed(picture, run.device):
        draw()
    with _timed(save, run.device):
        n_bytes = run.save_and_wait()
    times = {
        "validation": (sum(validation), run.args.validate_every_n_steps),
        "pictures": (sum(picture), run.args.sample_every_n_steps),
        "checkpoint": (sum(save), run.args.save_every_n_steps),
    }
    whole = total * per_update
    for taken, every in times.values():
        whole += taken * (total // every + (total % every > 0) if every else 1)
    if part := len(feed.validated):
        whole += sum(validation) * (len(feed.valid_set) / part if part < len(feed.valid_set) else 0)
    rarer = sorted({each.also_every_n_steps for each in evaluations if each.also_every_n_steps})
    without = f" (but what is measured every {rarer[0]} updates besides)" if rarer else ""
    first = f" (the first one {seconds[0]:.2f} s)" if len(seconds) > 1 else ""
    run.say(f"an update takes {per_update:.3g} s, {run.progress.batch_size / per_update:.3g} samples per second{first}")
    if operations:
        peak = peak_flops(run.device, run.args.precision)
        of_peak = f", {operations[0] / per_update / peak:.1%} of what the device can do at most" if peak else ""
        run.say(f"a process makes {operations[0]:.3g} operations in an update{of_peak}")
    run.say("; ".join(f"{name} {taken:.3g} s" for name, (taken, _) in times.items() if taken))
    run.say(f"memory, the most of a process: {run.peak_memory()}; a checkpoint has {n_bytes / 1e6:.3g} MB")
    takes = f"the whole run, {total} updates with all that{without}, would take {duration(whole)}"
    run.say(f"{takes}; dry run: nothing of it was kept")
    run.close()
    if run.is_root:
        shutil.rmtree(run.folder.path, ignore_errors=True)


class _timed:
    """Context that appends its seconds, those of the device included, to a list."""

    def __init__(self, seconds: list[float], device: torch.device) -> None:
        self._seconds, self._device = seconds, device

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seconds.append(time.monotonic() - self._began)
