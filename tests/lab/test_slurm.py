"""SLURM, with the script of docs/clusters.md: it stops a job before its limit and starts it again."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab import Lab
from launches import TOOLS
from slurm import Slurm

from benchmarks.launching import ROOT, wait_until
from tests.scripts import VAE, metrics, words

TINY = " ".join([
    *words(VAE.tiny), "--image_folder demo:shapes:64 --epochs 1000000 --num_workers 0 --log_every_n_steps 1",
    "--save_every_n_steps 20 --validate_every_n_steps 0 --sample_every_n_steps 0",
])  # fmt: skip
#: Words of the script in the documentation, and those of a small machine without GPUs.
SMALLER = {
    " --gpus-per-node=8": "", "ntasks-per-node=8": "ntasks-per-node=1", "cpus-per-task=8": "cpus-per-task=1",
    "--image_folder photos/": TINY, "python": sys.executable,
}  # fmt: skip


@pytest.fixture
def lab(tmp_path: Path, needs: Callable[..., None]) -> Iterator[Lab]:
    needs(*TOOLS["srun"])
    with Lab(tmp_path, machines=3) as lab:
        yield lab


def submit(slurm: Slurm, lab: Lab, **changed: str) -> Path:
    """Submit the script of the documentation as job 1. Returns the path of its log."""
    [script] = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", (ROOT / "docs/clusters.md").read_text(), re.DOTALL)
    for old, new in {**SMALLER, "runs/vae": str(lab.folder / "run"), **changed}.items():
        assert old in script, old
        script = script.replace(old, new)
    (lab.folder / "job.sh").write_text(script)
    slurm.run("sbatch", f"--output={lab.folder / 'log'}", lab.folder / "job.sh")
    return lab.folder / "log"


def wait_for(slurm: Slurm, log: Path, text: str, count: int = 1) -> None:
    """Wait until a text stands so many times in the log of the job."""
    wait_until(slurm.controller, lambda: log.exists() and len(re.findall(text, log.read_text())) >= count)


@pytest.mark.long
def test_a_job_is_saved_before_its_limit_requeued_resumed_and_when_cancelled_saved_once_more(lab: Lab) -> None:
    slurm = Slurm(lab)
    log = submit(slurm, lab, **{"24:00:00": "3", "USR1@300": "USR1@60"})
    wait_for(slurm, log, r"asked to stop: saved update \d+; run the same command again")
    wait_for(slurm, log, r"resumed from \S+")
    steps = log.read_text().count("\nupdate ")
    wait_for(slurm, log, r"\nupdate ", steps + 3)
    slurm.run("scancel", "1")
    wait_for(slurm, log, r"asked to stop: saved update \d+", 2)
    wait_until(slurm.controller, lambda: "JobState=CANCELLED" in slurm.job(1))
    assert "Restarts=1 " in slurm.job(1)
    said = log.read_text()
    saved = re.findall(r"saved update (\d+)", said)
    assert f"resumed from {lab.folder}/run/checkpoints/step_{int(saved[0]):08d}" in said
    assert [line["step"] for line in metrics(lab.folder / "run")] == list(range(1, int(saved[1]) + 1))


@pytest.mark.long
def test_a_job_that_loses_a_node_is_started_again_on_the_others(lab: Lab) -> None:
    slurm = Slurm(lab)
    log = submit(slurm, lab)
    wait_until(slurm.controller, lambda: any((lab.folder / "run" / "checkpoints").glob("step_*")))
    assert "NodeList=node[1-2]" in slurm.job(1)
    lab[1].die()
    wait_for(slurm, log, r"resumed from \S+")
    assert "NodeList=node[1,3]" in slurm.job(1) and "Restarts=1 " in slurm.job(1)
    steps = log.read_text().count("\nupdate ")
    wait_for(slurm, log, r"\nupdate ", steps + 3)
