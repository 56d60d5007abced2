"""Machines for tests: on one computer, each with its own network card, host name, processes and part of the disk.

    with Lab(folder, machines=2) as lab:
        job = lab[0].start(["torchrun", "--nnodes", "2", ...], "train_vae.py")
        lab[1].die()

A machine is a set of Linux namespaces: net, uts, pid, mount and ipc. Its `eth0` is plugged into a switch, which is a
bridge in a network namespace of its own, so that nothing of the computer's own network changes. Only root can make
namespaces, and iproute2 and util-linux have to be installed; `missing` says what is not there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.launching import ENVIRONMENT, HANG_SECONDS, MARK, ROOT, Job

NETWORK = "10.77.0"
# A namespace ends with its first process, and that process with the tests: `setpriv` sees to it.
UNTIL_WE_END = ["setpriv", "--pdeathsig", "KILL", "unshare"]
# The first process of a machine has to wait for those whose parent has ended.
FIRST_PROCESS = ["bash", "-c", "while sleep 5; do :; done"]
SSH_CONFIG = """
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
ServerAliveInterval 10
SendEnv {variables}
"""
SSHD_CONFIG = """
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
AcceptEnv *
"""


def missing(*tools: str) -> str | None:
    """What this computer lacks for a lab, and for these programs or devices in it; None if nothing."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    needed = ("ip", "unshare", "nsenter", "setpriv", *tools)
    if absent := [tool for tool in needed if not shutil.which(tool) and not Path(tool).is_absolute()]:
        return f"not installed: {', '.join(absent)}"
    if absent := [tool for tool in tools if Path(tool).is_absolute() and not Path(tool).exists()]:
        return f"no {', '.join(absent)}"
    kinds = ["--net", "--uts", "--pid", "--ipc", "--mount", "--fork"]
    network = "ip link add switch type bridge && ip link add one type veth peer name other"
    probe = subprocess.run(["unshare", *kinds, "sh", "-c", network], capture_output=True)
    return "this kernel or container makes no namespaces or bridges" if probe.returncode else None


class Namespaces:
    """Some namespaces, which end with the process that is held in them."""

    def __init__(self, *kinds: str, name: str, first: Sequence[str] = ("sleep", "infinity")) -> None:
        self.name = name
        fork = ["--fork", "--kill-child", "--mount-proc"] if "pid" in kinds else []
        self._holder = subprocess.Popen([*UNTIL_WE_END, *(f"--{kind}" for kind in kinds), *fork, *first])
        self._enter = ["nsenter", *(f"--{kind}" for kind in kinds)]
        while not (pid := self._first_process(bool(fork), first[0])):
            assert self._holder.poll() is None, f"cannot make the namespaces of {name}"
            time.sleep(0.01)
        #: Of the first process inside, as everybody else sees it.
        self.pid = pid

    def _first_process(self, is_child: bool, name: str) -> int | None:
        """Its id, once it runs and everything is unshared."""
        pid = self._holder.pid
        with contextlib.suppress(OSError, ValueError):
            if is_child:
                pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                return pid
        return None

    def command(self, *command: str | Path) -> list[str]:
        """The command line that runs a command inside."""
        return [*self._enter, "--target", str(self.pid), f"--wd={ROOT}", "--", *map(str, command)]

    def run(self, *command: str | Path) -> str:
        """Run a command inside; returns what it printed. The test fails if the command does."""
        done = subprocess.run(self.command(*command), capture_output=True, text=True, timeout=HANG_SECONDS)
        assert done.returncode == 0, f"{self.name}: {command}: {done.stdout}{done.stderr}"
        return done.stdout

    def end(self) -> None:
        """Kill everything inside."""
        self._holder.kill()
        self._holder.wait()


