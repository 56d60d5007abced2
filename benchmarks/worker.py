"""One side of a comparison: the real script, or a loop of reference/ in plain PyTorch. Started by jobs.py.

Each side has processes of its own, so that no setting of one changes the other. Both are alive at once and take turns,
a fraction of a second apart: in two separate runs the state of the machine would differ, often by more than the
difference to be measured. While one side has its turn, the others sleep.

The script gets batches that are decoded already. The time from the beginning of an update to that of the next is then
that of the real script without its loader: noise, engine, optimizer, clock, logging and the check of the stop signal.
The reference gets the same batches.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tandem import distributed
from tandem.distributed.torch_comm import leave_process_group

from .machine import proc_value
from .references import HOROVOD, REFERENCES, SCRIPT

if TYPE_CHECKING:
    from tandem.training.run import Run

_DECODED_BATCHES = 4


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("benchmarks.worker", description="Started by the benchmarks.")
    parser.add_argument("--script", choices=REFERENCES, default="train_vae", help="the script that is measured")
    parser.add_argument("--folder", type=Path, required=True, help="for results, and files for which the sides wait")
    parser.add_argument("--sides", required=True, help="comma list of script and the names in references.DESCRIPTIONS")
    parser.add_argument("--side", required=True, help="the side of this process")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True, help="of each side in a round")
    parser.add_argument("--updates", type=int, required=True, help="of a side in its turn")
    parser.add_argument("--warmup", type=int, default=2, help="updates of each side that are not measured")
    return parser


class Side(ABC):
    """The updates of one side, measured turn by turn.

    Args:
        options: Arguments of the worker, see ``build_parser``.
        device: Where it computes.

    Attributes:
        samples_per_update: Of this process; known when the first update begins.
    """

    samples_per_update: int

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._options, self._device = options, device
        self._sides = options.sides.split(",")
        self._next_turn = self._sides.index(options.side)  # turns are numbered through all sides and rounds
        importlib.import_module("torch._dynamo")  # PyTorch's optimizers import it: 150 MiB that are not the model's
        self._memory_before = memory_bytes(device)
        self._rates: dict[str, list[float]] = {"wall": [], "cpu": []}
        self._memory: list[list[int]] = []  # by rank

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """JSON values of all processes of this side. Collective."""

    def turns(self) -> Iterator[None]:
        """Yields before each update, and measures the updates of the turns."""
        options = self._options
        yield from itertools.repeat(None, options.warmup)
        start_peak = peak_memory_bytes(self._device)
        reset_peak_memory(self._device)
        self._signal(f"ready-{options.side}")
        for side in self._sides:
            self._wait_for(f"ready-{side}")
        self._signal("turn-0")
        for _ in range(options.rounds):
            seconds, samples = {"wall": 0.0, "cpu": 0.0}, options.turns * options.updates * self.samples_per_update
            for _ in range(options.turns):
                self._wait_for(f"turn-{self._next_turn}")
                self.gather(None)  # all processes of the side begin together
                with _timed(self._device, seconds):
                    yield from itertools.repeat(None, options.updates)
                self._signal(f"turn-{self._next_turn + 1}")
                self._next_turn += len(self._sides)
            by_rank = self.gather([seconds["wall"], seconds["cpu"]])
            self._rates["wall"].append(sum(samples / wall for wall, _ in by_rank))
            self._rates["cpu"].append(samples * len(by_rank) / sum(cpu for _, cpu in by_rank))
        self._memory = self.gather([self._memory_before, start_peak, peak_memory_bytes(self._device)])
        self._signal(f"done-{options.side}")
        for side in self._sides:  # else the validation and the save of a run would disturb the last turn of the others
            self._wait_for(f"done-{side}")

    def write(self) -> None:
        """Write the results. Samples per second of all processes together, and per second of CPU time, by round. Memory
        in bytes, of the process that uses most: before the model is built, the peak up to the end of the warm-up
        (building, wrapping and the first updates), and the peak of the updates after it."""
        before, start, updates = max(self._memory, key=lambda peaks: max(peaks[1:]))
        result = {
            "samples_per_second": self._rates["wall"], "samples_per_cpu_second": self._rates["cpu"],
            "memory_bytes": {"before": before, "start": start, "updates": updates},
        }  # fmt: skip
        (self._options.folder / f"{self._options.side}.json").write_text(json.dumps(result))

    def _signal(self, name: str) -> None:
        """Make a file for which the other sides wait, when all processes of this side have called this."""
        self.gather(None)
        (self._options.folder / name).touch()

    def _wait_for(self, name: str) -> None:
        path = self._options.folder / name
        while not path.exists():
            time.sleep(0.002)


class ScriptSide(Side):
    """The script, whose updates are measured by a watcher of its `Run`."""

    def __init__(self, options: argparse.Namespace, backend: distributed.Backend) -> None:
        super().__init__(options, backend.processes.device)
        self._backend, self._next_update = backend, self.turns()

    def gather(self, value: Any) -> list[Any]:
        return self._backend.processes.gather_objects(value)

    def run(self, script: Any, config: Any) -> None:
        """Train, and write the results on the root. The last round ends where the last update begins."""
        from tandem.training.run import Run  # after the first look at the memory: a reference does not import it

        with Run.watched(self._watch):
            script.train(config, self._backend)
        if self._backend.processes.is_root:
            self.write()

    def _watch(self, run: Run, event: str, _: Any) -> None:
        if event == "update" and run.progress.step == 0:
            decoded = repeat_batches(run)
            self.samples_per_update = len(decoded[0]["positions"])
            path = _batches_path(self._options.folder, self._backend.processes.rank)
            torch.save(decoded, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
        if event == "update":
            next(self._next_update, None)


class ReferenceSide(Side):
    """A loop of reference/ on one process, or on several of torchrun or Horovod."""

    def __init__(self, options: argparse.Namespace, args: argparse.Namespace) -> None:
        self._rank, self._world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self._hvd: Any = None
        if options.side == HOROVOD:
            import horovod.torch as hvd

            hvd.init()
            self._hvd, self._rank, self._world_size, local_rank = hvd, hvd.rank(), hvd.size(), hvd.local_rank()
        device, kind = torch.device("cpu"), torch.accelerator.current_accelerator(check_available=True)
        if kind is not None:
            device = torch.device(kind.type, local_rank)
            torch.accelerator.set_device_index(local_rank)
        if self._world_size > 1 and self._hvd is None:
            device_backend = torch.distributed.get_default_backend_for_device(device)
            torch.distributed.init_process_group(f"cpu:gloo,{kind}:{device_backend}" if kind else "gloo")
        super().__init__(options, device)
        self._args = args

    def gather(self, value: Any) -> list[Any]:
        if self._world_size == 1:
            return [value]
        if self._hvd is not None:
            return list(self._hvd.allgather_object(value))
        values: list[Any] = [None] * self._world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def run(self) -> None:
        """Make all updates, and write the results on the root."""
        if self._args.precision == "tf32":  # the usual setting; for other precisions PyTorch's default stays
            torch.set_float32_matmul_precision("high")
        path = _batches_path(self._options.folder, self._rank)
        self._wait_for(path.name)
        decoded = [self._pin(batch) for batch in torch.load(path, weights_only=False)]
        self.samples_per_update = len(decoded[0]["positions"])
        loop = REFERENCES[self._options.script].updates(self._args, decoded, self._device, self._options.side)
        for _ in self.turns():
            next(loop)
        if self._rank == 0:
            self.write()
        del loop  # ends DistributedDataParallel's threads before their process group
        if self._world_size > 1 and self._hvd is None:
            # A thread of the group that still runs while Python ends would abort the process.
            leave_process_group(gracefully=True)

    def _pin(self, batch: Mapping[str, Any]) -> Any:
        """A batch with its tensors in pinned memory, if there is a GPU, as the script's loader gives it."""
        pins = self._device.type != "cpu"
        return {key: value.pin_memory() if pins and torch.is_tensor(value) else value for key, value in batch.items()}


