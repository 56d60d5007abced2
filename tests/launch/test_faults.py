"""Processes that die, stall, are asked to stop or compute nonsense: the job ends in bounded time and says why."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launching import Launcher, finish, run, start, worker_pids

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


@pytest.mark.parametrize("launcher", [Launcher("torchrun", 2), Launcher("horovodrun", 2)], ids=str)
def test_a_stalled_process_is_named_within_the_timeout(launcher: Launcher, tmp_path: Path) -> None:
    process = start_training(launcher, tmp_path, "--timeout_minutes", "0.1")
    victim = worker_pids(process, "train_vae.py")[1]
    os.kill(victim, signal.SIGSTOP)
    try:
        # 6 s of timeout, 30 s that torchrun gives a process to end after SIGTERM, and a busy machine
        finished = finish(process, timeout_seconds=90)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    assert finished.returncode != 0
    assert "no progress for 0.1 minutes: rank 1 stands at update" in finished.output, finished.output


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


@pytest.mark.parametrize("launcher", [Launcher("torchrun", 2), Launcher("deepspeed", 2, zero_stage=3)], ids=str)
def test_updates_that_stay_non_finite_end_the_run_naming_rank_and_tensor(launcher: Launcher, tmp_path: Path) -> None:
    finished = run(launcher, "tests/launch/nan_worker.py", ["--output", str(tmp_path / "out.json")])
    assert finished.returncode != 0
    stops = [line for line in finished.output.splitlines() if "stopped:" in line]
    assert len(stops) == 1, finished.output
    assert "3 updates in a row were skipped" in stops[0] and "the last at update 5" in stops[0]
    assert "rank 1: the gradient of 0.weight holds nan" in stops[0] and "rank 0" not in stops[0]
