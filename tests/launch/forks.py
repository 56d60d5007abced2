"""Runs scripts as forks of a process that has already imported PyTorch, because imports take most of a start.

Several processes find each other in the same way as those of torchrun.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from launching import ENVIRONMENT, HANG_SECONDS, ROOT, WITHOUT_COMPILER, Finished, free_port

WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(["pytest", "torch._dynamo", "torch.distributed.nn", "interrupted_worker"])


def fork(module: str, flags: Sequence[str], log: Path, processes: int = 1, threads: int = 1) -> list[Finished]:
    """Call ``main(flags)`` of a module in ``processes`` processes. Returns the exit code of each, and the output of
    all."""
    place = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    log.unlink(missing_ok=True)
    ranks = []
    for rank in range(processes):
        of_rank = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
        arguments = (module, list(flags), {**ENVIRONMENT, **WITHOUT_COMPILER, **of_rank}, threads, log)
        ranks.append(WARM.Process(target=_main, args=arguments))
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(HANG_SECONDS)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [Finished(process.exitcode, log.read_text()) for process in ranks]


def _main(module: str, flags: list[str], environment: Mapping[str, str], threads: int, log: Path) -> None:
    import torch

    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.argv = [f"{module}.py", *flags]
    torch.set_num_threads(threads)
    importlib.import_module(module).main(flags)
