"""Starts on machines of a lab (tests/lab), and what torture.py does to them there."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from lab import Lab
from launches import start_on_all
from torture_checks import Lost
from torture_plan import Blow, Spread

from benchmarks.launching import MARK, Job, send

TOOLS = ("sshd", "ssh-keygen", "pdsh", "mpirun")
# Nobody has to end within these seconds, but nothing may take longer: TCP gives up after about 2 minutes, a start that
# lacks a process after 3, and what it leaves behind has the same time again.
END_SECONDS = 1200.0
# How long launchers wait for processes that were asked to end or that have not come; longer than TCP.
PATIENCE = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "180", "HOROVOD_GLOO_TIMEOUT_SECONDS": "180"}


class SpreadJob:
    """One start of a script on machines of its own, which end with it. Used like a `Job`."""

    def __init__(self, launcher: Spread, script: str, flags: Sequence[str], log: Path) -> None:
        self.command = [str(launcher), *flags]
        self._log, folder = log, log.with_suffix("")
        folder.mkdir()
        self.lab = Lab(folder, machines=launcher.machines)
        try:
            self._jobs = self._start(launcher, script, flags, folder)
        except BaseException:
            self.lab.close()
            raise

    def _start(self, launcher: Spread, script: str, flags: Sequence[str], folder: Path) -> list[Job]:
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        environment = {**launcher.environment, **PATIENCE, "TMPDIR": str(folder), MARK: mark}
        for machine in self.lab.machines:  # as docs/clusters.md says: TCP gives up after 2 minutes, not 16
            machine.run("sysctl", "-q", "-w", "net.ipv4.tcp_retries2=8")
        if launcher.machines == 1:
            return [self.lab[0].start(launcher.command(script, flags), script, **environment)]
        self.lab.start_sshd()
        return start_on_all(self.lab, launcher, script, flags, **environment)

    @property
    def seconds(self) -> float:
        return self._jobs[0].seconds

    @property
    def output(self) -> str:
        return "".join(job.output for job in self._jobs)

    def poll(self) -> int | None:
        return self._jobs[0].poll()

    def ranks(self) -> list[psutil.Process]:
        return self._jobs[0].ranks()  # of all machines, because all jobs have the same mark

    def stacks(self) -> str:
        return self._jobs[0].stacks()

    def wait(self) -> int | None:
        """Wait until all launchers and processes have ended. Returns the exit code of the first launcher.

        Raises:
            Lost: something is left on a machine.
        """
        if not self._becomes_true(lambda: all(job.poll() is not None for job in self._jobs) and not self.ranks()):
            return None
        if not self._becomes_true(lambda: not self._left()):
            raise Lost(f"left on the machines: {self._left()}\n{self.output[-3000:]}")
        return self.poll()

    def kill(self) -> None:
        """End the machines, and keep what the job has printed."""
        self._log.write_text(self.output)
        self.lab.close()
        for job in self._jobs:
            job.kill()

    def _left(self) -> list[str]:
        """What runs on the machines, apart from their own first process and sshd."""
        machines, found = {}, []
        for machine in self.lab.machines:
            with contextlib.suppress(OSError):  # it has died
                machines[os.readlink(f"/proc/{machine.pid}/ns/pid")] = machine
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                machine = machines.get(os.readlink(f"/proc/{process.pid}/ns/pid"))
                is_ours = process.pid == machine.pid or process.name() in ("sleep", "sshd") if machine else True
                if machine and not is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{machine.name}: {' '.join(process.cmdline())[:200]}")
        return found

    def strike(self, blow: Blow, ranks: Sequence[psutil.Process]) -> None:
        machine = self.lab[blow.machine % len(self.lab.machines)]
        if blow.victims == "machine":
            machine.end()
        elif blow.victims == "power":
            machine.die()
        elif blow.victims == "link":
            machine.cut()
            self._wait_to_restore(blow, 0)
            machine.mend()
        else:
            launcher = psutil.Process(self._jobs[blow.machine % len(self._jobs)].process.pid).children()  # of nsenter
            victims = {"root": ranks[:1], "last": ranks[-1:], "launcher": launcher}[blow.victims]
            send(victims, blow.signal)
            if blow.signal == signal.SIGSTOP:
                self._wait_to_restore(blow, 1)
                entered = [psutil.Process(job.process.pid) for job in self._jobs]  # nsenter stops with its child
                send([*victims, *entered], signal.SIGCONT)

    def _wait_to_restore(self, blow: Blow, left: int) -> None:
        """Wait until the link or the process is to be set going again: at the latest when so few processes are left."""
        seconds = END_SECONDS if blow.restored_after is None else blow.restored_after
        self._becomes_true(lambda: len(self.ranks()) <= left, seconds)

    def _becomes_true(self, condition: Callable[[], bool], seconds: float = END_SECONDS) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True