def repeat_batches(run: Run) -> list[dict[str, Any]]:
    """Let a run train on its next batches again and again, so that it decodes nothing more. Returns these batches."""
    decoded = list(itertools.islice(run.feed.batches, _DECODED_BATCHES))
    run.feed.batches = itertools.cycle(decoded)
    return decoded


def _batches_path(folder: Path, rank: int) -> Path:
    return folder / f"batches-{rank}.pt"


@contextlib.contextmanager
def _timed(device: torch.device, seconds: dict[str, float]) -> Iterator[None]:
    """A context whose duration is added to `seconds`, by the clock ("wall") and in CPU time ("cpu"), after all work of
    the GPU before its begin and before its end."""
    synchronize = torch.accelerator.synchronize if device.type != "cpu" else lambda device: None
    synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    synchronize(device)
    seconds["wall"] += time.perf_counter() - wall
    seconds["cpu"] += time.process_time() - cpu


def memory_bytes(device: torch.device) -> int:
    """Memory in use now: resident on the CPU, allocated by PyTorch on a GPU."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).memory_allocated(device))
    return _from_proc("VmRSS") or peak_memory_bytes(device)


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak of `peak_memory_bytes`, if the system can."""
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with contextlib.suppress(OSError):  # some containers do not permit it
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: torch.device) -> int:
    """The peak of `memory_bytes` since the last reset."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    # Prefer VmHWM to ru_maxrss, which a process inherits from the launcher that forked it.
    kilobytes_or_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _from_proc("VmHWM") or kilobytes_or_bytes * (1 if sys.platform == "darwin" else 1024)


def _from_proc(key: str) -> int | None:
    value = proc_value("self/status", key)
    return int(value.split()[0]) * 1024 if value else None


def main(argv: Sequence[str] | None = None) -> None:
    """Run a side. ``argv`` holds the worker's flags, those of the script and those that a launcher adds."""
    options, script_flags = build_parser().parse_known_args(argv)
    script = importlib.import_module(options.script)
    parser = script.build_parser()
    updates = options.warmup + options.rounds * options.turns * options.updates
    args = parser.parse([*script_flags, "--max_steps", str(updates + 1), "--epochs", "1e9"])
    if options.side != SCRIPT:
        ReferenceSide(options, args).run()
        return
    with distributed.from_args(args) as backend:
        ScriptSide(options, backend).run(script, parser.to_config(args, parser.settings(args)))


if __name__ == "__main__":
    main()
