"""Does several tasks one after another in a single job of any launcher, because a job starts slowly.

    torchrun --nproc_per_node 2 tests/launch/job_worker.py TASKS.json

TASKS.json lists what to do: {"do": "train_vae" or "module.function", "flags": [of the script], "output": path}.
TASKS.done lists the outputs of the tasks that were done on every rank. Each rank leaves the error of a task, or an
empty text, in a file beside the output. The job goes on after a task that failed, and then ends with exit code 1.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tandem import distributed
from tandem.launch import adopt_architecture

# A rank that failed waits so long for the others, which may hang in a collective that it has left: then the job ends.
PATIENCE_SECONDS = 120


def of_task(task: dict[str, Any]) -> tuple[Any, Callable[[distributed.Backend], Any]]:
    """The arguments of a task, and a function of the backend that does the task."""
    module, _, function = task["do"].partition(".")
    is_script = module.startswith("train_")
    parser = importlib.import_module(module if is_script else "train_vae").build_parser()
    args = parser.parse([*task["flags"], "--output_dir", task["output"]])
    if is_script:
        train = importlib.import_module(module).train
        if args.init_from:
            adopt_architecture(parser, args)
        return args, lambda backend: train(parser.to_config(args, parser.settings(args)), backend)
    call = getattr(importlib.import_module(module), function)
    return args, lambda backend: call(args, backend, **task.get("more", {}))


def error_of(task: dict[str, Any], backend: distributed.Backend) -> str:
    """Do a task. Returns the error with which it failed on this rank, or an empty text."""
    try:
        args, do = of_task(task)
        # Configure the backend as a new start with these arguments would, but keep the connection.
        new = vars(distributed.from_args(args))
        vars(backend).update({name: value for name, value in new.items() if not name.startswith("_")})
        do(backend)
    except (Exception, SystemExit):
        return f"{task['output']} failed on rank {backend.processes.rank}:\n{traceback.format_exc()}"
    return ""


def is_good_on_all(error: str, records: Sequence[Path], rank: int) -> bool:
    """Leave the error of this rank in its file, and wait for the files of the others: a collective could meet one of
    the task that failed."""
    made = Path(f"{records[rank]}.tmp")
    made.write_text(error)
    os.replace(made, records[rank])
    began = time.monotonic()
    while not all(record.exists() for record in records):
        if error and time.monotonic() - began > PATIENCE_SECONDS:
            raise RuntimeError(error)
        time.sleep(0.01)
    return not any(record.read_text() for record in records)


def main(argv: Sequence[str]) -> None:
    path = Path(argv[-1])
    tasks = json.loads(path.read_text())
    n_good = 0
    with distributed.from_args(of_task(tasks[0])[0]) as backend:
        for number, task in enumerate(tasks):
            gc.freeze()  # DeepSpeed collects garbage at every wrap, and a run after its first update; its end unfreezes
            records = [Path(f"{task['output']}.{number}.rank{rank}") for rank in range(backend.processes.world_size)]
            error = error_of(task, backend)
            print(error, end="", file=sys.stderr, flush=True)
            if not is_good_on_all(error, records, backend.processes.rank):
                continue
            n_good += 1
            if backend.processes.is_root:
                with open(path.with_suffix(".done"), "a") as file:
                    file.write(f"{task['output']}\n")
    sys.exit(n_good < len(tasks))


if __name__ == "__main__":
    main(sys.argv[1:])