class Machine(Namespaces):
    """One machine of a lab."""

    def __init__(self, lab: Lab, number: int) -> None:
        super().__init__("net", "uts", "pid", "ipc", "mount", name=f"node{number}", first=FIRST_PROCESS)
        self.address = f"{NETWORK}.{number}"
        self._lab = lab
        self.services: list[Job] = []
        self.run("hostname", self.name)
        for private in ("/run", "/dev/shm"):
            self.run("mount", "-t", "tmpfs", "lab", private)
        self.run("ip", "link", "set", "lo", "up")
        lab.plug_in(self)
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def start(
        self, command: Sequence[str | Path], script: str = "", log: Path | None = None, **environment: str
    ) -> Job:
        """Start a job, or a service, on this machine."""
        return Job(self.command(*command), script, log, **environment)

    def serve(self, *command: str | Path, **environment: str) -> Job:
        """Start a program that runs until the machine ends."""
        self.services.append(self.start(command, **environment))
        return self.services[-1]

    def hide(self, path: Path, content: Path) -> None:
        """From now on this machine sees its own ``content`` at ``path``."""
        self.run("mount", "--bind", content, path)

    def cut(self) -> None:
        """Pull the cable: packets vanish, and nobody is told."""
        self._lab.switch.run("ip", "link", "set", self.name, "down")

    def mend(self) -> None:
        """Plug the cable in again."""
        self._lab.switch.run("ip", "link", "set", self.name, "up")

    def end(self) -> None:
        super().end()
        for service in self.services:
            service.process.wait()

    def die(self) -> None:
        """The power fails: the link goes first, so that no other machine hears that connections end."""
        self.cut()
        self.end()


class Lab:
    """Machines at one switch: node1, node2, ... A context manager.

    Args:
        folder: Empty; all machines see it.
        hosts: More lines of each machine's /etc/hosts, in front of the others; ``{name}`` stands for its own name.
    """

    def __init__(self, folder: Path, machines: int = 2, hosts: str = "") -> None:
        self.folder, self._hosts = folder, hosts
        self.machines: list[Machine] = []
        self.switch = Namespaces("net", name="switch")
        try:
            self.switch.run("ip", "link", "add", "switch", "type", "bridge")
            self.switch.run("ip", "link", "set", "switch", "up")
            for number in range(1, machines + 1):
                self.machines.append(Machine(self, number))
            for machine in self.machines:
                self._introduce(machine)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, index: int) -> Machine:
        return self.machines[index]

    def close(self) -> None:
        for machine in self.machines:
            machine.end()
        self.switch.end()

    def plug_in(self, machine: Machine) -> None:
        """Connect a machine's eth0 with a port of the switch."""
        veth = f"ip link add {machine.name} type veth peer name eth0 netns {machine.pid}"
        self.switch.run(*veth.split())
        self.switch.run("ip", "link", "set", machine.name, "master", "switch", "up")

    def _introduce(self, machine: Machine) -> None:
        """Give a machine its /etc/hosts."""
        path = self.folder / f"hosts.{machine.name}"
        named = [f"{other.address} {other.name}" for other in self.machines]
        own = [line for line in self._hosts.format(name=machine.name).splitlines() if line]
        path.write_text("\n".join([*own, "127.0.0.1 localhost", *named, ""]))
        machine.hide(Path("/etc/hosts"), path)

    def start_sshd(self) -> None:
        """From now on root may go from every machine to every other one without a password."""
        keys = self.folder / "ssh"
        keys.mkdir()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / "key"], check=True)
        variables = " ".join([MARK, "TMPDIR", *ENVIRONMENT])
        (keys / "config").write_text(SSH_CONFIG.format(variables=variables) + f"IdentityFile {keys}/key\n")
        (keys / "sshd_config").write_text(SSHD_CONFIG.format(folder=keys))
        for machine in self.machines:
            machine.run("mkdir", "-p", "/run/sshd")
            machine.run("mount", "-t", "tmpfs", "lab", "/etc/ssh/ssh_config.d")
            machine.run("cp", keys / "config", "/etc/ssh/ssh_config.d/lab.conf")
            machine.serve("/usr/sbin/sshd", "-D", "-e", "-f", keys / "sshd_config")
