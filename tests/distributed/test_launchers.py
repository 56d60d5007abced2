"""Who started this process: the variables that each launcher really sets."""

from __future__ import annotations

import pytest

from distributed import Launch, detect
from distributed.launchers import first_slurm_host

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
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "gpu[03-04]",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_torchrun() -> None:
    assert detect(TORCHRUN) == Launch("torchrun", 5, 1, 8, "node0", 29400)


def test_torchrun_that_starts_its_processes_again() -> None:
    assert detect({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}).is_restart
    assert not detect({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "0"}).is_restart


def test_a_job_that_slurm_requeued() -> None:
    assert detect({**SRUN, "SLURM_RESTART_COUNT": "1"}).is_restart and not detect(SRUN).is_restart
    assert detect({"SLURM_RESTART_COUNT": "1"}).is_restart


def test_deepspeed_is_told_from_torchrun_by_variables_of_its_own() -> None:
    assert detect(DEEPSPEED) == Launch("deepspeed", 1, 1, 2, "127.0.0.1", 29500)


@pytest.mark.parametrize("missing", ["CROSS_RANK", "LOCAL_SIZE"])
def test_one_of_deepspeeds_own_variables_is_not_enough(missing: str) -> None:
    assert detect(without(DEEPSPEED, missing)).launcher == "torchrun"


def test_torchrun_inside_a_deepspeed_environment_is_torchrun() -> None:
    assert detect({**DEEPSPEED, **TORCHRUN}).launcher == "torchrun"


def test_horovodrun_whose_workers_inherit_other_variables_is_horovodrun() -> None:
    launch = detect({**TORCHRUN, **SRUN, **HOROVODRUN})
    assert (launch.launcher, launch.rank, launch.local_rank, launch.world_size) == ("horovodrun", 3, 1, 4)


def test_srun_with_several_tasks() -> None:
    assert detect(SRUN) == Launch("srun", 6, 2, 8, "gpu03", 20000 + 41234 % 20000)


def test_srun_takes_address_and_port_that_the_batch_script_exported() -> None:
    launch = detect({**SRUN, "MASTER_ADDR": "gpu03.ib", "MASTER_PORT": "12345"})
    assert (launch.master_address, launch.master_port) == ("gpu03.ib", 12345)


def test_two_slurm_jobs_on_a_node_meet_on_two_ports() -> None:
    assert detect(SRUN).master_port != detect({**SRUN, "SLURM_JOB_ID": "41235"}).master_port


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_NUM_TASKS": "1"}], ids=["no step", "step of one task"])
def test_a_batch_script_is_one_process_though_slurm_numbers_it(step: dict[str, str]) -> None:
    assert detect({**without(SRUN, "SLURM_STEP_NUM_TASKS"), "SLURM_PROCID": "0", **step}) == Launch("python")


def test_torchrun_started_by_srun_is_torchrun() -> None:
    assert detect({**SRUN, **TORCHRUN}).launcher == "torchrun"


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu9", "gpu7"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("gpu[12,14]", "gpu12"),
        ("a-b-[007-010]", "a-b-007"),
        ("login1,gpu[1-2]", "login1"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("gpu[03-05]-ib", "gpu03-ib"),
        ("", "127.0.0.1"),
    ],
)
def test_first_host_of_a_compressed_nodelist(nodelist: str, first: str) -> None:
    assert first_slurm_host(nodelist) == first


def test_mpirun_on_one_machine() -> None:
    assert detect(MPIRUN) == Launch("mpirun", 1, 1, 2, "127.0.0.1", 29500)


def test_mpirun_on_several_machines_with_an_address() -> None:
    launch = detect({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "node0"})
    assert (launch.launcher, launch.master_address) == ("mpirun", "node0")


def test_mpirun_on_several_machines_without_an_address_says_what_to_add() -> None:
    with pytest.raises(ValueError, match=r"several machines .* add `-x MASTER_ADDR="):
        detect({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


def test_mpirun_inside_a_slurm_job_is_mpirun() -> None:
    """On several nodes mpirun starts its daemons with srun, whose variables the ranks inherit: one task per node."""
    environ = {**SRUN, **MPIRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "MASTER_ADDR": "gpu03"}
    launch = detect(environ)
    assert (launch.launcher, launch.rank, launch.world_size) == ("mpirun", 1, 2)


def test_an_empty_environment_is_plain_python() -> None:
    assert detect({}) == Launch("python", rank=0, local_rank=0, world_size=1, master_port=None)


def test_the_root_is_rank_0() -> None:
    assert detect({**TORCHRUN, "RANK": "0"}).is_root and not detect(TORCHRUN).is_root


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        (TORCHRUN, "RANK"),
        (TORCHRUN, "WORLD_SIZE"),
        (HOROVODRUN, "HOROVOD_RANK"),
        (HOROVODRUN, "HOROVOD_SIZE"),
        (SRUN, "SLURM_PROCID"),
        (MPIRUN, "OMPI_COMM_WORLD_RANK"),
    ],
)
def test_half_set_variables_are_an_error_that_names_the_missing_one(environ: dict[str, str], missing: str) -> None:
    with pytest.raises(ValueError, match=rf"did not set {missing}\b") as raised:
        detect(without(environ, missing))
    assert "\n" not in str(raised.value)


def test_a_world_size_exported_for_srun_is_not_half_of_torchruns_variables() -> None:
    assert detect({**SRUN, "WORLD_SIZE": "8"}).launcher == "srun"


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        (TORCHRUN, "RANK"),
        (TORCHRUN, "LOCAL_RANK"),
        (TORCHRUN, "MASTER_PORT"),
        (HOROVODRUN, "HOROVOD_LOCAL_RANK"),
        (SRUN, "SLURM_LOCALID"),
        (SRUN, "SLURM_STEP_NUM_TASKS"),
        (MPIRUN, "OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_a_variable_that_is_no_number_is_named(environ: dict[str, str], name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}='first' in the environment is not a number$"):
        detect({**environ, name: "first"})
