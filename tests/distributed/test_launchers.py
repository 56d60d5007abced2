"""Which launcher started this process: the variables that each launcher really sets."""

from __future__ import annotations

import os
import re

import pytest

from tandem.distributed import Launch, UserMistake, detect
from tandem.distributed.launchers import first_slurm_host, torchrun_id
from tests.data.helpers import one_line
from tests.processes import python

TORCHRUN = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
HOROVODRUN = {
    "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "41234", "SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_STEP_ID": "0",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "1575747585",
}  # fmt: skip


def without(environ: dict[str, str], removed: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name != removed}


BATCH_SCRIPT = {**without(SRUN, "SLURM_STEP_NUM_TASKS"), "SLURM_PROCID": "0"}  # SLURM numbers it, yet it is alone
SEVERAL_MACHINES = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


LAUNCHES = {
    "empty": ({}, Launch("python", rank=0, local_rank=0, world_size=1, master_port=None)),
    "torchrun": (TORCHRUN, Launch("torchrun", 5, 1, 8, "node0", 29400)),
    "torchrun inside deepspeed": ({**DEEPSPEED, **TORCHRUN}, Launch("torchrun", 5, 1, 8, "node0", 29400)),
    "torchrun started by srun": ({**SRUN, **TORCHRUN}, Launch("torchrun", 5, 1, 8, "node0", 29400)),
    "deepspeed": (DEEPSPEED, Launch("deepspeed", 1, 1, 2, "127.0.0.1", 29500)),
    "no CROSS_RANK": (without(DEEPSPEED, "CROSS_RANK"), Launch("torchrun", 1, 1, 2, "127.0.0.1", 29500)),
    "no LOCAL_SIZE": (without(DEEPSPEED, "LOCAL_SIZE"), Launch("torchrun", 1, 1, 2, "127.0.0.1", 29500)),
    "horovodrun inside others": ({**TORCHRUN, **SRUN, **HOROVODRUN}, Launch("horovodrun", 3, 1, 4)),
    "srun": (SRUN, Launch("srun", 6, 2, 8, "gpu03", 21234, job="41234.0")),  # 20000 + 41234 modulo 20000
    "srun, other job": (
        {**SRUN, "SLURM_JOB_ID": "41235"}, Launch("srun", 6, 2, 8, "gpu03", 21235, job="41235.0")
    ),
    "srun, other step": ({**SRUN, "SLURM_STEP_ID": "2"}, Launch("srun", 6, 2, 8, "gpu03", 23252, job="41234.2")),
    "srun, exported address": (
        {**SRUN, "MASTER_ADDR": "gpu03.ib", "MASTER_PORT": "12345"},
        Launch("srun", 6, 2, 8, "gpu03.ib", 12345, job="41234.0"),
    ),
    "srun, exported world size": (
        {**SRUN, "WORLD_SIZE": "8"}, Launch("srun", 6, 2, 8, "gpu03", 21234, job="41234.0")
    ),
    "batch script": (BATCH_SCRIPT, Launch("python")),
    "step of one task": ({**BATCH_SCRIPT, "SLURM_STEP_NUM_TASKS": "1"}, Launch("python")),
    "mpirun": (MPIRUN, Launch("mpirun", 3, 1, 4, "127.0.0.1", 29500, job="1575747585")),
    "mpirun, two machines": (
        {**SEVERAL_MACHINES, "MASTER_ADDR": "node0"}, Launch("mpirun", 3, 1, 4, "node0", 29500, job="1575747585")
    ),
    # On several nodes mpirun starts its daemons with srun, whose variables the ranks inherit: one task per node.
    "mpirun inside SLURM": (
        {**SRUN, **MPIRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "MASTER_ADDR": "gpu03"},
        Launch("mpirun", 3, 1, 4, "gpu03", 29500, job="1575747585"),
    ),
    "restarted": ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}, Launch("torchrun", 5, 1, 8, "node0", 29400, True)),
    "never restarted": ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "0"}, Launch("torchrun", 5, 1, 8, "node0", 29400)),
    "srun, requeued": (
        {**SRUN, "SLURM_RESTART_COUNT": "1"}, Launch("srun", 6, 2, 8, "gpu03", 21234, True, "41234.0")
    ),
    "batch script, requeued": ({"SLURM_RESTART_COUNT": "1"}, Launch("python", is_restart=True)),
}  # fmt: skip


@pytest.mark.parametrize("case", LAUNCHES)
def test_the_launch_that_an_environment_describes(case: str) -> None:
    environ, launch = LAUNCHES[case]
    assert detect(environ) == launch and launch.is_root == (launch.rank == 0)


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [("gpu7", "gpu7"), ("gpu7,gpu9", "gpu7"), ("gpu[03-05,9],cpu1", "gpu03"), ("gpu[12,14]", "gpu12"),
     ("a-b-[007-010]", "a-b-007"), ("login1,gpu[1-2]", "login1"), ("rack[1-2]node[3-4]", "rack1node3"),
     ("gpu[03-05]-ib", "gpu03-ib"), ("", "127.0.0.1")],
)  # fmt: skip
def test_first_host_of_a_compressed_nodelist(nodelist: str, first: str) -> None:
    assert first_slurm_host(nodelist) == first


def test_a_torchrun_is_known_by_its_process_and_not_by_its_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert torchrun_id() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    ours = torchrun_id()
    assert ours == torchrun_id() and ours is not None
    # A second process of the same parent is of the same torchrun; a process of another parent is of another one.
    code = "import os; from tandem.distributed.launchers import torchrun_id as id; print(id(), os.getppid())"
    said = [python(code).stdout.split() for _ in "ab"]
    assert said[0] == said[1] and said[0][1] == str(os.getpid()) and said[0][0] != ours
    monkeypatch.setattr(os, "getppid", lambda: 2**30)  # nobody: the launcher is gone
    assert torchrun_id() is None


MISSING = [
    (TORCHRUN, "RANK"), (TORCHRUN, "WORLD_SIZE"), (HOROVODRUN, "HOROVOD_RANK"), (HOROVODRUN, "HOROVOD_SIZE"),
    (SRUN, "SLURM_PROCID"), (MPIRUN, "OMPI_COMM_WORLD_RANK"),
]  # fmt: skip
NO_NUMBER = [
    (TORCHRUN, "RANK"), (TORCHRUN, "LOCAL_RANK"), (TORCHRUN, "MASTER_PORT"), (HOROVODRUN, "HOROVOD_LOCAL_RANK"),
    (SRUN, "SLURM_LOCALID"), (SRUN, "SLURM_STEP_NUM_TASKS"), (MPIRUN, "OMPI_COMM_WORLD_SIZE"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        *((without(environ, name), rf"\b{name}\b") for environ, name in MISSING),
        *(({**environ, name: "first"}, f"^{name}='first' ") for environ, name in NO_NUMBER),
        (SEVERAL_MACHINES, "`-x MASTER_ADDR="),
    ],
)
def test_variables_that_are_missing_or_no_numbers_are_named_in_one_line(environ: dict[str, str], said: str) -> None:
    assert re.search(said, one_line(detect, environ, kind=UserMistake))
