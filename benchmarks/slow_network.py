"""Two machines on a slow network, made of Linux namespaces by tests/lab: 1 Gbit/s, and 2 ms there and back."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .launching import PATIENT_HOROVODRUN, ROOT, Launcher, free_port, tool

_MTU = 9000  # bytes; with the usual 1500, moving the packets would take most of a core


class SlowNetwork:
    """Where jobs run whose processes are shared out over two machines.

    Args:
        lab: `tests.lab.lab.Lab` of two machines that reach one another by ssh.
    """

    def __init__(self, lab: Any) -> None:
        self._lab = lab

    def commands(self, launcher: Launcher, worker: list[str]) -> list[list[str]]:
        """Command lines that start a job of this Python's arguments ``worker``."""
        share, python = str(launcher.processes // 2), sys.executable
        if launcher.name == "horovodrun":
            hosts = ",".join(f"{machine.name}:{share}" for machine in self._lab.machines)
            tool("horovodrun")  # says in one line that it is missing
            started = [*PATIENT_HOROVODRUN, "-np", str(launcher.processes), "-H", hosts, python, *worker]
            return [self._lab[0].command(*started)]
        rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"node1:{free_port()}", "--rdzv_id", "benchmark"]
        torchrun = [tool("torchrun"), "--nnodes", "2", "--nproc_per_node", share, *rendezvous]
        return [machine.command(*torchrun, *worker) for machine in self._lab.machines]


@contextlib.contextmanager
def slow_network() -> Iterator[SlowNetwork]:
    """A context with the network. Raises OSError, in one line, where it cannot be made."""
    sys.path.insert(0, str(ROOT / "tests" / "lab"))
    from lab import Lab, Link, missing

    if lacks := missing("/dev/net/tun", "sshd", "ssh-keygen"):
        raise OSError(f"two machines cannot be made here: {lacks}")
    with (
        tempfile.TemporaryDirectory(prefix="tandem-lab-") as folder,
        Lab(
            Path(folder),
            link=Link(delay_ms=0.5, mbit_per_second=1000),  # a packet passes two links
        ) as lab,
    ):
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        for machine in lab.machines:
            machine.run("ip", "link", "set", "eth0", "mtu", _MTU)
            lab.switch.run("ip", "link", "set", machine.name, "mtu", _MTU)
        lab.start_sshd()
        yield SlowNetwork(lab)
