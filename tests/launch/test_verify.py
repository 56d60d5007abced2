"""Runs that one launcher has made are confirmed by another, and the machine that computes wrongly is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from forks import fork
from jobs import Jobs
from test_scripts import SAME_BITS, TWO, tasks  # noqa: F401  (`jobs` looks for `tasks`)

from benchmarks.launching import (
    CHOSEN_ON_TWO,
    MARK,
    ONE_PROCESS,
    ZERO_STAGES,
    Job,
    Launcher,
    finish_all,
    free_port,
    run,
)
from tests.scripts import files

FOUR, HOROVOD = SAME_BITS[:2]
CHECKED = {  # who made the run of a script, and who replays it
    "vae": (FOUR, HOROVOD),
    "vqgan-lfq": (FOUR, ZERO_STAGES[3]),
    "mulan-softmax": (FOUR, TWO),
    "tokenizer-vq": (HOROVOD, CHOSEN_ON_TWO[0]),
    "decoder": (ZERO_STAGES[1], ONE_PROCESS),
}
VERDICTS = ("confirmed: ", "differs: ")


def verdicts(output: str) -> list[str]:
    """The verdicts in the output of a job; horovodrun writes a rank before each line."""
    lines = [line.removeprefix("[0]<stdout>:") for line in output.splitlines()]
    return [line for line in lines if line.startswith(VERDICTS)]


@pytest.mark.parametrize("name", [f"{name} of {by[0]} by {by[1]}" for name, by in CHECKED.items()])
def test_in_parts_a_run_is_confirmed_on_any_backend(name: str, jobs: Jobs, tmp_path: Path) -> None:
    variant = name.split()[0]
    maker, checker = CHECKED[variant]
    made = jobs.output(maker, "bits", variant)
    before = files(made)
    flags = [str(made), "--updates", "0:6", "--output", str(tmp_path / "replay")]
    if checker.name in ("python", "torchrun"):  # forks take no time for imports
        finished, *_ = fork("verify", [*flags, *checker.flags], tmp_path / "log", checker.processes)
    else:
        finished = run(checker, "verify.py", flags)
    [verdict] = verdicts(finished.output)
    assert finished.returncode == 0 and verdict.startswith(f"confirmed: updates 1 to 6 of {made} on "), finished.output
    assert files(made) == before and not (tmp_path / "replay").exists()


def test_the_machine_on_which_a_gradient_is_wrong_is_named(jobs: Jobs, tmp_path: Path) -> None:
    """Each machine is a torchrun, whose processes learn its name from the environment."""
    made, port, mark = jobs.output(FOUR, "bits", "vae"), str(free_port()), f"machines-{os.getpid()}"
    flags = [str(made), "--updates", "0:6", "--every_machine", "--output", str(tmp_path / "replay")]
    started = []
    for rank, (machine, wrong) in enumerate({"venus": {}, "mars": {"WRONG_UPDATE": "5"}}.items()):
        place = ["--nnodes", "2", "--node_rank", str(rank), "--master_addr", "127.0.0.1", "--master_port", port]
        command = Launcher("torchrun", 1 + rank).command("tests/launch/verify_worker.py", flags, place)
        started.append(Job(command, "verify_worker.py", **{"MACHINE": machine, MARK: mark, **wrong}))
    first, second = finish_all(started, 600)
    confirmed, differs = verdicts(first.output)
    assert confirmed.startswith(f"confirmed: updates 1 to 6 of {made} on venus: "), first.output
    assert differs.startswith(f"differs: updates 1 to 6 of {made} on mars: ") and "exp_avg" in differs, first.output
    assert 1 in (first.returncode, second.returncode)  # the other one may not have ended yet, and was killed
    assert [path.name for path in tmp_path.iterdir()] == ["replay-mars"]
