"""`--dry_run`: a few updates, a validation, a picture and a checkpoint, and what the whole run would cost."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from tandem.files.exits import FAILED, AskedToStop, leave
from tandem.files.writing import hold, is_left_behind

from .clock import peak_memory
from .progress import duration
from .starts import starts

if TYPE_CHECKING:
    from ..contracts import Processes
    from .loop import Action
    from .run import Run

_PREFIX = ".dry-run-"
_LOCK = ".dry_run"  # in the folder of a dry run, and of no other run
_UPDATES = 3  # of which the first one may compile, choose kernels and start loaders

# Dense peaks in TFLOP/s: fp16 and bf16, TF32, fp32. Source: NVIDIA's data sheets of the products, which give most of
# them with sparsity, that is doubled.
_PEAKS = {
    "H200 NVL": (835.5, 417.5, 60.0), "H200": (989.5, 494.5, 67.0),
    "H100 80GB HBM3": (989.5, 494.5, 67.0), "H100 PCIe": (756.5, 378.0, 51.0),
    "A100": (312.0, 156.0, 19.5), "L40S": (362.0, 183.0, 91.6), "L4": (121.0, 60.0, 30.3), "A10": (125.0, 62.5, 31.2),
}  # fmt: skip


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


def rehearse(run: Run, actions: Sequence[Action], batch: Any) -> Iterator[tuple[int, Any]]:
    """Yields updates as `training.run.loop.updates`, then does each of `actions` once, those first that measure, and
    prints what each takes and what the run would take with these flags."""
    seconds: list[float] = []
    operations: list[int] = []
    total, device = run.progress.total_steps, run.processes.device
    for update in range(min(_UPDATES, total)):
        # Of the first one, which is slow anyway. A compiled model would not be compiled under the counter.
        is_counted = run.is_root and update == 0 and not run.args.compile
        with _timed(seconds, device), counted(operations) if is_counted else contextlib.nullcontext():
            yield run.progress.step, batch
            batch = run.feed.next()
        run.advance()
        if run.stop_requested(now=True):
            raise AskedToStop
    per_update, whole = min(seconds), total * min(seconds)
    taken: dict[str, float] = {}
    rarer: set[int] = set()
    for action in sorted(actions, key=lambda action: not action.measures):
        once: list[float] = []
        with _timed(once, device):
            action.do()
            failure = run.checkpoints.why_not_saved()
        if failure:
            run.say(failure)
            leave(FAILED)
        every, *others = action.every
        taken[action.name] = once[0]
        whole += once[0] * (total // every + (total % every > 0) if every else 1)
        rarer |= {*others} - {0}
    feed = run.feed
    feed.report_bad_samples(run.say)
    if part := len(feed.validated):
        whole += taken["validation"] * (len(feed.valid_set) / part if part < len(feed.valid_set) else 0)
    without = f" (but what is measured every {min(rarer)} updates besides)" if rarer else ""
    first = f" (the first one {seconds[0]:.2f} s)" if len(seconds) > 1 else ""
    run.say(f"an update takes {per_update:.3g} s, {run.progress.batch_size / per_update:.3g} samples per second{first}")
    if operations:
        peak = peak_flops(device, run.args.precision)
        of_peak = f", {operations[0] / per_update / peak:.1%} of what the device can do at most" if peak else ""
        run.say(f"a process makes {operations[0]:.3g} operations in an update{of_peak}")
    run.say("; ".join(f"{name} {once:.3g} s" for name, once in taken.items()))
    peaks = run.processes.gather_objects(peak_memory(device))
    most = ", ".join(f"{name.split('_')[1]} {max(each[name] for each in peaks):.3g} GB" for name in peaks[0])
    newest = run.checkpoints.latest() if run.is_root else None
    n_bytes = sum(path.stat().st_size for path in newest.iterdir()) if newest else 0
    run.say(f"memory, the most of a process: {most}; a checkpoint has {n_bytes / 1e6:.3g} MB")
    takes = f"the whole run, {total} updates with all that{without}, would take {duration(whole)}"
    run.say(f"{takes}; dry run: nothing of it was kept")
    run.close()
    if run.is_root:
        shutil.rmtree(run.folder.path, ignore_errors=True)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Operations per second that a device can do at most in this precision; None if that is not known."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    found = [peaks for name, peaks in _PEAKS.items() if contains(words, name.split())]
    if not found:
        return None
    return 1e12 * found[0][{"bf16": 0, "fp16": 0, "tf32": 1, "fp32": 2}[precision]]


def contains(words: list[str], name: list[str]) -> bool:
    """Whether a name stands in a text, both as words."""
    return any(words[start : start + len(name)] == name for start in range(len(words)))


@contextlib.contextmanager
def counted(operations: list[int]) -> Iterator[None]:
    """Context that appends how many floating-point operations products, convolutions and attention took inside, by the
    formulas of `torch.utils.flop_counter`. It may change how PyTorch rounds, so a run that is kept does without."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Counter(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if formula := flop_registry.get(func._overloadpacket):
                self.total += formula(*args, **(kwargs or {}), out_val=out)
            return out

    with Counter() as counter:
        yield
    operations.append(counter.total)


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
