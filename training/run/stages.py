"""Runs the stages of a script that uses trained weights, one after the other, until one of them is asked to stop.

PyTorch is imported when the stages run, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tandem.files.exits import ASKED_TO_STOP, leave
from tandem.files.reading import printable

if TYPE_CHECKING:
    from distributed import Backend

Say = Callable[[str], None]


def run_stages(stages: Sequence[Callable[..., int]], args: argparse.Namespace, processes: Backend) -> None:
    """Run `stage(args, processes, say)` for each stage, which returns how many shards are left after a signal.

    `say` prints a line on the root: to stderr if `args.json` is set, because stdout is then for data only.

    Raises:
        SystemExit: with code 75, after a signal.
    """
    import torch

    torch.set_num_threads(args.cpu_threads)
    to = sys.stderr if getattr(args, "json", False) else sys.stdout

    def say(text: str) -> None:
        if processes.is_root:
            print(printable(text), file=to, flush=True)  # it may quote a file

    for stage in stages:
        if shards_left := stage(args, processes, say):
            say(f"asked to stop: the same command goes on with the {shards_left} shards that are left")
            leave(ASKED_TO_STOP)


def kernel_settings(args: argparse.Namespace, processes: Backend) -> dict[str, Any]:
    """Settings that choose the kernels, on which a result depends besides model and input."""
    threads = args.cpu_threads if processes.device.type == "cpu" else None
    return {
        "precision": processes.options.precision, "deterministic": args.deterministic,
        "device": processes.device.type, "cpu_threads": threads,
    }  # fmt: skip
