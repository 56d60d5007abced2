"""One training process of a benchmark: a real script and bare loops, taking turns. Started by jobs.py.

The script asks its loader for a batch once per update. Here the loader is a generator over batches that are decoded
already, so that the time from handing out a batch to being asked for the next one is the time of one update of the
real script: noise, engine, optimizer, clock, logging and the look at the stop signal. Between two such requests the
bare loops have their turn, in the same process and on the same threads, a fraction of a second apart. In two
separate runs the state of the machine would differ, often by more than the difference that is to be measured.

The turns share the process (a backend's background threads run on during the bare loops' turns, at under 1% of
a core) and the caches (each side finds those the other left; on the CPU a turn is one update, 10 ms or more). With
several processes every turn begins at a barrier, outside the measured time; the bare loops then run independently.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import data
import data.feed
import distributed

from .bare import VARIANTS, bare_vae
from .bare_decoder import bare_decoder

SCRIPT = "script"
_DECODED_BATCHES = 4
_OpenStream = data.TrainingStream
BARE_LOOPS: Mapping[str, Callable[..., Iterator[None]]] = {"train_vae": bare_vae, "train_decoder": bare_decoder}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("benchmarks.worker", description="Started by the benchmarks.")
    parser.add_argument("--script", choices=BARE_LOOPS, default="train_vae", help="the script that is measured")
    parser.add_argument("--result", type=Path, required=True, help="file to write")
    parser.add_argument("--sides", required=True, help="comma list of script and the names in bare.VARIANTS")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True, help="of each side in a round")
    parser.add_argument("--updates", type=int, required=True, help="of a side in its turn")
    parser.add_argument("--warmup", type=int, default=2, help="updates of each side that are not measured")
    return parser


class Contest:
    """The script and bare loops, in turn.

    Args:
        args: Arguments of the script.
        options: Arguments of the worker, see ``build_parser``.
        backend: The script's backend; None if only bare loops run, in one process.
    """

    def __init__(
        self, args: argparse.Namespace, options: argparse.Namespace, backend: distributed.Backend | None
    ) -> None:
        self._args, self._options, self._backend = args, options, backend
        self.device = backend.device if backend else torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._memory_before = memory_bytes(self.device)
        self._sides = options.sides.split(",")
        self._rounds: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in self._sides}
        self._memory: list[list[int]] = []  # by rank

    def stream(self, images: data.Images, subset: data.Subset, **loading: Any) -> Iterator[data.Batch]:
        """Replaces the feed's ``TrainingStream``. Ends one batch after the last round."""
        stream = _OpenStream(images, subset, **{**loading, "num_workers": 0})
        decoded = list(itertools.islice(stream, _DECODED_BATCHES))
        make = BARE_LOOPS[self._options.script]
        bare = {name: make(self._args, decoded, VARIANTS[name], self.device) for name in self._sides if name != SCRIPT}
        batches = itertools.cycle(decoded)
        options = self._options
        for _ in range(options.warmup):
            yield next(batches)
            for loop in bare.values():
                next(loop)
        peak_of_start = peak_memory_bytes(self.device)
        reset_peak_memory(self.device)
        for _ in range(options.rounds):
            clocks = {name: _Clock(self.device) for name in self._sides}
            for _ in range(options.turns):
                if SCRIPT in clocks:
                    self._start(clocks[SCRIPT])
                    for _ in range(options.updates):
                        yield next(batches)
                    clocks[SCRIPT].stop()
                for name, loop in bare.items():
                    self._start(clocks[name])
                    for _ in range(options.updates):
                        next(loop)
                    clocks[name].stop()
            self._count_round(clocks, samples=options.turns * options.updates * len(decoded[0]["images"]))
        self._memory = self._gather([self._memory_before, peak_of_start, peak_memory_bytes(self.device)])
        yield next(batches)  # the script's last update, after which it asks for no batch

    def result(self) -> dict[str, Any]:
        """JSON values. Samples per second of all processes together, and per second of CPU time, by side and round.
        Memory in bytes, of the process that uses most: before the model is built, the peak up to the end of the warm-up
        (building, wrapping and the first updates), and the peak of the updates after it."""
        before, start, updates = max(self._memory, key=lambda bytes_: max(bytes_[1:]))
        return {
            "samples_per_second": {name: rounds["wall"] for name, rounds in self._rounds.items()},
            "samples_per_cpu_second": {name: rounds["cpu"] for name, rounds in self._rounds.items()},
            "memory_bytes": {"before": before, "start": start, "updates": updates},
        }

    def _start(self, clock: _Clock) -> None:
        if self._backend:
            self._backend.barrier()
        clock.start()

    def _count_round(self, clocks: dict[str, _Clock], samples: int) -> None:
        by_rank = self._gather({name: [clock.wall_seconds, clock.cpu_seconds] for name, clock in clocks.items()})
        for name, rounds in self._rounds.items():
            rounds["wall"].append(sum(samples / of_rank[name][0] for of_rank in by_rank))
            rounds["cpu"].append(samples * len(by_rank) / sum(of_rank[name][1] for of_rank in by_rank))

    def _gather(self, value: Any) -> list[Any]:
        return self._backend.gather_objects(value) if self._backend else [value]


class _Clock:
    """Adds up the time of one side, and waits for the GPU so that all its work counts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.wall_seconds = self.cpu_seconds = 0.0

    def start(self) -> None:
        self._wait_for_the_device()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self._wait_for_the_device()
        self.wall_seconds += time.perf_counter() - self._wall
        self.cpu_seconds += time.process_time() - self._cpu

    def _wait_for_the_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def memory_bytes(device: torch.device) -> int:
    """Memory in use now: resident on the CPU, allocated by PyTorch on a GPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _from_proc("VmRSS") or peak_memory_bytes(device)


def reset_peak_memory(device: torch.device) -> None:
    """Forget the peak so far, if the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with contextlib.suppress(OSError):  # some containers do not permit it
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: torch.device) -> int:
    """The most that was in use at once since the last reset."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Prefer VmHWM to ru_maxrss, which a process inherits from the launcher that forked it.
    kilobytes_or_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _from_proc("VmHWM") or kilobytes_or_bytes * (1 if sys.platform == "darwin" else 1024)


def _from_proc(key: str) -> int | None:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a contest. ``argv`` holds the worker's flags, those of the script and those that a launcher adds."""
    options, script_flags = build_parser().parse_known_args(argv)
    script = importlib.import_module(options.script)
    parser = script.build_parser()
    updates = options.warmup + options.rounds * options.turns * options.updates
    args = parser.parse([*script_flags, "--max_steps", str(updates + 1), "--epochs", "1e9"])
    if SCRIPT not in options.sides.split(","):  # bare loops of train_vae.py
        contest = Contest(args, options, backend=None)
        images = data.open_images(args.image_folder, image_size=args.image_size)
        subset, _ = data.split(len(images), 0.0, args.seed, at_least=args.batch_size)
        loading = {"batch_size": args.batch_size, "rank": 0, "world_size": 1, "seed": args.seed}
        for _ in contest.stream(images, subset, **loading):
            pass
        options.result.write_text(json.dumps(contest.result()))
        return
    with distributed.from_args(args) as backend:
        contest = Contest(args, options, backend)
        data.feed.TrainingStream = contest.stream  # type: ignore[assignment, misc]
        script.train(args, parser.settings(args), backend)
        if backend.is_root:
            options.result.write_text(json.dumps(contest.result()))


if __name__ == "__main__":
    main()
