"""`--dry_run`: makes a few updates, a validation, a picture and a checkpoint, and estimates the time of the whole
run."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tandem.io.exits import AskedToStop, Failed
from tandem.io.reading import counted
from tandem.training.logging.clock import peak_memory
from tandem.training.logging.operations import device_name, measure_matmul_flops
from tandem.training.logging.progress import format_duration

if TYPE_CHECKING:
    from .evaluation import Action
    from .run import Run

_UPDATES = 3  # of which the first one may compile, choose kernels and start loaders


def run_dry(
    run: Run, actions: Sequence[Action], batch: Any, operations_key: Callable[[int, Any], Hashable]
) -> Iterator[tuple[int, Any]]:
    """Yields a few updates like `loop.updates`, then does each of `actions` once, and prints the time of each and of
    the whole run with these flags. Updates with an equal `operations_key` (number, batch) have the same operations."""
    seconds: list[float] = []
    kinds: list[Hashable] = []
    total, device = run.progress.total_steps, run.processes.device
    for _ in range(min(_UPDATES, total)):
        kinds.append(operations_key(run.progress.step, batch))
        start = time.monotonic()
        with run.operations.update(kinds[-1]):
            yield run.progress.step, batch
            batch = run.feed.next()
        seconds.append(_seconds_since(start, device))
        run.advance()
        if run.stop_requested(now=True):
            raise AskedToStop
    per_update, total_seconds = min(seconds), total * min(seconds)
    hint = f" (the first one {seconds[0]:.2f} s)" if len(seconds) > 1 else ""
    run.say(f"an update takes {per_update:.3g} s, {run.progress.batch_size / per_update:.3g} samples per second{hint}")
    run.say(_utilization(run, kinds[seconds.index(per_update)], per_update))
    action_seconds: dict[str, float] = {}
    # The checkpoint is the last, because its thread would slow down the others.
    for action in sorted(actions, key=lambda action: not action.measures):
        start = time.monotonic()
        action.do()
        if failure := run.checkpoints.save_failure():
            run.say(failure)
            raise Failed
        action_seconds[action.name] = timing = _seconds_since(start, device)
        total_seconds += timing * (total // action.every + (total % action.every > 0) if action.every else 1)
    run.feed.report_bad_samples(run.say)
    validated, split = len(run.feed.valid_part), len(run.feed.valid_set)
    if 0 < validated < split:  # the last validation is followed by one of the whole split
        total_seconds += action_seconds["validation"] * split / validated
    run.say("; ".join(f"{name} {timing:.3g} s" for name, timing in action_seconds.items()))
    peaks = run.processes.gather_objects(peak_memory(device))
    memory = ", ".join(
        f"{name.removeprefix('peak_').removesuffix('_gb').replace('_', ' ')} {max(peak[name] for peak in peaks):.3g} GB"
        for name in peaks[0]
    )
    newest = run.checkpoints.latest() if run.is_root else None
    n_bytes = sum(path.stat().st_size for path in newest.iterdir()) if newest else 0
    run.say(f"memory, the most of a process: {memory}; a checkpoint has {n_bytes / 1e6:.3g} MB")
    summary = f"the whole run, {counted(total, 'update')} with all that, would take {format_duration(total_seconds)}"
    if total_seconds > run.clock.max_run_seconds:
        reachable = counted(max(1, int(total * run.clock.max_run_seconds / total_seconds)), "update")
        summary += f"; --max_minutes {run.config.max_minutes:g} ends it after about {reachable}"
    run.say(f"{summary}; dry run: nothing of it was kept")
    run.close()
    if run.is_root:
        shutil.rmtree(run.folder.path, ignore_errors=True)


def _utilization(run: Run, kind: Hashable, seconds: float) -> str | None:
    """A line on the operations of an update and their share of the devices' peak; None if unknown. Collective."""
    processes = run.processes
    device, precision = processes.device, run.backend.options.precision
    flops = processes.sum({"flops": run.operations.flops_of(kind)})["flops"]
    if math.isnan(flops):
        return None
    if run.peak:
        max_rate, reference = run.peak, f"the peak of {processes.world_size} x {device_name(device)}"
    else:  # all processes at once, as they train
        max_rate = processes.sum({"flops": measure_matmul_flops(device, precision)})["flops"]
        reference = f"the rate of a matrix product on {'this CPU' if device.type == 'cpu' else 'this device'}"
    rate = flops / seconds
    return (
        f"an update computes {_format_flop(flops)}, forward and backward: {_format_flop(rate)}/s, "
        f"{rate / max_rate:.2g} of {reference} ({_format_flop(max_rate)}/s in {precision})"
    )


def _format_flop(number: float) -> str:
    unit = max(min(int(math.log10(max(number, 1)) // 3), 5), 2)
    return f"{number / 1000**unit:.3g} {' kMGTP'[unit]}FLOP"


def _seconds_since(start: float, device: torch.device) -> float:
    """Seconds from `start` (`time.monotonic`) until the device has done the work that it has been given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.monotonic() - start
