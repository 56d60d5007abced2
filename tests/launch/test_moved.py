"""Whole scripts: a run that is killed and continued on another backend has the bits of an uninterrupted run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_scripts
from forks import fork
from jobs import Jobs, Task
from launching import CHOSEN_ON_TWO, ONE_PROCESS, Launcher, run
from run_outputs import unequal

VARIANTS = ["vae", "vqgan-vq", "tokenizer-vq", "decoder", "mulan-dropout"]


def tasks(launcher: Launcher, kind: str, jobs: Jobs) -> Iterator[Task]:
    """The uninterrupted runs."""
    if launcher == ONE_PROCESS and kind == "bits":
        yield from (task for task in test_scripts.tasks(launcher, kind, jobs) if task.name in VARIANTS)


def interrupted(name: str, folder: Path, interruption: str, exit_code: int, *more: str) -> str:
    """Interrupt a run of two processes, and return what it printed."""
    command = ["--script", test_scripts.VARIANTS[name][0], "--interrupt", interruption, *flags(name, folder.parent)]
    ranks = fork("interrupted_worker", [*command, "--output_dir", str(folder), *more], folder.with_suffix(".log"), 2)
    assert [rank.returncode for rank in ranks] == [exit_code] * 2, ranks[0].output
    return ranks[0].output


def flags(name: str, folder: Path) -> list[str]:
    return [*test_scripts.flags(name, folder), "--batch_parts", "4", "--save_every_n_steps", "1"]


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every script: killed on DDP, killed on the backends that only a flag chooses, stopped on ZeRO 3 by a
    signal at one process, finished on Horovod."""
    base = tmp_path_factory.mktemp("moved")
    tasks = []
    for name in VARIANTS:
        folder = base / name
        interrupted(name, folder, "SIGKILL@2", -9)
        writer = "ddp"
        for update, launcher in enumerate(CHOSEN_ON_TWO, start=3):
            said = interrupted(name, folder, f"SIGKILL@{update}", -9, *launcher.flags)
            assert f"it was written by {writer} on 2" in said, said
            writer = str(launcher.backend)
        said = interrupted(name, folder, f"SIGUSR1@{2 + len(CHOSEN_ON_TWO)}", 75, "--zero_stage", "3", "--last_alone")
        assert f"it was written by {writer} on 2" in said, said
        assert "asked to stop: saved update" in said, said
        script = test_scripts.VARIANTS[name][0]
        tasks.append({"do": script, "flags": flags(name, base), "output": str(folder)})
    (base / "tasks.json").write_text(json.dumps(tasks))
    finished = run(Launcher("horovodrun", 2), "tests/launch/job_worker.py", [str(base / "tasks.json")])
    assert finished.returncode == 0, finished.output[-4000:]
    assert finished.output.count("it was written by deepspeed on 2") == len(VARIANTS), finished.output
    return base


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_that_is_killed_and_moved_has_the_bits_of_one_that_was_left_alone(
    name: str, moved: Path, jobs: Jobs
) -> None:
    assert unequal(moved / name, jobs.output(ONE_PROCESS, "bits", name)) == []
