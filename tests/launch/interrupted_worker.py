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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch._dynamo
import torch.distributed.nn  # noqa: F401  (forks of this process start faster)

from tandem.training.run import Run


class Interruption:
    """Watches a run; see `main` for the flags."""

    def __init__(self, ids: Path | None, interrupt: str, last_alone: bool) -> None:
        self._ids, self._last_alone = ids, last_alone
        self._signal, _, self._place = interrupt.partition("@")
        self._batches = itertools.count(1)  # of validations
        self._is_sent = False

    def __call__(self, run: Run, event: str, batch: Any) -> None:
        here = run.processes
        is_last = here.rank == here.world_size - 1
        if event == "evaluation" and is_last:
            assert not self._is_sent, "no batch follows that of the signal"
            if self._place == f"batch{next(self._batches)}":
                self._is_sent = True
                os.kill(os.getpid(), signal.Signals[self._signal])
        elif event == "updated":
            samples = zip(batch["positions"], batch["ids"], strict=True)
            pids, parts = zip(*here.gather_objects((os.getpid(), [*samples])), strict=True)
            if not here.is_root:
                return
            update = run.progress.step
            if self._ids:
                ids = [index for _, index in sorted(itertools.chain(*parts))]
                with open(self._ids, "a") as file:
                    file.write(json.dumps({"update": update, "ids": ids}) + "\n")
            if self._signal and self._place == str(update) and not here.is_restart:
                kill(run, pids[-1:] if self._last_alone else pids, self._signal)


def kill(run: Run, pids: Sequence[int], name: str = "SIGKILL") -> None:
    """Send a signal to processes of a run, the last one first, when the checkpoint before this update is there: updates
    are shorter than a save."""
    every = run.config.save_every_n_steps
    saved = run.folder.checkpoints_dir / f"step_{(run.progress.step - 1) // every * every:08d}"
    while not saved.exists():
        time.sleep(0.01)
    for pid in reversed(pids):
        os.kill(pid, signal.Signals[name])


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
    with Run.watched(Interruption(own.ids, own.interrupt, own.last_alone)):
        importlib.import_module(own.script).main(flags)


if __name__ == "__main__":
    main(sys.argv[1:])
