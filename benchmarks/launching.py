"""Start real processes through the real launchers, each job with a mark by which all its processes are found and ended.

No outcome depends on how fast the machine is: ``HANG_SECONDS`` only ends jobs that would never end.
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


#: For jobs that are no tests, such as those of `make bench`: as somebody starts them, with the OMP_NUM_THREADS that is
#: set, and without tests/launch/startup, which changes when Python collects garbage. But launchers are as patient as in
#: tests (ENVIRONMENT), so that a slow start or end fails no measurement.
AS_A_USER = {
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
}


# DeepSpeed has functions of Muon compiled when it wraps a model. Nothing here uses them, and importing the compiler is
# half of a start.
WITHOUT_COMPILER = {"TORCHDYNAMO_DISABLE": "1"}


_KILL_SECONDS = 300.0  # after which a process that was killed is still there, as one does that a disk holds up
_PORTS = range(10_000, 32_000)  # below those that the system hands out by itself


class JobFailed(RuntimeError):
    """A job gave no result; the text says why in one line."""


@dataclass(frozen=True)
class Launcher:
    """A way to start a script, e.g. ``Launcher("deepspeed", 2, zero_stage=3)``."""

    name: str
    processes: int = 1
    zero_stage: int | None = None
    backend: str | None = None  # if it is not the one that the launcher stands for

    def __str__(self) -> str:
        stage = "" if self.zero_stage is None else f"-zero{self.zero_stage}"
        return f"{self.name}{stage}{f'-{self.backend}' if self.backend else ''}-x{self.processes}"

    @property
    def of_job(self) -> Launcher:
        """The same launcher without the ZeRO stage, of which several may follow one another in a job."""
        return replace(self, zero_stage=None)

    @property
    def bare(self) -> Launcher:
        """The same launcher without what flags of the script say."""
        return replace(self, zero_stage=None, backend=None)

    @property
    def flags(self) -> list[str]:
        """Flags of the script that belong to it."""
        stage = [] if self.zero_stage is None else ["--zero_stage", str(self.zero_stage)]
        return [*stage, *(["--distributed_backend", self.backend] if self.backend else [])]

    @property
    def environment(self) -> dict[str, str]:
        return WITHOUT_COMPILER if self.name == "deepspeed" else {}

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
        # Where --gloo does not say so, horovodrun imports PyTorch once more, to find out that there is no MPI.
        return [*PATIENT_HOROVODRUN, "-np", n, sys.executable, *path, *flags]


ONE_PROCESS = Launcher("python")
ZERO_STAGES = [Launcher("deepspeed", 2, zero_stage=stage) for stage in range(4)]
_OF_LAUNCHERS = ("single", "ddp", "deepspeed", "horovod")
# Backends that no launcher stands for. They are found by listing: what is added to distributed/backends is tested.
CHOSEN = [
    Launcher("torchrun", processes, backend=name)
    for name in all_backends()
    if name not in _OF_LAUNCHERS
    for processes in (2, 4)
]
CHOSEN_ON_TWO, CHOSEN_ON_FOUR = ([each for each in CHOSEN if each.processes == n] for n in (2, 4))


@dataclass(frozen=True)
class Finished:
    """What a job left behind. One that was killed has no exit code."""

    returncode: int | None
    output: str  # stdout and stderr, in the order of writing


class Job:
    """One start of a script. Its output goes to a file, so that a process that is left over holds no pipe open.

    Args:
        script: With which the training processes are started; "": the job has none.
    """

    def __init__(
        self, command: Sequence[str], script: str | Path = "", log: Path | None = None, **environment: str
    ) -> None:
        self.command, self.script, self._began = list(command), str(script), time.monotonic()
        self._log = open(log, "w+b") if log else tempfile.TemporaryFile()  # noqa: SIM115
        # Jobs that are given the same mark count as one: `torchrun` is a job of its own on every machine.
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
        return time.monotonic() - self._began

    @property
    def output(self) -> str:
        """What the job has printed so far."""
        descriptor = self._log.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def poll(self) -> int | None:
        """The launcher's exit code once it has ended."""
        return self.process.poll()

    def everything(self) -> list[psutil.Process]:
        """All live processes of the job, found by the mark in their environment, because launchers put processes into
        sessions of their own."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        """The training processes by rank. Loader workers, which look the same but are their children, are left out."""
        found: dict[int, tuple[int, int, psutil.Process]] = {}
        for process in self.everything() if self.script else []:
            with contextlib.suppress(psutil.Error, IndexError):
                arguments, environment = process.cmdline(), process.environ()
                if "python" in arguments[0] and any(text.endswith(self.script) for text in arguments[1:3]):
                    names = ("HOROVOD_RANK", "RANK", "OMPI_COMM_WORLD_RANK")
                    rank = int(next((environment[name] for name in names if name in environment), 0))
                    found[process.pid] = (rank, process.ppid(), process)
        ranks = {rank: process for rank, parent, process in found.values() if parent not in found}
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
        left = self.everything()
        send(self.ranks(), signal.SIGABRT)  # PYTHONFAULTHANDLER then prints the stacks
        time.sleep(3)
        return "\n".join([*map(str, left), self.output[-8000:]])

    def kill(self) -> None:
        """Kill every process of the job.

        Raises:
            JobFailed: one cannot be killed.
        """
        deadline = time.monotonic() + _KILL_SECONDS
        while left := self.everything():
            if time.monotonic() > deadline:
                raise JobFailed(f"cannot be killed: {', '.join(map(str, left))}")
            send(left, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.05)
        self.process.wait()


def start(launcher: Launcher, script: str | Path, flags: Sequence[str], launcher_flags: Sequence[str] = ()) -> Job:
    """Start a job."""
    return Job(launcher.command(script, flags, launcher_flags), script, None, **launcher.environment)


def finish_all(jobs: Sequence[Job], seconds: float) -> list[Finished]:
    """Wait until all jobs have ended, or one has failed, for which the others would wait. What is left is killed.

    Raises:
        JobFailed: that takes longer than ``seconds``; or what is left cannot be killed.
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
    """A port that nothing uses, and that no other call is given before all of `_PORTS` were: a job uses it seconds
    later, while others start beside it."""
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
