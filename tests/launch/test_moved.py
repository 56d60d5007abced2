"""Whole scripts: a run that is killed and continued on another backend has the bits of an uninterrupted run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_scripts
from forks import fork
from jobs import Jobs, Task

from benchmarks.launching import CHOSEN_ON_TWO, ONE_PROCESS, WHOLE_MATRIX, Launcher, run
from tests.scripts import assert_same_bits, metrics, shared_state


def tasks(launcher: Launcher, kind: str, jobs: Jobs) -> Iterator[Task]:
    """The uninterrupted runs."""
    if launcher == ONE_PROCESS:
        names = [FUSED.split()[0]] if kind == "rounded" else [name for name in WAYS if name != FUSED]
        yield from test_scripts.tasks(launcher, kind, jobs, names)


def flags(name: str, folder: Path) -> list[str]:
    parts = [] if name == FUSED else ["--batch_parts", "4"]
    return [*test_scripts.flags(name.split()[0], folder), *parts, "--save_every_n_steps", "1"]


# Where the run of each script is interrupted: SIGKILL, or "ask" for a signal at one process. Every backend and ZeRO
# stage writes what another one reads.
OTHERS = [str(launcher.backend) for launcher in CHOSEN_ON_TWO]
FUSED = "vae without parts"
WAYS = {
    "vae": ["kill ddp", *(f"kill {name}" for name in OTHERS), "ask zero3"],
    "tokenizer-kl": ["kill single", "kill zero0"],
    "decoder": ["kill ddp", "kill zero2"],
    "taming-kl": ["kill ddp", *(f"kill {name}" for name in OTHERS)],
    "mulan-sigmoid": ["kill zero1", *(f"kill {name}" for name in OTHERS)],  # by Lion, in two groups
    FUSED: ["kill zero2", *(f"kill {name}" for name in OTHERS), "kill zero3"],
}
if WHOLE_MATRIX:
    WAYS |= {
        "taming-kl": ["kill ddp", "kill zero2", *(f"kill {name}" for name in OTHERS), "kill zero3"],
        "vqgan-vq": ["kill zero0", "kill single", "kill ddp"],
        "tokenizer-vq": ["kill ddp", "ask zero1", "kill zero0"],
        "decoder": [*(f"kill {name}" for name in OTHERS), "kill zero2"],
        "mulan-dropout": ["kill single", "kill zero3"],
        "mulan-sigmoid": ["kill zero1", *(f"kill {name}" for name in OTHERS), "kill zero2"],
    }
FLAGS_OF = {
    "single": [], "ddp": [], **{f"zero{stage}": ["--deepspeed", "--zero_stage", str(stage)] for stage in range(4)},
    **{str(launcher.backend): launcher.flags for launcher in CHOSEN_ON_TWO},
}  # fmt: skip


def interrupted(name: str, folder: Path, way: str, backend: str, update: int) -> str:
    """Interrupt a run, and return what it printed."""
    processes = 1 if backend == "single" else 2
    signal, code, more = (f"SIGKILL@{update}", -9, []) if way == "kill" else (f"SIGUSR1@{update}", 75, ["--last_alone"])
    command = ["--script", script_of(name), "--interrupt", signal, *flags(name, folder.parent), *more]
    command += [*FLAGS_OF[backend], "--output_dir", str(folder)]
    ranks = fork("interrupted_worker", command, folder.with_suffix(".log"), processes)
    assert [rank.returncode for rank in ranks] == [code] * processes, ranks[0].output
    assert way == "kill" or "asked to stop: saved update" in ranks[0].output, ranks[0].output
    return ranks[0].output


def script_of(name: str) -> str:
    return test_scripts.VARIANTS[name.split()[0]][0]


def written_by(backend: str) -> str:
    if backend == "single":
        return "it was written by one process on cpu"
    return f"it was written by {'deepspeed' if 'zero' in backend else backend} on 2"


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every script that were interrupted on some backends, one after the other, and finished on Horovod."""
    base = tmp_path_factory.mktemp("moved")
    tasks = []
    for name, ways in WAYS.items():
        writer = ""
        for update, (way, backend) in enumerate(map(str.split, ways), start=2):
            said = interrupted(name, base / name, way, backend, update)
            assert not writer or written_by(writer) in said, said
            writer = backend
        output = str(base / name)
        tasks.append({"do": script_of(name), "flags": flags(name, base), "output": output})
    (base / "tasks.json").write_text(json.dumps(tasks))
    finished = run(Launcher("horovodrun", 2), "tests/launch/job_worker.py", [str(base / "tasks.json")])
    assert finished.returncode == 0, finished.output[-4000:]
    for _, backend in (ways[-1].split() for ways in WAYS.values()):
        assert written_by(backend) in finished.output, finished.output
    return base


def counts(run_folder: Path) -> dict[str, Any]:
    """What the newest checkpoint says of models, optimizers and averages beside their tensors."""
    newest = max((run_folder / "checkpoints").glob("step_*"))
    parts = json.loads((newest / "state.json").read_text())["parts"]
    return {name: part for name, part in parts.items() if "weights" in part}


@pytest.mark.parametrize("name", [name for name in WAYS if name != FUSED])
def test_a_run_that_is_killed_and_moved_has_the_bits_of_one_that_was_left_alone(
    name: str, moved: Path, jobs: Jobs
) -> None:
    """So Horovod, which has written the last checkpoint, writes what one process does."""
    alone = jobs.output(ONE_PROCESS, "bits", name)
    assert_same_bits(shared_state(moved / name), shared_state(alone))
    assert counts(moved / name) == counts(alone) != {}


def test_without_parts_where_optimizers_are_fused_a_moved_run_differs_by_rounding(moved: Path, jobs: Jobs) -> None:
    alone = metrics(jobs.output(ONE_PROCESS, "rounded", FUSED.split()[0]))
    differences = [abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(metrics(moved / FUSED), alone, strict=True)]
    test_scripts.assert_rounding(FUSED, "loss", differences)
