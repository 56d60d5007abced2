"""Runs scripts as forks of a process that has already imported PyTorch, because imports take most of a start.

Several processes find each other in the same way as those of torchrun.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.launching import ENVIRONMENT, HANG_SECONDS, ROOT, Finished, free_port

WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(["pytest", "torch._dynamo", "torch.distributed.nn", "interrupted_worker"])


class Forked:
    """A job of ``processes`` processes that call ``main(flags)`` of a module; like `launching.Job`, it is started
    without a wait for its end. ``more`` is added to the environment."""

    def __init__(
        self, module: str, flags: Sequence[str], log: Path, processes: int = 1, threads: int = 1, **more: str
    ) -> None:
        place = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self._log, self._ranks = log, []
        log.write_text("")
        for rank in range(processes):
            of_rank = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
            environment = {**os.environ, **ENVIRONMENT, **of_rank, **more}
            arguments = (module, list(flags), ROOT, environment, [log, log], threads)
            self._ranks.append(WARM.Process(target=_main, args=arguments))
        for process in self._ranks:
            process.start()

    @property
    def output(self) -> str:
        """What the processes have printed so far."""
        return self._log.read_text()

    @property
    def pids(self) -> list[int]:
        """By rank."""
        return [process.pid for process in self._ranks]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds. The test fails if a process ends before that, or if the wait is too long."""
        deadline = time.monotonic() + HANG_SECONDS
        while not condition():
            if any(process.exitcode is not None for process in self._ranks) or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(self.output)
            time.sleep(0.02)

    def join(self, rank: int) -> None:
        """Wait for the end of one process."""
        self._ranks[rank].join(HANG_SECONDS)

    def finish(self) -> list[Finished]:
        """The exit code of each process, and the output of all."""
        try:
            for rank in range(len(self._ranks)):
                self.join(rank)
        finally:
            self.kill()
        return [Finished(process.exitcode, self.output) for process in self._ranks]

    def kill(self) -> None:
        """Kill the processes and their loaders."""
        for process in self._ranks:
            _kill(process)


def fork(module: str, flags: Sequence[str], log: Path, processes: int = 1, threads: int = 1) -> list[Finished]:
    """Call ``main(flags)`` of a module in ``processes`` processes. Returns the exit code of each, and the output of
    all."""
    return Forked(module, flags, log, processes, threads).finish()


def completed(
    script: str, flags: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """What `python script.py flags` does in a folder, with this environment and no other."""
    with tempfile.TemporaryDirectory() as place:
        outputs = [Path(place, name) for name in ("stdout", "stderr")]
        arguments = (script.removesuffix(".py"), list(flags), folder, dict(environment), outputs, 1)
        process = WARM.Process(target=_main, args=arguments)
        process.start()
        try:
            process.join(HANG_SECONDS)
        finally:
            _kill(process)
        said = [path.read_text() if path.exists() else "" for path in outputs]
        assert process.exitcode is not None
        return subprocess.CompletedProcess([script, *flags], process.exitcode, *said)


def _kill(process: multiprocessing.process.BaseProcess) -> None:
    process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _main(
    module: str, flags: list[str], folder: Path, environment: Mapping[str, str], outputs: Sequence[Path], threads: int
) -> None:
    import torch

    os.setsid()  # its loaders are of its group, by which `_kill` finds them
    for descriptor, path in enumerate(outputs, start=1):
        with open(path, "a") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()  # that of the process which started the server of forks, when it did
    os.environ.update(environment)
    tempfile.tempdir = None  # that of the environment
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    os.chdir(folder)
    sys.argv = [f"{module}.py", *flags]
    torch.set_num_threads(threads)
    main = importlib.import_module(module).main
    gc.freeze()  # a run looks for garbage after its first update, of which there is none in what was imported
    main(flags)
