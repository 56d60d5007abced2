"""Processes that die, stall, are asked to stop or compute nonsense: the job ends by itself and says why."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from forks import fork
from launching import (
    CHOSEN_ON_TWO,
    ONE_PROCESS,
    Finished,
    Job,
    Launcher,
    finish,
    free_port,
    run,
    start,
    wait_until,
    worker_pids,
)
from run_outputs import lines

ENDLESS = ["--image_size", "16", "--num_layers", "2", "--num_tokens", "16", "--hidden_dim", "8", "--emb_dim", "8",
           "--num_resnet_blocks", "0", "--epochs", "1000000", "--num_workers", "1", "--log_every_n_steps", "1",
           "--save_every_n_steps", "0", "--validate_every_n_steps", "0", "--sample_every_n_steps", "0"]  # fmt: skip
LAUNCHERS = [Launcher("torchrun", 2), Launcher("deepspeed", 2), Launcher("horovodrun", 2), *CHOSEN_ON_TWO]
# Ranks that are killed; the process that is left has the same watchdog under every launcher. Rank 0 is the one that all
# others are connected to.
VICTIMS = {"torchrun": [0, 1], "deepspeed": [1], "horovodrun": [0]}


def start_training(launcher: Launcher, output_dir: Path, *flags: str, is_patient: bool = True) -> Job:
    """Start a job and wait until it has completed a few updates."""
    command = [*ENDLESS, "--output_dir", str(output_dir), *flags]
    job = start(launcher, "train_vae.py", command, is_patient=is_patient)
    wait_until(job, lambda: len(re.findall(r"step \d+/", job.output)) >= 3)
    return job


def assert_saved(finished: Finished, output_dir: Path) -> int:
    """Assert that a job which was asked to stop saved a checkpoint. Returns the update of the checkpoint."""
    said = re.search(r"asked to stop: saved update (\d+)", finished.output)
    assert said, finished.output
    step = int(said[1])
    assert [line["step"] for line in lines(output_dir)] == list(range(1, step + 1))
    assert (output_dir / "checkpoints" / f"step_{step:08d}").is_dir()
    return step


@pytest.mark.parametrize("launcher", [ONE_PROCESS, *LAUNCHERS], ids=str)
def test_signals_save_the_same_update_on_all_the_next_start_resumes_and_a_killed_process_is_named(
    launcher: Launcher, tmp_path: Path
) -> None:
    """All these ends are tested on one run, which is started again after each of them, because a job starts slowly."""
    job = start_training(launcher, tmp_path)
    os.kill(worker_pids(job)[-1], signal.SIGUSR1)
    finished = finish(job)
    step = assert_saved(finished, tmp_path)
    assert finished.returncode == 75 or launcher != ONE_PROCESS

    at_launchers = [signal.SIGTERM] if launcher.name != "torchrun" else [signal.SIGTERM, signal.SIGKILL]
    for number in at_launchers:
        job = start_training(launcher, tmp_path)
        job.process.send_signal(number)  # to the launcher only
        finished = finish(job)
        assert f"resumed from {tmp_path}/checkpoints/step_{step:08d}" in finished.output, finished.output
        step = assert_saved(finished, tmp_path)

    for victim in [1] if launcher.backend else VICTIMS.get(launcher.name, []):
        job = start_training(launcher, tmp_path)
        os.kill(worker_pids(job)[victim], signal.SIGKILL)
        finished = finish(job)
        assert finished.returncode != 0
        assert f"resumed from {tmp_path}/checkpoints/step_{step:08d}" in finished.output, finished.output
        lost = f"stopped: rank {1 - victim}: lost contact with rank {victim} at update"
        assert lost in finished.output, finished.output


@pytest.mark.parametrize(("launcher", "rank"), [(Launcher("torchrun", 2), 1), (Launcher("horovodrun", 2), 0)], ids=str)
def test_a_stalled_process_is_named_and_ends_the_job(launcher: Launcher, rank: int, tmp_path: Path) -> None:
    """The job must end after --timeout_minutes. On a slow machine the start alone may take longer than the timeout: try
    again with a longer timeout, below the minute after which a process without a heartbeat is given up anyway."""
    for attempt, minutes in enumerate(["0.1", "0.3", *["0.9"] * 20]):
        folder = tmp_path / str(attempt)
        try:
            job = start_training(launcher, folder, "--timeout_minutes", minutes, is_patient=False)
            break
        except AssertionError as ended:
            if f"no progress for {minutes} minutes" not in str(ended):
                raise
    else:
        pytest.fail("it does not start without a pause of 0.9 minutes")
    os.kill(worker_pids(job)[rank], signal.SIGSTOP)
    finished = finish(job)
    assert finished.returncode != 0
    stands = f"no progress for {minutes} minutes: rank 1 stands at update"
    silent = f"rank 0 has not answered for {60 * float(minutes):.0f} seconds, at update"
    assert (stands if rank == 1 else silent) in finished.output, finished.output


def fault(launcher: Launcher, flags: list[str], tmp_path: Path) -> str:
    """Run a job in which rank 1 fails, and return the single line that says why the job stopped."""
    if launcher.name == "horovodrun":
        finished = run(launcher, "tests/launch/fault_worker.py", flags)
    else:
        finished = fork("fault_worker", [*flags, *launcher.flags], tmp_path / "log", 2)[1]
    assert finished.returncode != 0
    stops = [line for line in finished.output.splitlines() if "stopped:" in line]
    assert len(stops) == 1, finished.output
    return stops[0]


@pytest.mark.parametrize(
    "launcher", [Launcher("torchrun", 2), Launcher("deepspeed", 2, zero_stage=3), *CHOSEN_ON_TWO], ids=str
)
def test_updates_that_stay_non_finite_end_the_run_naming_rank_and_tensor(launcher: Launcher, tmp_path: Path) -> None:
    stop = fault(launcher, ["--fault", "nan"], tmp_path)
    assert "3 updates in a row were skipped" in stop and "the last at update 5" in stop
    assert "rank 1: the gradient of 0.weight holds nan" in stop and "rank 0" not in stop


@pytest.mark.parametrize("launcher", [Launcher("torchrun", 2), Launcher("horovodrun", 2)], ids=str)
def test_replicas_that_drift_apart_end_the_run_naming_tensor_and_rank(launcher: Launcher, tmp_path: Path) -> None:
    stop = fault(launcher, ["--fault", "drift", "--check_replicas_every_n_steps", "2"], tmp_path)
    assert "after update 4 of toy, 1.bias on rank 1 is not what it is on rank 0" in stop


def test_torchrun_starts_the_processes_again_and_the_run_goes_on_in_spite_of_fresh(tmp_path: Path) -> None:
    command = [*ENDLESS, "--output_dir", str(tmp_path), "--fresh", "--max_steps", "12", "--save_every_n_steps", "1"]
    command += ["--interrupt", "SIGKILL@9", "--last_alone"]
    worker = "tests/launch/interrupted_worker.py"
    finished = finish(start(Launcher("torchrun", 2), worker, command, launcher_flags=["--max-restarts", "1"]))
    assert finished.returncode == 0, finished.output
    assert (
        f"resumed from {tmp_path}/checkpoints/step_00000008" in finished.output
        and "starting over" not in finished.output
    )
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 13))


def test_a_process_lost_on_one_of_two_machines_starts_all_again(tmp_path: Path) -> None:
    # Each torchrun counts the failures of its own processes alone, so the two counts differ after this.
    command = [*ENDLESS, "--output_dir", str(tmp_path), "--fresh", "--max_steps", "12", "--save_every_n_steps", "1"]
    command += ["--interrupt", "SIGKILL@9", "--last_alone"]
    worker = "tests/launch/interrupted_worker.py"
    flags = ["--nnodes", "2", "--max-restarts", "1", "--rdzv_backend", "c10d", "--rdzv_id", "two"]
    flags += ["--rdzv_endpoint", f"127.0.0.1:{free_port()}", "--master_port", str(free_port())]
    machines = [start(Launcher("torchrun", 1), worker, command, launcher_flags=flags) for _ in range(2)]
    finished = [finish(machine) for machine in machines]
    assert [each.returncode for each in finished] == [0, 0], finished
    said = "".join(each.output for each in finished)
    assert f"resumed from {tmp_path}/checkpoints/step_00000008" in said and "starting over" not in said
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 13))


def test_fewer_processes_go_on_with_the_same_batch_by_accumulating_more(tmp_path: Path) -> None:
    flags = [*ENDLESS, "--batch_size", "8", "--save_every_n_steps", "4"]
    for processes, steps in ((4, 4), (2, 8), (1, 12)):
        command = [*flags, "--max_steps", str(steps), "--output_dir", str(tmp_path / "a")]
        ranks = fork("train_vae", command, tmp_path / "log", processes)
        said = ranks[0].output
        assert [rank.returncode for rank in ranks] == [0] * processes, said
        assert f"batch 8 = 2 x {4 // processes} accumulation x {processes} processes" in said
        assert ("there are fewer processes than before" in said) == (processes < 4)
    command = [*flags, "--max_steps", "12", "--output_dir", str(tmp_path / "b")]
    [whole] = fork("train_vae", command, tmp_path / "log")
    assert whole.returncode == 0, whole.output
    losses = [[line["loss"] for line in lines(tmp_path / name)] for name in "ab"]
    # Sums of fp32 in another order: 1e-5 relative over the first 20 updates.
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_deterministic_runs_give_the_same_bits_with_several_threads(tmp_path: Path) -> None:
    models = []
    for name in "ab":
        flags = [*ENDLESS, "--max_steps", "6", "--deterministic", "--output_dir", str(tmp_path / name)]
        [finished] = fork("train_vae", flags, tmp_path / "log", threads=2)
        assert finished.returncode == 0, finished.output
        models.append((tmp_path / name / "model" / "model.safetensors").read_bytes())
    assert models[0] == models[1]
