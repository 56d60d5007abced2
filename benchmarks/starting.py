"""How long ``train_vae.py --help`` takes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from .jobs import ROOT
from .report import Goal, Row

_GOAL = Goal("ours", "<", 1.0)


def starting(rounds: int) -> Iterator[Row]:
    """Seconds from the command to its end, over those of a Python process that only imports argparse."""
    ours, reference = [], []
    for _ in range(rounds):
        ours.append(_seconds([sys.executable, "train_vae.py", "--help"]))
        reference.append(_seconds([sys.executable, "-c", "import argparse"]))
    yield Row("train_vae.py --help", "seconds", ours, reference, _GOAL, note="over a bare `import argparse`")


def _seconds(command: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began
