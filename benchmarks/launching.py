"""Starts scripts through the real launchers. A mark in the environment of a job finds all its processes, to end them.

No result depends on the speed of the machine: ``HANG_SECONDS`` only ends jobs that would never end.
"""

from __future__ import annotations

import contextlib
import fcntl
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

from tandem.distributed.backends import all_backends

ROOT = Path(__file__).resolve().parents[1]
PATIENT_HOROVODRUN = (sys.executable, "-m", "benchmarks.horovodrun", "--gloo")
HANG_SECONDS = 3600.0
# `make test-all`: every variant of every script on every launcher.
WHOLE_MATRIX = os.environ.get("WHOLE_MATRIX") == "1"
MARK = "TANDEM_TEST_JOB"  # in the environment of every process of a job
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # sums must not depend on how many cores are free
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'launch' / 'startup'}",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": str(int(HANG_SECONDS)),  # seconds to connect; the default is 30
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(HANG_SECONDS)),  # seconds to end after torchrun got a signal; default 30
}


#: The environment of a user's job, for jobs that are no tests, such as those of `make bench`: OMP_NUM_THREADS as it is
#: set, and no tests/launch/startup, which changes when Python collects garbage. The timeouts of ENVIRONMENT stay, so
#: that a slow start or end fails no measurement.
AS_A_USER = {
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
}


_KILL_SECONDS = 300.0  # limit for a killed process to disappear; one that waits for a disk takes long
_PORTS = range(10_000, 32_000)  # below the ephemeral ports of the system


class JobFailed(RuntimeError):
    """A job gave no result; the text says why in one line."""


@dataclass(frozen=True)
class Launcher:
    """A way to start a script, e.g. ``Launcher("deepspeed", 2, zero_stage=3)``."""

    name: str
    processes: int = 1
    zero_stage: int | None = None
    backend: str | None = None  # if it is not the launcher's own

    def __str__(self) -> str:
        stage = "" if self.zero_stage is None else f"-zero{self.zero_stage}"
        return f"{self.name}{stage}{f'-{self.backend}' if self.backend else ''}-x{self.processes}"

    @property
    def without_stage(self) -> Launcher:
        """The same launcher without the ZeRO stage: a job may run several stages, one after the other."""
        return replace(self, zero_stage=None)

    @property
    def bare(self) -> Launcher:
        """The same launcher without the attributes that `flags` passes to the script."""
        return replace(self, zero_stage=None, backend=None)

    @property
    def flags(self) -> list[str]:
        """Flags of the script for the ZeRO stage and the backend."""
        stage = [] if self.zero_stage is None else ["--zero_stage", str(self.zero_stage)]
        return [*stage, *(["--distributed_backend", self.backend] if self.backend else [])]

    def command(self, script: str | Path, flags: Sequence[str], launcher_flags: Sequence[str] = ()) -> list[str]:
        """The command line that starts a script of the repository, or a module by its name.

        Raises:
            JobFailed: the launcher is not installed.
        """
        n, flags = str(self.processes), [*flags, *self.flags]
        module = "--module" if self.name == "deepspeed" else "-m"
        path = [str(ROOT / script)] if str(script).endswith(".py") else [module, str(script)]
        if self.name == "python":
            return [sys.executable, *path, *flags]
        port = ["--master_port", str(free_port())]
        if self.name == "torchrun":
            return [str(tool("torchrun")), "--nproc_per_node", n, *port, *launcher_flags, *path, *flags]
        if self.name == "deepspeed":
            return [str(tool("deepspeed")), "--num_gpus", n, *port, *path, *flags]
        assert self.name == "horovodrun", self.name
        tool("horovodrun")  # says in one line that it is missing
        # Without --gloo, horovodrun imports PyTorch once more, to find out that there is no MPI.
        return [*PATIENT_HOROVODRUN, "-np", n, sys.executable, *path, *flags]


ONE_PROCESS = Launcher("python")
ZERO_STAGES = [Launcher("deepspeed", 2, zero_stage=stage) for stage in range(4)]
_LAUNCHERS_OWN = ("single", "ddp", "deepspeed", "horovod")
# Backends that are no launcher's own. They are listed from distributed/backends, so that tests cover a new one.
_CHOSEN = [name for name in all_backends() if name not in _LAUNCHERS_OWN]
CHOSEN_ON_TWO, CHOSEN_ON_FOUR = ([Launcher("torchrun", n, backend=name) for name in _CHOSEN] for n in (2, 4))


@dataclass(frozen=True)
class Finished:
    """Exit code (None if the job was killed) and output of a job."""

    returncode: int | None
    output: str  # stdout and stderr, in the order of writing


