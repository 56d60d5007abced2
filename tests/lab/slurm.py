"""SLURM on the machines of a lab: munged and slurmd on each, slurmctld on the first."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lab import Lab, Machine

from benchmarks.launching import ENVIRONMENT, wait_until

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
        configuration = folder / "slurm.conf"
        configuration.write_text(CONFIGURATION.format(folder=folder, machines=len(lab.machines)))
        self.environment = {"SLURM_CONF": str(configuration)}
        for machine in lab.machines:
            self._serve_munge(machine, folder / "munge.key")
        self.controller = lab[0].serve("slurmctld", "-D", **self.environment)
        for machine in lab.machines:
            machine.serve("slurmd", "-D", "-N", machine.name, **self.environment)
        wait_until(self.controller, self._is_ready)

    def _serve_munge(self, machine: Machine, key: Path) -> None:
        names = {"socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
        paths = [f"--{flag}=/run/{name}" for flag, name in names.items()]
        machine.serve("munged", "--foreground", "--force", f"--key-file={key}", *paths)

    def _is_ready(self) -> bool:
        with contextlib.suppress(AssertionError):  # slurmctld does not answer yet
            return self.run("sinfo", "--noheader", "--format=%T").split() == ["idle"]
        return False

    def run(self, *command: str | Path) -> str:
        """Run a command of SLURM on the first machine; returns what it prints."""
        environment = {**ENVIRONMENT, **self.environment}  # sbatch hands it on to the job
        return self._head.run("env", *(f"{name}={value}" for name, value in environment.items()), *command)

    def job(self, number: int) -> str:
        """All that SLURM says of a job, such as ``JobState=RUNNING``."""
        return self.run("scontrol", "show", "--oneliner", "job", str(number))
