"""Jobs that scripts/torture.py starts through the real launchers, and all of whose processes it can find and end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
MARK = "TANDEM_TORTURE"  # in the environment of every process that is started here


@dataclass(frozen=True)
class Launcher:
    name: str
    processes: int = 1
    zero_stage: int = 0  # of deepspeed

    def __str__(self) -> str:
        stage = f" ZeRO {self.zero_stage}" if self.name == "deepspeed" else ""
        return f"{self.name}{stage} x{self.processes}"

    def command(self, flags: Sequence[str]) -> list[str]:
        script, count, port = [str(ROOT / "train_vae.py"), *flags], str(self.processes), str(free_port())
        if self.name == "python":
            return [sys.executable, *script]
        start = str(tool(self.name))
        if self.name == "torchrun":
            return [start, "--nproc_per_node", count, "--master_port", port, *script]
        if self.name == "deepspeed":
            stage = ["--zero_stage", str(self.zero_stage)]
            return [start, "--num_gpus", count, "--master_port", port, *script, *stage]
        return [start, "-np", count, sys.executable, *script]


class Job:
    """One start. Its output goes to a file, so that a process that is left over holds no pipe open."""

    def __init__(self, launcher: Launcher, flags: Sequence[str], log: Path) -> None:
        self.command = launcher.command(flags)
        self._log, self._mark, self._began = log, f"{os.getpid()}-{time.monotonic_ns()}", time.monotonic()
        # One thread per process: sums must not depend on how many cores are free.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", MARK: self._mark}
        # What killed processes leave in the temporary folder goes with the log's.
        environment |= {"TMPDIR": str(log.parent), "PYTHONFAULTHANDLER": "1"}
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self._began

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

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
                if "python" in arguments[0] and any(text.endswith("train_vae.py") for text in arguments[1:3]):
                    rank = int(environment.get("HOROVOD_RANK", environment.get("RANK", 0)))
                    found[process.pid] = (rank, process.ppid(), process)
        ranks = {rank: process for rank, parent, process in found.values() if parent not in found}
        return [ranks[rank] for rank in sorted(ranks)]

    def wait(self, seconds: float) -> int | None:
        """Exit code of the launcher once no training process is left either; None if that takes longer."""
        deadline = time.monotonic() + seconds
        while not self.ended or self.ranks():
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)
        return self.process.returncode

    def stacks(self) -> str:
        """Who is still there, and the end of a log to which the training processes have added where they stand."""
        left = self.everything()
        send(self.ranks(), signal.SIGABRT)  # PYTHONFAULTHANDLER
        time.sleep(3)
        return "\n".join([*map(str, left), self.log[-8000:]])

    def kill(self) -> None:
        """Nothing of it stays."""
        while left := self.everything():
            send(left, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.05)
        self.process.wait()


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def tool(name: str) -> Path:
    """A launcher of this Python's environment."""
    return Path(sys.executable).parent / name


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
