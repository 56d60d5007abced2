"""A training script that writes down the samples of every update and is interrupted after one of them.

    torchrun --nproc_per_node 2 tests/launch/interrupted_worker.py --script train_vae --ids FILE \
        --interrupt SIGKILL@9 [flags of the script]

FILE gets a line per update: its number, and the ids of the whole global batch by position.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch._dynamo
import torch.distributed.nn  # noqa: F401  (forks of this process start faster)

import data.feed
from data.stream import Batch, TrainingStream
from distributed import Backend
from training.run.run import Run


def watch(backend: Backend, ids: Path | None, interruption: str, last_alone: bool, save_every: int) -> None:
    """From now on, write down every completed update, and interrupt the run after the one in ``interruption``."""
    name, _, at = interruption.partition("@")
    pids = backend.gather_objects(os.getpid())
    taken: list[tuple[int, int]] = []
    advance = Run.advance

    class Stream(TrainingStream):
        def __iter__(self) -> Iterator[Batch]:
            for batch in super().__iter__():
                taken[:] = zip(batch["positions"], batch["ids"], strict=True)
                yield batch

    def advance_and_write(run: Run) -> None:
        advance(run)
        samples = sorted(sample for part in backend.gather_objects(taken) for sample in part)
        if not backend.is_root:
            return
        if ids:
            with open(ids, "a") as file:
                file.write(json.dumps({"update": run.progress.step, "ids": [index for _, index in samples]}) + "\n")
        if name and at == str(run.progress.step) and not backend.is_restart:
            saved = (run.progress.step - 1) // save_every * save_every
            while not (run.folder.checkpoints_dir / f"step_{saved:08d}").exists():  # updates are shorter than a save
                time.sleep(0.01)
            for pid in reversed(pids[-1:] if last_alone else pids):  # this process last
                os.kill(pid, signal.Signals[name])

    data.feed.TrainingStream, Run.advance = Stream, advance_and_write  # type: ignore[misc, method-assign]
    if at.startswith("batch") and backend.rank == backend.world_size - 1:
        validation, batches = data.feed.Feed.validation, itertools.count(1)

        def validation_that_interrupts(feed: Any) -> Iterator[Any]:
            for batch in validation(feed):
                if next(batches) == int(at.removeprefix("batch")):
                    os.kill(os.getpid(), signal.Signals[name])
                yield batch

        data.feed.Feed.validation = validation_that_interrupts  # type: ignore[method-assign]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--script", default="train_vae")
    parser.add_argument("--ids", type=Path)
    parser.add_argument(
        "--interrupt",
        default="",
        help="such as SIGKILL@9: after update 9, before it is saved; SIGTERM@batch9: "
        "the last process alone, in its batch 9 of the validations",
    )
    parser.add_argument("--last_alone", action="store_true", help="of the processes; the others find out")
    own, flags = parser.parse_known_args(argv)
    script = importlib.import_module(own.script)
    train = script.train

    def watched(args: argparse.Namespace, settings: dict[str, Any], backend: Backend) -> None:
        watch(backend, own.ids, own.interrupt, own.last_alone, args.save_every_n_steps)
        train(args, settings, backend)

    script.train = watched
    script.main(flags)


if __name__ == "__main__":
    main(sys.argv[1:])
