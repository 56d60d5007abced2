"""The scripts that fill folders under real launchers: the same bytes for any number of processes, after any death."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import filling
import pytest
from filling import Script
from forks import Forked, fork

from benchmarks.launching import Launcher, run
from tests.scripts import files

N_ITEMS, PER_SHARD = 42, 3
N_SHARDS = N_ITEMS // PER_SHARD


@dataclass(frozen=True, eq=False)
class Job:
    """A script with larger models and inputs than `filling` gives it."""

    script: Script
    ending: str  # extension of the input files
    sizes: Mapping[str, Any]  # of its model
    write_item: Callable[[Path, int], None]
    n_files: int  # number of files that it leaves
    said_once: str  # in what it prints
    more: tuple[str, ...] = ()  # further flags

    def __str__(self) -> str:
        return str(self.script)

    @property
    def module(self) -> str:
        return self.script.name.removesuffix(".py")

    def command(self, inputs: Path, output: Path, *more: str) -> list[str]:
        sizes = [f"--{self.script.per_shard}", PER_SHARD, *(["--batch_size", 2] if self.script.batch_size else [])]
        return self.script.flags(inputs / "model", inputs / "source", output, *sizes, *more)


TOKENIZE = Job(
    filling.TOKENIZE, "png", {"image_size": 64, "dim": 16, "codebook_size": 1024},
    lambda path, seed: filling.write_image(path, seed, 64, 70), N_SHARDS + 3, "of 1024 codes used, perplexity",
    ("--report",),
)  # fmt: skip
LATENTS = replace(
    TOKENIZE, script=filling.LATENTS, sizes={"image_size": 64, "dim": 16},
    said_once=f"41 images in {N_SHARDS} shards of latents", more=(),
)  # fmt: skip
TOKENIZE_VIDEOS = Job(
    filling.TOKENIZE_VIDEOS, "mp4",
    {"image_size": 64, "layers": "residual,compress_space:16,residual,compress_time:16,residual", "init_dim": 8,
     "input_kernel": 7, "codebook_size": 1024},
    lambda path, seed: filling.write_film(path, seed, 1 + 2 * (1 + seed % 7), 64, 70), N_SHARDS + 3,
    f"41 videos in {N_SHARDS} shards of codes",
)  # fmt: skip
LATENT_SHAPES = replace(
    TOKENIZE_VIDEOS, script=filling.LATENT_SHAPES, write_item=lambda path, seed: filling.write_film(
        path, seed, 1 + 2 * (1 + seed % 7), *((64, 70), (64, 90), (80, 64))[seed % 3]),
    said_once=f"41 videos in {N_SHARDS} shards of latents",
)  # fmt: skip
EMBED = Job(
    filling.EMBED, "wav",
    {"audio_dim": 128, "audio_depth": 3, "dim_head": 16, "sample_rate": 8000, "clip_seconds": 1.0, "n_fft": 512,
     "hop_length": 80, "n_mels": 64, "patch_size": 16},
    lambda path, seed: filling.write_sound(path, seed, 1 + seed % 7, 8000), N_SHARDS + 3,
    f"41 sounds in {N_SHARDS} shards of embeddings",
)  # fmt: skip


JOBS = [TOKENIZE, LATENTS, TOKENIZE_VIDEOS, EMBED]


@pytest.fixture(scope="module", params=JOBS, ids=str)
def job(request) -> Job:
    return request.param


@pytest.fixture(scope="session")
def prepare(tmp_path_factory) -> Callable[[Job], tuple[Path, Path]]:
    """Writes the inputs of a job, and the results of one process: once, though pytest comes back to a job."""

    @cache
    def prepared(job: Job) -> tuple[Path, Path]:
        inputs, results = tmp_path_factory.mktemp("inputs"), tmp_path_factory.mktemp("one")
        job.script.model(**job.sizes).save_pretrained(inputs / "model")
        (inputs / "source").mkdir()
        for seed in range(N_ITEMS):
            job.write_item(inputs / "source" / f"{seed:03d}.{job.ending}", seed)
        (inputs / "source" / f"040.{job.ending}").write_bytes(b"no such content")
        command = job.command(inputs, results / "output", "--num_workers", "0", *job.more)
        [finished] = fork(job.module, command, inputs / "log")
        assert finished.returncode == 0, finished.output
        return inputs, results

    return prepared


@pytest.fixture
def inputs(job, prepare) -> Path:
    """A model and 42 items, of which the last but one cannot be read."""
    return prepare(job)[0]


@pytest.fixture
def of_one_process(job, prepare) -> Path:
    """The folder "output" of one process, in a folder of its own."""
    return prepare(job)[1]


def started(job: Job, command: list[str], output: Path, log: Path, shards: int) -> Forked:
    """Two processes that have written ``shards`` shards."""
    forked = Forked(job.module, command, log, 2)
    forked.wait_until(lambda: len(list(output.glob(f"{job.script.shards}-*.safetensors"))) >= shards)
    return forked


# The scripts know nothing of launchers, so that one script shows them: that whose processes tell one another most.
@pytest.mark.parametrize(
    ("launcher", "job"),
    [
        *((None, job) for job in JOBS),
        (None, LATENT_SHAPES),
        *((Launcher(name, 2), EMBED) for name in ("torchrun", "deepspeed", "horovodrun")),
        *(pytest.param(Launcher("torchrun", 2), job, marks=pytest.mark.long) for job in (LATENTS, LATENT_SHAPES)),
    ],
    indirect=["job"],
    ids=str,
)
def test_two_processes_write_the_bytes_of_one(launcher, job, inputs, of_one_process, tmp_path):
    command = job.command(inputs, tmp_path / "left" / "output", "--num_workers", "1", *job.more)
    if launcher:
        finished = run(launcher, job.script.name, command)
    else:
        finished = fork(job.module, command, tmp_path / "log", 2)[0]
    assert finished.returncode == 0, finished.output
    assert len(re.findall(rf"cannot read \S*040\.{job.ending}", finished.output)) == 1, finished.output
    assert finished.output.count(job.said_once) == 1, finished.output
    assert files(tmp_path / "left") == files(of_one_process)
    assert len(files(of_one_process)) == job.n_files


@pytest.mark.parametrize(
    "job",
    [
        *(TOKENIZE, EMBED, LATENT_SHAPES),
        *(pytest.param(job, marks=pytest.mark.long) for job in (LATENTS, TOKENIZE_VIDEOS)),
    ],
    indirect=True,
    ids=str,
)
def test_two_processes_use_a_folder_as_one_does(job, inputs, of_one_process, tmp_path, capsys):
    command = ["--model", str(inputs / "model")]
    if job is not EMBED:
        command += ["--decode", str(of_one_process / "output"), "--output"]
        finished = fork(job.module, [*command, str(tmp_path / "two")], tmp_path / "log", 2)[0]
        job.script.main([*command, str(tmp_path / "one")])
        assert files(tmp_path / "two") == files(tmp_path / "one")
        assert len(files(tmp_path / "two")) == N_ITEMS - 1 + 1
    else:
        command += ["--index", str(of_one_process / "output"), "--query", "a dog", "--json"]
        finished = fork(job.module, command, tmp_path / "log", 2)[0]
        job.script.main(command)
        (one,) = capsys.readouterr().out.splitlines()
        assert [line for line in finished.output.splitlines() if line.startswith("{")] == [one]
        assert len(json.loads(one)["matches"]) == 10
    assert finished.returncode == 0, finished.output


def test_a_killed_job_goes_on_on_another_number_of_processes(job, inputs, of_one_process, tmp_path, capsys):
    output = tmp_path / "output"
    command = job.command(inputs, output, "--num_workers", "0")
    forked = started(job, command, output, tmp_path / "log", shards=4)
    forked.kill()
    assert not (output / "index.json").exists()
    done = list(output.glob(f"{job.script.shards}-*.safetensors"))
    before = {path: path.stat().st_mtime_ns for path in done}
    assert 4 <= len(done) < N_SHARDS
    job.script.main(command)
    assert f"of {N_SHARDS - len(done)} shards" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in done} == before
    assert files(output) == files(of_one_process / "output")


@pytest.mark.parametrize("job", [LATENT_SHAPES, EMBED], indirect=True, ids=str)
def test_two_processes_read_repaired_files_as_a_first_start_does(job, inputs, of_one_process, tmp_path):
    shutil.copytree(inputs, tmp_path / "inputs")
    output = shutil.copytree(of_one_process / "output", tmp_path / "two")
    job.write_item(tmp_path / "inputs" / "source" / f"040.{job.ending}", 40)
    (tmp_path / "inputs" / "source" / f"007.{job.ending}").write_bytes(b"lost since then")  # its rows are stored
    command = job.command(tmp_path / "inputs", output, "--num_workers", "1")
    finished = fork(job.module, command, tmp_path / "log", 2)[0]
    assert finished.returncode == 0 and "of 1 shard" in finished.output, finished.output
    job.write_item(tmp_path / "inputs" / "source" / f"007.{job.ending}", 7)
    job.script.main(job.command(tmp_path / "inputs", tmp_path / "one", "--num_workers", "0"))
    assert files(output) == files(tmp_path / "one")


def test_a_job_of_which_one_process_is_told_to_end_exits_with_75_between_two_shards(job, inputs, tmp_path):
    output = tmp_path / "output"
    forked = started(job, job.command(inputs, output, "--num_workers", "1"), output, tmp_path / "log", shards=2)
    os.kill(forked.pids[-1], signal.SIGTERM)
    ranks = forked.finish()
    assert ranks[0].output.count("asked to stop: the same command goes on with the last") == 1, ranks[0].output
    assert [rank.returncode for rank in ranks] == [75, 75], ranks[0].output
    done = list(output.glob(f"{job.script.shards}-*.safetensors"))
    assert 2 <= len(done) < N_SHARDS and not (output / "index.json").exists()


def test_the_root_alone_speaks_of_what_another_process_met(job, inputs, tmp_path):
    command = job.command(inputs, tmp_path / "output", "--on_bad_sample", "error", "--num_workers", "0")
    ranks = fork(job.module, command, tmp_path / "log", 2)
    errors = [line for line in ranks[0].output.splitlines() if f"{job.script.name}: error: " in line]
    assert len(errors) == 1 and f"040.{job.ending}" in errors[0], ranks[0].output
    assert [rank.returncode for rank in ranks] == [2, 2], ranks[0].output
