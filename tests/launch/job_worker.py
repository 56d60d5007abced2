"""Does several tasks one after another in a single job of any launcher, because a job starts slowly.

    torchrun --nproc_per_node 2 tests/launch/job_worker.py TASKS.json

TASKS.json lists what to do: {"do": "train_vae" or "module.function", "flags": [of the script], "output": path}.
TASKS.done lists the outputs of the tasks that were done.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed


def of_task(task: dict[str, Any]) -> tuple[Any, Callable[[distributed.Backend], Any]]:
    """The arguments of a task, and a function of the backend that does the task."""
    module, _, function = task["do"].partition(".")
    is_script = module.startswith("train_")
    parser = importlib.import_module(module if is_script else "train_vae").build_parser()
    args = parser.parse([*task["flags"], "--output_dir", task["output"]])
    if is_script:
        train = importlib.import_module(module).train
        return args, lambda backend: train(args, parser.settings(args), backend)
    call = getattr(importlib.import_module(module), function)
    return args, lambda backend: call(args, backend, **task.get("more", {}))


def main() -> None:
    path = Path(sys.argv[-1])
    tasks = json.loads(path.read_text())
    with distributed.from_args(of_task(tasks[0])[0]) as backend:
        gc.freeze()  # DeepSpeed collects garbage at every wrap
        for task in tasks:
            args, do = of_task(task)
            # Configure the backend as a new start with these arguments would, but keep the connection.
            new = vars(distributed.from_args(args))
            vars(backend).update({name: value for name, value in new.items() if not name.startswith("_")})
            do(backend)
            if backend.is_root:
                with open(path.with_suffix(".done"), "a") as file:
                    file.write(f"{task['output']}\n")


if __name__ == "__main__":
    main()
