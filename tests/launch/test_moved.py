"""Whole scripts: a run that is killed and continued on another backend has the bits of an uninterrupted run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_adversaries
import test_decoder
import test_mulan
from forks import fork
from jobs import Jobs, Task
from launching import CHOSEN_ON_TWO, ONE_PROCESS, Launcher, run
from run_outputs import unequal

SCRIPTS = {
    "train_mulan": [*test_mulan.MODEL, *test_mulan.SAME_BITS],
    "train_vqgan": [*test_adversaries.flags("vqgan-vq"), *test_adversaries.SAME_BITS],
    "train_tokenizer": [*test_adversaries.flags("tokenizer-vq"), *test_adversaries.SAME_BITS],
    "train_decoder": [*test_decoder.SHARED, *test_decoder.SAME_BITS],
}
UNINTERRUPTED = {
    "train_mulan": "mulan-decoupled", "train_vqgan": "vqgan-vq", "train_tokenizer": "tokenizer-vq",
    "train_decoder": "decoder",
}  # fmt: skip


def tasks(launcher: Launcher, kind: str, jobs: Jobs) -> Iterator[Task]:
    """The uninterrupted runs."""
    if launcher == ONE_PROCESS and kind == "bits":
        for module in (test_mulan, test_adversaries, test_decoder):
            yield from (task for task in module.tasks(launcher, kind, jobs) if task.name in UNINTERRUPTED.values())


def interrupted(script: str, folder: Path, interruption: str, exit_code: int, *flags: str) -> str:
    """Interrupt a run of two processes, and return what it printed."""
    command = ["--script", script, "--interrupt", interruption, *SCRIPTS[script], "--save_every_n_steps", "3"]
    ranks = fork("interrupted_worker", [*command, "--output_dir", str(folder), *flags], folder.with_suffix(".log"), 2)
    assert [rank.returncode for rank in ranks] == [exit_code] * 2, ranks[0].output
    return ranks[0].output


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every script: killed on DDP, killed on the backends that only a flag chooses, stopped on ZeRO 3 by a
    signal at one process, finished on Horovod."""
    base = tmp_path_factory.mktemp("moved")
    tasks = []
    for script, flags in SCRIPTS.items():
        folder = base / script
        interrupted(script, folder, "SIGKILL@5", -9)
        writer = "ddp"
        for launcher in CHOSEN_ON_TWO:
            said = interrupted(script, folder, "SIGKILL@7", -9, *launcher.flags)
            assert f"it was written by {writer} on 2" in said, said
            writer = str(launcher.backend)  # of update 6
        said = interrupted(script, folder, "SIGUSR1@8", 75, "--zero_stage", "3", "--last_alone")
        assert f"it was written by {writer} on 2" in said, said
        assert "asked to stop: saved update" in said, said
        tasks.append({"do": script, "flags": [*flags, "--save_every_n_steps", "3"], "output": str(folder)})
    (base / "tasks.json").write_text(json.dumps(tasks))
    finished = run(Launcher("horovodrun", 2), "tests/launch/job_worker.py", [str(base / "tasks.json")])
    assert finished.returncode == 0, finished.output[-4000:]
    assert finished.output.count("it was written by deepspeed on 2") == len(SCRIPTS), finished.output
    return base


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_that_is_killed_and_moved_has_the_bits_of_one_that_was_left_alone(
    script: str, moved: Path, jobs: Jobs
) -> None:
    assert unequal(moved / script, jobs.output(ONE_PROCESS, "bits", UNINTERRUPTED[script])) == []
