"""Watches a training script, and writes a JSON object: how often per update the host waits for the GPU, and where.

PyTorch warns of each such call. Waits for an event, such as that for the count of skipped updates, are intended and not
counted.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tandem.training.run import Run

from ..references import REFERENCES
from ..worker import repeat_batches

# From PyTorch's warning about such a call. A warning without these words says that the warnings are switched on.
_WAIT = "called a synchronizing"
_FIRST, _COUNTED = 8, 12  # the first update whose waits are counted, and their number, a multiple of 4 for penalties


def main(argv: Sequence[str] | None = None) -> None:
    """``argv`` holds the flags below and those of the script."""
    # No abbreviations: flags of the scripts may begin like these.
    parser = argparse.ArgumentParser("benchmarks.gpu.waits", description=__doc__, allow_abbrev=False)
    parser.add_argument("--script", choices=REFERENCES, required=True)
    parser.add_argument("--result", type=Path, required=True, help="file to write")
    options, flags = parser.parse_known_args(argv)
    places: collections.Counter[str] = collections.Counter()

    def count_wait(message: Any, *_: Any, **__: Any) -> None:
        if _WAIT in str(message):
            places[_place(traceback.extract_stack())] += 1

    def watch(run: Run, event: str, _: Any) -> None:
        if event == "update" and run.progress.step == 0:
            repeat_batches(run)
        if event == "update" and run.progress.step in (_FIRST, _FIRST + _COUNTED):
            mode = "warn" if run.progress.step == _FIRST else "default"
            torch.get_device_module().set_sync_debug_mode(mode)

    with warnings.catch_warnings(), Run.watched(watch):
        warnings.showwarning = count_wait
        warnings.simplefilter("always")
        importlib.import_module(options.script).main([*flags, "--max_steps", str(_FIRST + _COUNTED + 1)])
    per_update = {place: count / _COUNTED for place, count in places.most_common()}
    options.result.write_text(json.dumps({"waits_per_update": sum(per_update.values()), "places": per_update}))


def _place(stack: traceback.StackSummary) -> str:
    """The place of a call in this repository: the innermost two lines outside of PyTorch and of this module."""
    root = str(Path(__file__).resolve().parents[2])
    own = [frame for frame in stack if frame.filename.startswith(root) and frame.filename != __file__]
    own = [frame for frame in own if "site-packages" not in frame.filename and "tests/pretend" not in frame.filename]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(own[-2:])) or "outside"


if __name__ == "__main__":
    main()
