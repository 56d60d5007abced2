"""How each launcher starts a script on all machines of a lab, one process on each: the lines of docs/clusters.md."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lab import Lab
from slurm import Slurm

from benchmarks.launching import PATIENT_HOROVODRUN, ROOT, Job, Launcher, tool

#: What has to be installed beside what `make test` installs.
TOOLS = {
    "torchrun": (),
    "deepspeed": ("sshd", "ssh-keygen", "pdsh"),
    "horovodrun": ("sshd", "ssh-keygen"),
    "mpirun": ("sshd", "ssh-keygen", "mpirun"),
    "srun": ("munged", "slurmctld", "slurmd", "srun"),
}


def torchrun(nodes: str | int, *flags: str) -> list[str | Path]:
    """The start of the command line that is the same on all machines."""
    rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "node1:29400", "--rdzv_id", "lab"]
    return [tool("torchrun"), "--nnodes", str(nodes), "--nproc_per_node", "1", *rendezvous, *flags]


def start_on_all(
    lab: Lab, launcher: Launcher, script: str, flags: Sequence[str], slurm: Slurm | None = None, **environment: str
) -> list[Job]:
    """Start a script on all machines. Returns the jobs, of which the first one prints what the root says."""
    hosts, n = [machine.name for machine in lab.machines], len(lab.machines)
    path, python, flags = ROOT / script, sys.executable, [*flags, *launcher.flags]
    slots = ",".join(f"{host}:1" for host in hosts)
    if launcher.name == "torchrun":
        command = [*torchrun(n), path, *flags]
        return [machine.start(command, script, **environment) for machine in lab.machines]
    if launcher.name == "deepspeed":
        hostfile = lab.folder / "hostfile"
        hostfile.write_text("".join(f"{host} slots=1\n" for host in hosts))
        command = [tool("deepspeed"), "--hostfile", hostfile, path, *flags]
    elif launcher.name == "horovodrun":
        command = [*PATIENT_HOROVODRUN, "-np", n, "-H", slots, python, path, *flags]
    elif launcher.name == "mpirun":
        address = ["--allow-run-as-root", "-x", f"MASTER_ADDR={hosts[0]}"]
        command = ["mpirun", *address, "-np", n, "-H", slots, python, path, *flags]
    else:
        assert launcher.name == "srun" and slurm, launcher
        command = ["srun", "--nodes", n, "--ntasks-per-node=1", python, path, *flags]
        environment |= slurm.environment
    return [lab[0].start(command, script, **environment)]
