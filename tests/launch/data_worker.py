"""train_vae.py, which writes down the samples of every update and is interrupted after one of them.

    torchrun --nproc_per_node 2 tests/launch/data_worker.py --ids FILE --interrupt SIGKILL@9 [flags of train_vae.py]

FILE gets a line per update: its number, and the ids of the whole global batch by position.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import data.feed
import train_vae
from distributed import Backend
from training.run.run import Run


def watch(backend: Backend, ids: Path, interruption: str, save_every: int) -> None:
    """From here on every completed update is written down, and the one that was named is interrupted."""
    name, _, at = interruption.partition("@")
    pids = backend.gather_objects(os.getpid())
    taken: list[tuple[int, int]] = []
    advance = Run.advance

    class Stream(data.TrainingStream):
        def __iter__(self) -> Iterator[data.Batch]:
            for batch in super().__iter__():
                taken[:] = zip(batch["positions"], batch["ids"], strict=True)
                yield batch

    def advance_and_write(run: Run) -> None:
        advance(run)
        samples = sorted(sample for part in backend.gather_objects(taken) for sample in part)
        if not backend.is_root:
            return
        with open(ids, "a") as file:
            file.write(json.dumps({"update": run.progress.step, "ids": [index for _, index in samples]}) + "\n")
        if name and at == str(run.progress.step):
            saved = run.progress.step // save_every * save_every
            wait_for(run.folder.checkpoints_dir / f"step_{saved:08d}")  # updates are shorter here than a save
            interrupt(name, pids)

    data.feed.TrainingStream, Run.advance = Stream, advance_and_write  # type: ignore[misc, method-assign]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def interrupt(name: str, pids: Sequence[int]) -> None:
    """SIGUSR1 comes to the last process alone, another signal to all of them, to this one last."""
    for pid in reversed(pids[-1:] if name == "SIGUSR1" else pids):
        os.kill(pid, signal.Signals[name])


def start(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--ids", type=Path, required=True)
    parser.add_argument("--interrupt", default="", help="such as SIGKILL@9: after update 9, before it is saved")
    own, flags = parser.parse_known_args(argv)
    train = train_vae.train

    def watched(args: argparse.Namespace, settings: dict[str, Any], backend: Backend) -> None:
        watch(backend, own.ids, own.interrupt, args.save_every_n_steps)
        train(args, settings, backend)

    train_vae.train = watched
    train_vae.main(flags)


def start_fork(environment: Mapping[str, str], argv: Sequence[str], log: Path) -> None:
    """`start` as one of several processes, in a fork of one that has imported this file."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    start(argv)


if __name__ == "__main__":
    start()
