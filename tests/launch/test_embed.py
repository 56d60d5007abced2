"""embed.py under real launchers: the same bytes for any number of processes, and after any death."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from launching import Launcher, finish, run, start, worker_pids

import embed
from models import MuLaN

SCRIPT = "embed.py"
ONE, TWO = Launcher("python"), Launcher("torchrun", 2)
N_SOUNDS, PER_SHARD, RATE = 42, 3, 8000
N_SHARDS = N_SOUNDS // PER_SHARD


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    towers = {"audio_dim": 128, "audio_depth": 3, "text_dim": 16, "text_depth": 1, "heads": 2, "dim_head": 16}
    MuLaN(sample_rate=RATE, clip_seconds=1.0, n_fft=512, hop_length=80, dim_latent=8, **towers).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last but one cannot be read."""
    folder = tmp_path_factory.mktemp("sounds")
    for seed in range(N_SOUNDS):
        noise = np.random.default_rng(seed).uniform(-0.5, 0.5, RATE * (1 + seed % 7))
        soundfile.write(folder / f"{seed:03d}.wav", noise, RATE)
    (folder / f"{N_SOUNDS - 2:03d}.wav").write_bytes(b"no sound")
    return folder


def flags(model: Path, sounds: Path, output: Path, *more: str) -> list[str]:
    said = ["--model", str(model), "--audio", str(sounds), "--output", str(output)]
    return [*said, "--files_per_shard", str(PER_SHARD), "--batch_size", "2", *more]


def quantizing(folder: Path) -> list[str]:
    sizes = ["--num_quantizers", "2", "--codebook_size", "4", "--quantizer_epochs", "2"]
    return ["--fit_quantizer", str(folder), "--quantizer", str(folder), *sizes]


def files(folder: Path) -> dict[str, bytes]:
    """All but the locks, which name the process."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def of_one_process(model: Path, sounds: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index with codes, and the quantizer."""
    folder = tmp_path_factory.mktemp("one")
    command = flags(model, sounds, folder / "index", "--num_workers", "0", *quantizing(folder / "quantizer"))
    finished = run(ONE, SCRIPT, command)
    assert finished.returncode == 0, finished.output
    return folder


def started(
    launcher: Launcher, command: list[str], index: Path, shards: int
) -> tuple[subprocess.Popen[str], list[int]]:
    """A job that has written so many shards, and its processes: looked for before, as a shard takes no time."""
    process, pids = start(launcher, SCRIPT, command), []
    deadline = time.monotonic() + 120
    while len(pids) < launcher.processes or len(list(index.glob("embeddings-*.json"))) < shards:
        assert process.poll() is None and time.monotonic() < deadline, finish(process, 1).output
        pids = pids if len(pids) == launcher.processes else worker_pids(process, SCRIPT)
        time.sleep(0.002)
    return process, pids


@pytest.mark.parametrize("launcher", [TWO, Launcher("deepspeed", 2), Launcher("horovodrun", 2)], ids=str)
def test_two_processes_write_the_bytes_of_one(
    launcher: Launcher, model: Path, sounds: Path, of_one_process: Path, tmp_path: Path
) -> None:
    command = flags(model, sounds, tmp_path / "index", "--num_workers", "1", *quantizing(tmp_path / "quantizer"))
    finished = run(launcher, SCRIPT, command)
    assert finished.returncode == 0, finished.output
    assert len(re.findall(r"cannot read \S*040\.wav", finished.output)) == 1, finished.output
    assert files(tmp_path) == files(of_one_process)
    n_files = 2 * N_SHARDS + 4 + 2 * N_SHARDS + 2 + 3  # with settings and indices; the same of codes; the quantizer
    assert len(files(of_one_process)) == n_files


def test_two_processes_answer_once_what_one_answers(model: Path, of_one_process: Path) -> None:
    command = ["--model", str(model), "--index", str(of_one_process / "index"), "--query", "a dog", "--json"]
    said = [run(launcher, SCRIPT, command) for launcher in (ONE, TWO)]
    assert [finished.returncode for finished in said] == [0, 0], said
    ((one,), (two,)) = ([line for line in each.output.splitlines() if line.startswith("{")] for each in said)
    assert one == two and len(json.loads(one)["matches"]) == 10


def test_a_killed_job_goes_on_on_another_number_of_processes(
    model: Path, sounds: Path, of_one_process: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = flags(model, sounds, tmp_path, "--num_workers", "0")
    process, pids = started(TWO, command, tmp_path, shards=4)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    finish(process, 30)
    assert not (tmp_path / "index.json").exists()
    done = {path.with_suffix(".safetensors") for path in tmp_path.glob("embeddings-*.json")}
    before = {path: path.stat().st_mtime_ns for path in done}
    assert 4 <= len(done) < N_SHARDS
    embed.main(command)
    assert f"of {N_SHARDS - len(done)} shards" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in done} == before
    written = files(of_one_process / "index")
    assert files(tmp_path) == {name: content for name, content in written.items() if not name.startswith("codes/")}


@pytest.mark.parametrize("launcher", [ONE, TWO], ids=str)
def test_a_job_that_is_told_to_end_exits_with_75_between_two_shards(
    launcher: Launcher, model: Path, sounds: Path, tmp_path: Path
) -> None:
    process, pids = started(launcher, flags(model, sounds, tmp_path, "--num_workers", "1"), tmp_path, shards=2)
    os.kill(pids[-1], signal.SIGTERM)  # one process of two
    finished = finish(process, 60)
    assert finished.output.count("asked to stop: the same command goes on with the") == 1, finished.output
    if launcher == ONE:
        assert finished.returncode == 75
    else:
        assert re.search(r"exitcode\s*: 75 ", finished.output), finished.output
    records = {path.stem for path in tmp_path.glob("embeddings-*.json")}
    assert records == {path.stem for path in tmp_path.glob("embeddings-*.safetensors")}
    assert 2 <= len(records) < N_SHARDS and not (tmp_path / "index.json").exists()


def test_the_root_alone_speaks_of_what_another_process_met(model: Path, sounds: Path, tmp_path: Path) -> None:
    command = flags(model, sounds, tmp_path / "index", "--on_bad_sample", "error", "--num_workers", "0")
    finished = run(TWO, SCRIPT, command, timeout_seconds=90)
    assert finished.returncode != 0
    errors = [line for line in finished.output.splitlines() if f"{SCRIPT}: error: " in line]
    assert len(errors) == 1 and "040.wav" in errors[0], finished.output
    assert re.search(r"exitcode\s*: 2 ", finished.output), finished.output
