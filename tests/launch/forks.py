"""Runs scripts as forks of a process that has already imported PyTorch, because imports take most of a start.

Several processes find each other in the same way as those of torchrun.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
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


def completed(
    script: str, flags: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """What `python script.py flags` does in a folder, with this environment and no other."""
    with tempfile.TemporaryDirectory() as place:
        outputs = [Path(place, name) for name in ("stdout", "stderr")]
        arguments = (script.removesuffix(".py"), list(flags), folder, dict(environment), outputs)
        process = WARM.Process(target=_complete, args=arguments)
        process.start()
        try:
            process.join(HANG_SECONDS)
        finally:
            process.kill()
            process.join()
        said = [path.read_text() if path.exists() else "" for path in outputs]
        assert process.exitcode is not None
        return subprocess.CompletedProcess([script, *flags], process.exitcode, *said)


def _complete(
    module: str, flags: list[str], folder: Path, environment: Mapping[str, str], outputs: Sequence[Path]
) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        with open(path, "a") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # that of the environment
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    os.chdir(folder)
    sys.argv = [f"{module}.py", *flags]
    importlib.import_module(module).main(flags)
