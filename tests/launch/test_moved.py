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


def tasks(launcher: Launcher, kind: str, jobs: Jobs) -> Iterator[Task]:
    """The uninterrupted runs."""
    if launcher == ONE_PROCESS and kind == "bits":
        yield from (task for task in test_scripts.tasks(launcher, kind, jobs) if task.name in WAYS)


def interrupted(name: str, folder: Path, interruption: str, exit_code: int, *more: str) -> str:
    """Interrupt a run of two processes, and return what it printed."""
    command = ["--script", test_scripts.VARIANTS[name][0], "--interrupt", interruption, *flags(name, folder.parent)]
    ranks = fork("interrupted_worker", [*command, "--output_dir", str(folder), *more], folder.with_suffix(".log"), 2)
    assert [rank.returncode for rank in ranks] == [exit_code] * 2, ranks[0].output
    return ranks[0].output


def flags(name: str, folder: Path) -> list[str]:
    return [*test_scripts.flags(name, folder), "--batch_parts", "4", "--save_every_n_steps", "1"]


# Where the run of each script is interrupted: SIGKILL, or "ask" for a signal at one process.
WAYS = {
    "vae": ["kill ddp", *(f"kill {launcher.backend}" for launcher in CHOSEN_ON_TWO), "ask deepspeed"],
    "vqgan-vq": ["kill deepspeed"],
    "tokenizer-vq": ["kill ddp", "ask deepspeed"],
    "decoder": [f"kill {launcher.backend}" for launcher in CHOSEN_ON_TWO],
    "mulan-dropout": ["kill ddp", "kill deepspeed"],
}
FLAGS_OF = {
    "ddp": [], "deepspeed": ["--zero_stage", "3"],
    **{str(launcher.backend): launcher.flags for launcher in CHOSEN_ON_TWO},
}  # fmt: skip


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every script that were interrupted on some backends, one after the other, and finished on Horovod."""
    base = tmp_path_factory.mktemp("moved")
    tasks = []
    for name, ways in WAYS.items():
        folder, writer = base / name, ""
        for update, (way, backend) in enumerate(map(str.split, ways), start=2):
            if way == "kill":
                said = interrupted(name, folder, f"SIGKILL@{update}", -9, *FLAGS_OF[backend])
            else:
                said = interrupted(name, folder, f"SIGUSR1@{update}", 75, *FLAGS_OF[backend], "--last_alone")
                assert "asked to stop: saved update" in said, said
            assert not writer or f"it was written by {writer} on 2" in said, said
            writer = backend
        tasks.append({"do": test_scripts.VARIANTS[name][0], "flags": flags(name, base), "output": str(folder)})
    (base / "tasks.json").write_text(json.dumps(tasks))
    finished = run(Launcher("horovodrun", 2), "tests/launch/job_worker.py", [str(base / "tasks.json")])
    assert finished.returncode == 0, finished.output[-4000:]
    for _, backend in (ways[-1].split() for ways in WAYS.values()):
        assert f"it was written by {backend} on 2" in finished.output, finished.output
    return base


@pytest.mark.parametrize("name", WAYS)
def test_a_run_that_is_killed_and_moved_has_the_bits_of_one_that_was_left_alone(
    name: str, moved: Path, jobs: Jobs
) -> None:
    assert unequal(moved / name, jobs.output(ONE_PROCESS, "bits", name)) == []
