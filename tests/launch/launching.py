"""Start real processes through the real launchers, each in a process group of its own that is ended with the test."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Launcher:
    """A way to start a script, e.g. ``Launcher("deepspeed", 2, zero_stage=3)``."""

    name: str
    processes: int = 1
    zero_stage: int | None = None

    def __str__(self) -> str:
        stage = "" if self.zero_stage is None else f"-zero{self.zero_stage}"
        return f"{self.name}{stage}-x{self.processes}"

    def command(self, script: str, flags: Sequence[str], launcher_flags: Sequence[str] = ()) -> list[str]:
        n = str(self.processes)
        path = str(ROOT / script)
        if self.name == "python":
            return [sys.executable, path, *flags]
        if self.name == "torchrun":
            port = str(_free_port())
            return [_tool("torchrun"), "--nproc_per_node", n, "--master_port", port, *launcher_flags, path, *flags]
        if self.name == "deepspeed":
            stage = [] if self.zero_stage is None else ["--zero_stage", str(self.zero_stage)]
            return [_tool("deepspeed"), "--num_gpus", n, "--master_port", str(_free_port()), path, *flags, *stage]
        assert self.name == "horovodrun", self.name
        return [_tool("horovodrun"), "-np", n, sys.executable, path, *flags]


@dataclass(frozen=True)
class Finished:
    """What a job left behind."""

    returncode: int
    output: str  # stdout and stderr, as they came


def start(
    launcher: Launcher, script: str, flags: Sequence[str], launcher_flags: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """The job, in a session of its own; stdout and stderr come together."""
    # One thread per process, so that sums do not depend on how many cores are free.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    return subprocess.Popen(
        launcher.command(script, flags, launcher_flags),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout_seconds: float) -> Finished:
    """Wait for a job; whatever of it is left after the timeout is killed, and that is a failure."""
    try:
        output, _ = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        kill(process)
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout_seconds} s:\n{output[-4000:]}") from None
    finally:
        kill(process)
    return Finished(process.returncode, output)


def run(launcher: Launcher, script: str, flags: Sequence[str], timeout_seconds: float = 240) -> Finished:
    """Start a job and wait for its end."""
    return finish(start(launcher, script, flags), timeout_seconds)


def kill(process: subprocess.Popen[str]) -> None:
    """End whatever is left of the job's session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def worker_pids(process: subprocess.Popen[str], script: str) -> list[int]:
    """The training processes of a job by rank: launchers and loader workers left out."""
    import psutil

    by_rank: dict[int, int] = {}
    job = psutil.Process(process.pid)
    for child in [job, *job.children(recursive=True)]:  # parents come before their children
        try:
            arguments = child.cmdline()
            if "python" in arguments[0] and any(argument.endswith(script) for argument in arguments[1:3]):
                environment = child.environ()
                rank = int(environment.get("HOROVOD_RANK", environment.get("RANK", 0)))
                by_rank.setdefault(rank, child.pid)
        except (psutil.Error, IndexError):
            continue
    return [by_rank[rank] for rank in sorted(by_rank)]


def _tool(name: str) -> str:
    path = Path(sys.executable).parent / name
    assert path.exists(), f"{name} is not installed beside {sys.executable}; `make test` installs every backend"
    return str(path)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
