"""tokenize_images.py under real launchers: the same bytes for any number of processes, and after any death."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from launching import Launcher, finish, run, start, worker_pids
from PIL import Image

import tokenize_images
from models import VQGAN

SCRIPT = "tokenize_images.py"
ONE, TWO = Launcher("python"), Launcher("torchrun", 2)
N_IMAGES, PER_SHARD = 42, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    VQGAN(image_size=64, dim=16, num_layers=2, codebook_size=1024).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last but one cannot be read."""
    folder = tmp_path_factory.mktemp("photos")
    for seed in range(N_IMAGES):
        pixels = np.random.default_rng(seed).integers(0, 256, (64, 70, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{seed:03d}.png")
    (folder / f"{N_IMAGES - 2:03d}.png").write_bytes(b"no picture")
    return folder


def flags(model: Path, photos: Path, output: Path, *more: str) -> list[str]:
    said = ["--model", str(model), "--image_folder", str(photos), "--output", str(output)]
    return [*said, "--images_per_shard", str(PER_SHARD), "--batch_size", "2", *more]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"}


@pytest.fixture(scope="module")
def of_one_process(model: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("codes")
    finished = run(ONE, SCRIPT, flags(model, photos, folder, "--num_workers", "0"))
    assert finished.returncode == 0, finished.output
    return folder


@pytest.mark.parametrize("launcher", [TWO, Launcher("deepspeed", 2), Launcher("horovodrun", 2)], ids=str)
def test_two_processes_write_the_bytes_of_one(
    launcher: Launcher, model: Path, photos: Path, of_one_process: Path, tmp_path: Path
) -> None:
    finished = run(launcher, SCRIPT, flags(model, photos, tmp_path / "codes", "--num_workers", "1", "--report"))
    assert finished.returncode == 0, finished.output
    assert len(re.findall(r"cannot read \S*040\.png", finished.output)) == 1, finished.output
    assert len(re.findall(r"of 1024 codes used, perplexity", finished.output)) == 1, finished.output
    assert files(tmp_path / "codes") == files(of_one_process)
    assert len(files(of_one_process)) == 2 * N_IMAGES // PER_SHARD + 3


def test_a_killed_job_goes_on_on_another_number_of_processes(
    model: Path, photos: Path, of_one_process: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = flags(model, photos, tmp_path, "--num_workers", "0")
    process = start(TWO, SCRIPT, command)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("codes-*.json"))) < 4:
        assert process.poll() is None and time.monotonic() < deadline, finish(process, 1).output
        time.sleep(0.002)
    for pid in worker_pids(process, SCRIPT):
        os.kill(pid, signal.SIGKILL)
    finish(process, 30)
    assert not (tmp_path / "index.json").exists()
    done = {path.with_suffix(".safetensors") for path in tmp_path.glob("codes-*.json")}
    before = {path: path.stat().st_mtime_ns for path in done}
    assert 4 <= len(done) < N_IMAGES // PER_SHARD
    tokenize_images.main(command)
    assert f"of {N_IMAGES // PER_SHARD - len(done)} shards" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in done} == before
    assert files(tmp_path) == files(of_one_process)


def test_decoding_by_two_processes_gives_the_pictures_of_one(model: Path, of_one_process: Path, tmp_path: Path) -> None:
    command = ["--model", str(model), "--decode", str(of_one_process), "--output"]
    finished = run(TWO, SCRIPT, [*command, str(tmp_path / "two")])
    assert finished.returncode == 0, finished.output
    tokenize_images.main([*command, str(tmp_path / "one")])
    assert files(tmp_path / "two") == files(tmp_path / "one")
    assert len(files(tmp_path / "two")) == N_IMAGES - 1 + 1


def test_the_root_alone_speaks_of_what_another_process_met(model: Path, photos: Path, tmp_path: Path) -> None:
    command = flags(model, photos, tmp_path / "codes", "--on_bad_sample", "error", "--num_workers", "0")
    finished = run(TWO, SCRIPT, command, timeout_seconds=90)
    assert finished.returncode != 0
    errors = [line for line in finished.output.splitlines() if f"{SCRIPT}: error: " in line]
    assert len(errors) == 1 and "040.png" in errors[0], finished.output
    assert re.search(r"exitcode\s*: 2 ", finished.output), finished.output
