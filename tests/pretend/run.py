"""Runs a script on the pretend device: python tests/pretend/run.py SCRIPT.py FLAGS, also through a launcher; or several
scripts that train nothing, one after the other: run.py --commands FILE, a JSON object, {phase: [SCRIPT.py, FLAGS...]}.

In the folder that PRETEND_REPORTS names in the environment, RANK.json then holds the number of updates by phase, what
the device has reported by phase, and the collectives in their order: those of the device, and those of the layer
`distributed`, of which Gloo exchanges some between the hosts. Phases are "start"; "first", two updates, which make
state, kernels and pinned buffers; "update", later ones without a line of metrics; "line", those with one; "between",
what follows an update; "end", what follows the last one; "evaluation"; and the keys of --commands.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from tests.pretend import library  # noqa: E402
from tests.pretend.device import install  # noqa: E402

FIRST = 2  # updates


def noted_collectives() -> list[str]:
    """Each call that a process makes of its communicator from now on: the name, the dtype and the shape."""
    from tandem.distributed.torch_comm import TorchCommunicator

    calls: list[str] = []
    for method in (TorchCommunicator.all_reduce_, TorchCommunicator.all_gather):

        def noted(own: Any, tensor: Any, *name: str, method: Any = method) -> Any:
            calls.append(f"{method.__name__} {' '.join(name)} {tensor.dtype} {[*tensor.shape]}")
            return method(own, tensor, *name)

        setattr(TorchCommunicator, method.__name__, noted)
    return calls


def main(argv: Sequence[str]) -> None:
    if argv[0] == "--commands":
        commands = json.loads(Path(argv[1]).read_text())
    else:
        script = next(word for word in argv if word.endswith(".py"))  # deepspeed puts a flag before it
        commands = {"start": [script, *(word for word in argv if word != script)]}
    device, updates = install(library.built()), dict[str, int]()
    torch.set_num_threads(1)
    own_calls = noted_collectives()
    if any(script.startswith("train_") for script, *_ in commands.values()):
        from tandem.training.run import Run

        def watch(run: Any, event: str, _: Any) -> None:
            if event == "update":
                first = run.progress.step < FIRST
                device.phase = "first" if first else "line" if run.is_line_due else "update"
                updates[device.phase] = updates.get(device.phase, 0) + 1
            elif event == "updated":
                device.phase = "end" if run.progress.finished else "between"
            elif event == "evaluation":
                device.phase = event

        Run._watchers.append(watch)
    try:
        for device.phase, sys.argv in commands.items():
            runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
    finally:
        reports = [{**report._asdict(), "times": times} for report, times in device.reports.items()]
        about = {"updates": updates, "reports": reports, "collectives": [device.library.calls(), own_calls]}
        Path(os.environ["PRETEND_REPORTS"], f"{os.environ.get('RANK', '0')}.json").write_text(
            json.dumps(about, indent=1)
        )


if __name__ == "__main__":
    main(sys.argv[1:])
