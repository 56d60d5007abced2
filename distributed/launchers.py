"""Which launcher started this process, and with which rank: read from the environment, before PyTorch is imported.

Sources: torchrun (pytorch.org, "Environment Variables"), DeepSpeed ``launcher/launch.py``, Horovod
``runner/gloo_run.py``, SLURM ``srun`` ("OUTPUT ENVIRONMENT VARIABLES") and Open MPI (``OMPI_COMM_WORLD_*``).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import UserMistake

DEFAULT_MASTER_PORT = 29500
_PORTS_BETWEEN_STEPS = 1009  # of one job, so that a step seldom has the port of a neighbouring job


@dataclass(frozen=True)
class Launch:
    """This process's place among all processes, according to its launcher."""

    launcher: str  # "horovodrun", "deepspeed", "torchrun", "srun", "mpirun" or "python"
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    master_address: str = "127.0.0.1"
    master_port: int | None = None  # None: the launcher sets none
    is_restart: bool = False  # the launcher started the processes again after some had failed
    #: Identifies the launch: its processes share this text, and other launches have others; "" if the launcher sets
    #: no variable for it.
    job: str = ""

    @property
    def is_root(self) -> bool:
        return self.rank == 0


def detect(environ: Mapping[str, str] | None = None) -> Launch:
    """The launch that the environment describes; plain ``python`` if it describes none.

    Raises:
        UserMistake: some of a launcher's variables are missing (one line that names one of them).
    """
    env = os.environ if environ is None else environ
    if "HOROVOD_RANK" in env or "HOROVOD_SIZE" in env:
        return Launch("horovodrun", *_read_ranks(env, "HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_SIZE"))
    # Some job scripts export only WORLD_SIZE, so WORLD_SIZE alone does not show torchrun.
    if "RANK" in env or ("WORLD_SIZE" in env and "LOCAL_RANK" in env):
        # The deepspeed launcher sets torchrun's variables and two of its own.
        is_deepspeed = "CROSS_RANK" in env and "LOCAL_SIZE" in env and "TORCHELASTIC_RUN_ID" not in env
        launcher = "deepspeed" if is_deepspeed else "torchrun"
        ranks = _read_ranks(env, "RANK", "LOCAL_RANK", "WORLD_SIZE")
        return Launch(launcher, *ranks, *_read_master(env), _is_restart(env))
    # Test for mpirun before srun: mpirun starts its daemons with srun, so its processes inherit srun's variables.
    if _read_integer(env, "OMPI_COMM_WORLD_SIZE", 1) > 1:
        if "MASTER_ADDR" not in env and env.get("OMPI_COMM_WORLD_LOCAL_SIZE") != env["OMPI_COMM_WORLD_SIZE"]:
            raise UserMistake(
                "mpirun started this on several machines without MASTER_ADDR; add `-x MASTER_ADDR=<first host>`"
            )
        names = (f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE"))
        return Launch("mpirun", *_read_ranks(env, *names), *_read_master(env), job=env.get("PMIX_NAMESPACE", ""))
    # SLURM_PROCID alone does not show srun: SLURM also sets it in a batch script, which is one process.
    if _read_integer(env, "SLURM_STEP_NUM_TASKS", 1) > 1:
        ranks = _read_ranks(env, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
        host = env.get("MASTER_ADDR") or first_slurm_host(env.get("SLURM_STEP_NODELIST", ""))
        # From the numbers of job and step, because two of them on one node need different ports.
        job, step = (_read_integer(env, f"SLURM_{name}_ID", 0) for name in ("JOB", "STEP"))
        port = _read_integer(env, "MASTER_PORT", 20000 + (job + _PORTS_BETWEEN_STEPS * step) % 20000)
        return Launch("srun", *ranks, host, port, _is_restart(env), f"{job}.{step}")
    return Launch("python", is_restart=_is_restart(env))


def _read_ranks(env: Mapping[str, str], rank: str, local_rank: str, world_size: str) -> tuple[int, int, int]:
    return _read_integer(env, rank), _read_integer(env, local_rank, 0), _read_integer(env, world_size)


def _read_master(env: Mapping[str, str]) -> tuple[str, int]:
    return env.get("MASTER_ADDR", "127.0.0.1"), _read_integer(env, "MASTER_PORT", DEFAULT_MASTER_PORT)


def _is_restart(env: Mapping[str, str]) -> bool:
    """Whether torchrun has started the processes again, or SLURM has requeued the job."""
    return any(_read_integer(env, f"{launcher}_RESTART_COUNT", 0) > 0 for launcher in ("TORCHELASTIC", "SLURM"))


def torchrun_id() -> str | None:
    """A text that identifies the torchrun that started this process, the same after its restarts; None if no torchrun
    did. (Several launches may have the same --rdzv_id.)"""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with contextlib.suppress(OSError, IndexError):  # not Linux, or the launcher has ended
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            launcher_pid = os.getppid()
            ticks = Path(f"/proc/{launcher_pid}/stat").read_text().rpartition(")")[2].split()[19]  # proc(5): starttime
            return f"{socket.gethostname()}/{boot_id}/{launcher_pid}/{ticks}/{os.environ['TORCHELASTIC_RUN_ID']}"
    return None


def first_slurm_host(nodelist: str) -> str:
    """``"gpu[03-05,9]-ib,cpu1"`` -> ``"gpu03-ib"``: the host of task 0 in SLURM's compressed list."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    host = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match.group() if match else "")
    return host or "127.0.0.1"


def _read_integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in env:
        if default is not None:
            return default
        raise UserMistake(f"the launcher did not set {name}; start the script with torchrun, srun or mpirun")
    try:
        return int(env[name])
    except ValueError:
        raise UserMistake(f"{name}={env[name]!r} in the environment is not a number") from None
