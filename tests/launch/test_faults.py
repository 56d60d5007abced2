"""Processes that die, stall, are asked to stop or compute nonsense: the job ends in bounded time and says why."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT, Launcher, finish, run, start, worker_pids

ENDLESS = ["--image_size", "16", "--num_layers", "2", "--num_tokens", "16", "--hidden_dim", "8", "--emb_dim", "8",
           "--num_resnet_blocks", "0", "--epochs", "1000000", "--num_workers", "1", "--log_every_n_steps", "1",
           "--save_every_n_steps", "0", "--validate_every_n_steps", "0", "--sample_every_n_steps", "0"]  # fmt: skip
LAUNCHERS = [Launcher("torchrun", 2), Launcher("deepspeed", 2), Launcher("horovodrun", 2)]


def lines(output_dir: Path) -> list[dict[str, float]]:
    path = output_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def start_training(launcher: Launcher, output_dir: Path, *flags: str) -> subprocess.Popen[str]:
    """A job that has completed a few updates."""
    process = start(launcher, "train_vae.py", [*ENDLESS, "--output_dir", str(output_dir), *flags])
    deadline = time.monotonic() + 120
    while len(lines(output_dir)) < 3:
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(finish(process, 1).output[-4000:])
        time.sleep(0.2)
    return process


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=str)
def test_a_killed_process_is_named_and_ends_the_job(launcher: Launcher, victim: int, tmp_path: Path) -> None:
    process = start_training(launcher, tmp_path)
    os.kill(worker_pids(process, "train_vae.py")[victim], signal.SIGKILL)
    finished = finish(process, timeout_seconds=60)
    assert finished.returncode != 0
    assert f"stopped: rank {1 - victim}: lost contact with rank {victim} at update" in finished.output, finished.output


@pytest.mark.parametrize(
    ("launcher", "rank"), [(Launcher("torchrun", 2), 1), (Launcher("horovodrun", 2), 1), (Launcher("horovodrun", 2), 0)]
)
def test_a_stalled_process_is_named_within_the_timeout(launcher: Launcher, rank: int, tmp_path: Path) -> None:
    process = start_training(launcher, tmp_path, "--timeout_minutes", "0.1")
    victim = worker_pids(process, "train_vae.py")[rank]
    os.kill(victim, signal.SIGSTOP)
    try:
        # 6 s of timeout, 30 s that torchrun gives a process to end after SIGTERM, and a busy machine
        finished = finish(process, timeout_seconds=90)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    assert finished.returncode != 0
    said = "rank 1 stands at update" if rank == 1 else "rank 0 does not answer, at update"
    assert f"no progress for 0.1 minutes: {said}" in finished.output, finished.output


@pytest.mark.parametrize("launcher", [Launcher("python"), *LAUNCHERS], ids=str)
def test_a_signal_saves_the_same_update_on_all_and_the_next_start_resumes(launcher: Launcher, tmp_path: Path) -> None:
    process = start_training(launcher, tmp_path)
    os.kill(worker_pids(process, "train_vae.py")[-1], signal.SIGUSR1)
    finished = finish(process, timeout_seconds=60)
    assert "asked to stop: saved update" in finished.output, finished.output
    if launcher.name == "python":
        assert finished.returncode == 75
    step = int(lines(tmp_path)[-1]["step"])
    assert (tmp_path / "checkpoints" / f"step_{step:08d}").is_dir()
    resumed = run(launcher, "train_vae.py", [*ENDLESS, "--output_dir", str(tmp_path), "--max_steps", str(step + 2)])
    assert resumed.returncode == 0, resumed.output
    assert f"resumed from {tmp_path}/checkpoints/step_{step:08d}" in resumed.output
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, step + 3))


@pytest.mark.parametrize(
    ("launcher", "number"), [*[(each, signal.SIGTERM) for each in LAUNCHERS], (Launcher("torchrun", 2), signal.SIGKILL)]
)
def test_a_signal_at_the_launcher_alone_saves_too(launcher: Launcher, number: signal.Signals, tmp_path: Path) -> None:
    process = start_training(launcher, tmp_path)
    process.send_signal(number)
    finished = finish(process, timeout_seconds=60)
    assert "asked to stop: saved update" in finished.output, finished.output


@pytest.mark.parametrize("launcher", [Launcher("torchrun", 2), Launcher("deepspeed", 2, zero_stage=3)], ids=str)
def test_updates_that_stay_non_finite_end_the_run_naming_rank_and_tensor(launcher: Launcher) -> None:
    finished = run(launcher, "tests/launch/fault_worker.py", ["--fault", "nan"])
    assert finished.returncode != 0
    stops = [line for line in finished.output.splitlines() if "stopped:" in line]
    assert len(stops) == 1, finished.output
    assert "3 updates in a row were skipped" in stops[0] and "the last at update 5" in stops[0]
    assert "rank 1: the gradient of 0.weight holds nan" in stops[0] and "rank 0" not in stops[0]


@pytest.mark.parametrize("launcher", [Launcher("torchrun", 2), Launcher("horovodrun", 2)], ids=str)
def test_replicas_that_drift_apart_end_the_run_naming_tensor_and_rank(launcher: Launcher) -> None:
    finished = run(
        launcher, "tests/launch/fault_worker.py", ["--fault", "drift", "--check_replicas_every_n_steps", "2"]
    )
    assert finished.returncode != 0
    stops = [line for line in finished.output.splitlines() if "stopped:" in line]
    assert len(stops) == 1, finished.output
    assert "after update 4 of toy, 1.bias on rank 1 is not what it is on rank 0" in stops[0]


def test_torchrun_starts_the_processes_again_and_the_run_goes_on_in_spite_of_fresh(tmp_path: Path) -> None:
    launcher = Launcher("torchrun", 2)
    command = [*ENDLESS, "--output_dir", str(tmp_path), "--fresh", "--max_steps", "150", "--save_every_n_steps", "1"]
    process = start(launcher, "train_vae.py", command, launcher_flags=["--max-restarts", "1"])
    deadline = time.monotonic() + 120
    while len(lines(tmp_path)) < 5 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(worker_pids(process, "train_vae.py")[1], signal.SIGKILL)
    finished = finish(process, timeout_seconds=180)
    assert finished.returncode == 0, finished.output
    assert "resumed from" in finished.output and "starting over" not in finished.output
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 151))


def test_fewer_processes_go_on_with_the_same_batch_by_accumulating_more(tmp_path: Path) -> None:
    flags = [*ENDLESS, "--batch_size", "8", "--save_every_n_steps", "4"]
    for processes, steps in ((4, 4), (2, 8), (1, 12)):
        launcher = Launcher("torchrun", processes)
        finished = run(
            launcher, "train_vae.py", [*flags, "--max_steps", str(steps), "--output_dir", str(tmp_path / "a")]
        )
        assert finished.returncode == 0, finished.output
        assert f"batch 8 = 2 x {4 // processes} accumulation x {processes} processes" in finished.output
        assert ("there are fewer processes than before" in finished.output) == (processes < 4)
    whole = run(Launcher("python"), "train_vae.py", [*flags, "--max_steps", "12", "--output_dir", str(tmp_path / "b")])
    assert whole.returncode == 0, whole.output
    losses = [[line["loss"] for line in lines(tmp_path / name)] for name in "ab"]
    # Sums of fp32 in another order: 1e-5 relative over the first 20 updates (promise P1).
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_deterministic_runs_give_the_same_bits_with_several_threads(tmp_path: Path) -> None:
    models = []
    for name in "ab":
        flags = [*ENDLESS, "--max_steps", "6", "--deterministic", "--output_dir", str(tmp_path / name)]
        command = [sys.executable, str(ROOT / "train_vae.py"), *flags]
        finished = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "2"}, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr
        models.append((tmp_path / name / "model" / "model.safetensors").read_bytes())
    assert models[0] == models[1]
