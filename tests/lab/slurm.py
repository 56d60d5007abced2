"""SLURM on the machines of a lab: munged and slurmd on each, slurmctld on the first."""

from __future__ import annotations

import time
from pathlib import Path

from lab import Lab, Machine
from launching import HANG_SECONDS

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch")
# Requeued jobs wait until the credential of their last start has expired: 2 minutes, where this does not say less.
CONFIGURATION = """
ClusterName=lab
SlurmctldHost=node1
SlurmUser=root
AuthInfo=socket=/run/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
JobRequeue=1
ReturnToService=2
SlurmdTimeout=10
InactiveLimit=0
NodeName=node[1-{machines}] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


class Slurm:
    """A cluster of all machines of a lab."""

    def __init__(self, lab: Lab) -> None:
        self._head, folder = lab[0], lab.folder / "slurm"
        (folder / "state").mkdir(parents=True)
        (folder / "munge.key").write_bytes(bytes(range(128)))
        (folder / "munge.key").chmod(0o600)
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        text = CONFIGURATION.format(folder=folder, machines=len(lab.machines))
        Path(self.environment["SLURM_CONF"]).write_text(text)
        for machine in lab.machines:
            self._serve_munge(machine, folder / "munge.key")
        lab[0].serve("slurmctld", "-D", **self.environment)
        for machine in lab.machines:
            machine.serve("slurmd", "-D", "-N", machine.name, **self.environment)
        self.wait_for("sinfo", "--noheader", "--format=%T", until="idle")

    def _serve_munge(self, machine: Machine, key: Path) -> None:
        names = {
            "socket": "munge.socket",
            "pid-file": "munged.pid",
            "log-file": "munged.log",
            "seed-file": "munged.seed",
        }
        paths = [f"--{flag}=/run/{name}" for flag, name in names.items()]
        machine.serve("munged", "--foreground", "--force", f"--key-file={key}", *paths)

    def run(self, *command: str | Path) -> str:
        """Run a command of SLURM on the first machine; returns what it prints."""
        return self._head.run("env", *(f"{name}={value}" for name, value in self.environment.items()), *command)

    def wait_for(self, *command: str, until: str) -> None:
        """Wait until a command prints this text and nothing else."""
        deadline, said = time.monotonic() + HANG_SECONDS, ""
        while said.strip() != until:
            assert time.monotonic() < deadline, f"{command} still says {said!r}"
            time.sleep(0.2)
            try:
                said = self.run(*command)
            except AssertionError as error:  # slurmctld does not answer yet
                said = str(error)
