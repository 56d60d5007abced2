"""Start real processes through the real launchers, each job with a mark by which all its processes are found and ended.

No outcome depends on how fast the machine is: ``HANG_SECONDS`` is there to end what would never end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
HANG_SECONDS = 3600.0
MARK = "TANDEM_TEST_JOB"  # in the environment of every process of a job
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # sums must not depend on how many cores are free
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONPATH": str(ROOT),
    "HOROVOD_GLOO_TIMEOUT_SECONDS": str(int(HANG_SECONDS)),  # to connect; 30 otherwise
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(HANG_SECONDS)),  # to end after torchrun got a signal; 30 otherwise
}


@dataclass(frozen=True)
class Launcher:
    """A way to start a script, e.g. ``Launcher("deepspeed", 2, zero_stage=3)``."""

    name: str
    processes: int = 1
    zero_stage: int | None = None

    def __str__(self) -> str:
        stage = "" if self.zero_stage is None else f"-zero{self.zero_stage}"
        return f"{self.name}{stage}-x{self.processes}"

    @property
    def bare(self) -> Launcher:
        """Without the ZeRO stage, which is a flag of the script."""
        return replace(self, zero_stage=None)

    def command(
        self, script: str | Path, flags: Sequence[str], launcher_flags: Sequence[str] = (), *, is_patient: bool = True
    ) -> list[str]:
        """``is_patient``: horovodrun waits for processes that it has asked to end."""
        n, path = str(self.processes), str(ROOT / script)
        if self.name == "python":
            return [sys.executable, path, *flags]
        port = ["--master_port", str(free_port())]
        if self.name == "torchrun":
            return [str(tool("torchrun")), "--nproc_per_node", n, *port, *launcher_flags, path, *flags]
        if self.name == "deepspeed":
            stage = [] if self.zero_stage is None else ["--zero_stage", str(self.zero_stage)]
            return [str(tool("deepspeed")), "--num_gpus", n, *port, path, *flags, *stage]
        assert self.name == "horovodrun", self.name
        horovodrun = [sys.executable, str(HERE / "horovodrun.py")] if is_patient else [str(tool("horovodrun"))]
        return [*horovodrun, "-np", n, sys.executable, path, *flags]


ONE_PROCESS = Launcher("python")
ZERO_STAGES = [Launcher("deepspeed", 2, zero_stage=stage) for stage in range(4)]


@dataclass(frozen=True)
class Finished:
    """What a job left behind."""

    returncode: int
    output: str  # stdout and stderr, as they came


class Job:
    """One start of a script. Its output goes to a file, so that a process that is left over holds no pipe open."""

    def __init__(self, command: Sequence[str], script: str | Path, log: Path | None = None, **environment: str) -> None:
        self.command, self._script, self._began = list(command), str(script), time.monotonic()
        self._log = open(log, "w+b") if log else tempfile.TemporaryFile()  # noqa: SIM115
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, **environment, MARK: self._mark},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self._began

    @property
    def output(self) -> str:
        """What it has said so far."""
        descriptor = self._log.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def poll(self) -> int | None:
        """The launcher's exit code once it has ended."""
        return self.process.poll()

    def everything(self) -> list[psutil.Process]:
        """All that is alive of it. Launchers put processes into sessions of their own; their environment tells."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        """The training processes by rank, without loader workers, which look alike but are their children."""
        found: dict[int, tuple[int, int, psutil.Process]] = {}
        for process in self.everything():
            with contextlib.suppress(psutil.Error, IndexError):
                arguments, environment = process.cmdline(), process.environ()
                if "python" in arguments[0] and any(text.endswith(self._script) for text in arguments[1:3]):
                    rank = int(environment.get("HOROVOD_RANK", environment.get("RANK", 0)))
                    found[process.pid] = (rank, process.ppid(), process)
        ranks = {rank: process for rank, parent, process in found.values() if parent not in found}
        return [ranks[rank] for rank in sorted(ranks)]

    def wait(self, seconds: float = HANG_SECONDS) -> int | None:
        """Exit code of the launcher once no training process is left either; None if that takes longer."""
        deadline = time.monotonic() + seconds
        while self.poll() is None or self.ranks():
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)
        return self.process.returncode

    def stacks(self) -> str:
        """What is still there, and the end of its output with the places where the training processes stand."""
        left = self.everything()
        send(self.ranks(), signal.SIGABRT)  # PYTHONFAULTHANDLER
        time.sleep(3)
        return "\n".join([*map(str, left), self.output[-8000:]])

    def kill(self) -> None:
        """Nothing of it stays."""
        while left := self.everything():
            send(left, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.05)
        self.process.wait()


def start(
    launcher: Launcher,
    script: str | Path,
    flags: Sequence[str],
    launcher_flags: Sequence[str] = (),
    *,
    is_patient: bool = True,
) -> Job:
    """The job; ``is_patient``: as ``Launcher.command`` has it."""
    command = launcher.command(script, flags, launcher_flags, is_patient=is_patient)
    return Job(command, script)


def finish(job: Job, timeout_seconds: float = HANG_SECONDS) -> Finished:
    """Wait for a job; whatever of it is left after the timeout is killed, and that is a failure."""
    try:
        code = job.wait(timeout_seconds)
        assert code is not None, f"still running after {timeout_seconds} s:\n{job.stacks()}"
    finally:
        job.kill()
    return Finished(code, job.output)


def run(
    launcher: Launcher, script: str | Path, flags: Sequence[str], timeout_seconds: float = HANG_SECONDS
) -> Finished:
    """Start a job and wait for its end."""
    return finish(start(launcher, script, flags), timeout_seconds)


def wait_until(job: Job, condition: Callable[[], bool], pause: float = 0.1) -> None:
    """Until the condition holds; a job that ends before, or never gets there, is a failure."""
    while not condition():
        if job.poll() is not None or job.seconds > HANG_SECONDS:
            job.kill()
            raise AssertionError(job.output)
        time.sleep(pause)


def worker_pids(job: Job, script: str | None = None) -> list[int]:
    """The training processes of a job by rank: launchers and loader workers left out."""
    return [process.pid for process in job.ranks()]


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def tool(name: str) -> Path:
    """A launcher of this Python's environment."""
    path = Path(sys.executable).parent / name
    assert path.exists(), f"{name} is not installed beside {sys.executable}; `make test` installs every backend"
    return path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