class Job:
    """One start of a script. Its output goes to a file, because a leftover process would hold a pipe open.

    Args:
        script: The script or module of the training processes; "": the job has none.
    """

    def __init__(
        self, command: Sequence[str], script: str | Path = "", log: Path | None = None, **environment: str
    ) -> None:
        self.command, self.script, self._start = list(command), str(script), time.monotonic()
        self._log = open(log, "w+b") if log else tempfile.TemporaryFile()  # noqa: SIM115
        # Jobs with the same mark count as one: a launch over several machines has a `torchrun` on each.
        self._mark = environment.get(MARK, f"{os.getpid()}-{time.monotonic_ns()}")
        self.process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, **environment, MARK: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def seconds(self) -> float:
        """Seconds since the job was started."""
        return time.monotonic() - self._start

    @property
    def output(self) -> str:
        """What the job has printed so far."""
        descriptor = self._log.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def poll(self) -> int | None:
        """The launcher's exit code once it has ended."""
        return self.process.poll()

    def everything(self) -> list[psutil.Process]:
        """All live processes of the job, by the mark in their environment: launchers put processes into sessions of
        their own."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
        return processes

    def ranks(self) -> list[psutil.Process]:
        """The training processes by rank. Their loader workers, which have the same command line, are left out."""
        candidates: dict[int, tuple[int, int, psutil.Process]] = {}
        for process in self.everything() if self.script else []:
            with contextlib.suppress(psutil.Error, IndexError):
                arguments, environment = process.cmdline(), process.environ()
                if "python" in arguments[0] and any(text.endswith(self.script) for text in arguments[1:3]):
                    names = ("HOROVOD_RANK", "RANK", "OMPI_COMM_WORLD_RANK")
                    rank = int(next((environment[name] for name in names if name in environment), 0))
                    candidates[process.pid] = (rank, process.ppid(), process)
        ranks = {rank: process for rank, parent, process in candidates.values() if parent not in candidates}
        return [ranks[rank] for rank in sorted(ranks)]

    def has_ended(self) -> bool:
        """Whether the launcher and all training processes have ended."""
        return self.poll() is not None and not self.ranks()

    def wait(self, seconds: float = HANG_SECONDS) -> int | None:
        """Wait until the job has ended. Returns the launcher's exit code, or None if that takes longer than
        ``seconds``."""
        deadline = time.monotonic() + seconds
        while not self.has_ended():
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)
        return self.process.returncode

    def stacks(self) -> str:
        """The processes that are still alive, and the end of the job's output with their stack traces."""
        alive = self.everything()
        send(self.ranks(), signal.SIGABRT)  # PYTHONFAULTHANDLER then prints the stacks
        time.sleep(3)
        return "\n".join([*map(str, alive), self.output[-8000:]])

    def kill(self) -> None:
        """Kill every process of the job.

        Raises:
            JobFailed: one cannot be killed.
        """
        deadline = time.monotonic() + _KILL_SECONDS
        while alive := self.everything():
            if time.monotonic() > deadline:
                raise JobFailed(f"cannot be killed: {', '.join(map(str, alive))}")
            send(alive, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.05)
        self.process.wait()


def start(launcher: Launcher, script: str | Path, flags: Sequence[str], launcher_flags: Sequence[str] = ()) -> Job:
    """Start a job."""
    return Job(launcher.command(script, flags, launcher_flags), script, None)


def finish_all(jobs: Sequence[Job], seconds: float) -> list[Finished]:
    """Wait until all jobs have ended, or one has failed, for which the others would wait. Then kill all processes that
    are still alive.

    Raises:
        JobFailed: the jobs took longer than ``seconds``, or a process cannot be killed.
    """
    deadline, ended = time.monotonic() + seconds, list[Job]()
    try:
        while len(ended) < len(jobs) and not any(job.poll() for job in ended):
            if time.monotonic() > deadline:
                print(*(job.stacks() for job in jobs if job.script), sep="\n", file=sys.stderr)
                raise JobFailed(f"took longer than {seconds:.0f} s")
            time.sleep(0.1)
            ended = [job for job in jobs if job.has_ended()]
        codes = [job.poll() for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [Finished(code, job.output) for code, job in zip(codes, jobs, strict=True)]


def finish(job: Job, seconds: float = HANG_SECONDS) -> Finished:
    """`finish_all` for one job."""
    return finish_all([job], seconds)[0]


def run(launcher: Launcher, script: str | Path, flags: Sequence[str]) -> Finished:
    """Start a job and wait for its end."""
    return finish(start(launcher, script, flags))


def wait_until(job: Job, condition: Callable[[], bool], pause: float = 0.1) -> None:
    """Wait until the condition holds. The test fails if the job ends before that, or if the wait takes too long."""
    while not condition():
        if job.poll() is not None or job.seconds > HANG_SECONDS:
            job.kill()
            raise AssertionError(job.output)
        time.sleep(pause)


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def tool(name: str) -> Path:
    """Path of a launcher that is installed in this Python's environment. Raises JobFailed if it is not."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise JobFailed(f"{name} is not installed beside {sys.executable}; `make test` installs every backend")
    return path


def free_port() -> int:
    """A free port, which no other call gets until all of `_PORTS` were used: a job opens it seconds later, while other
    jobs start."""
    with open(Path(tempfile.gettempdir()) / f"tandem-ports-{os.getuid()}", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        number = int(file.read() or 0)
        while True:
            number += 1
            port = _PORTS[number % len(_PORTS)]
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
                break
        file.truncate(0)
        file.write(str(number))
    return port
