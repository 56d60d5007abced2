"""What happens to machines and to the network between them: the run goes on, or ends with one line and is resumed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab import Lab
from launches import start_on_all
from launching import Job, Launcher, finish, wait_until
from run_outputs import lines

TINY = ["--image_size", "16", "--num_layers", "2", "--num_tokens", "16", "--hidden_dim", "8", "--emb_dim", "8",
        "--num_resnet_blocks", "0", "--image_folder", "demo:shapes:64", "--epochs", "1000000", "--num_workers", "0",
        "--log_every_n_steps", "1", "--save_every_n_steps", "0", "--validate_every_n_steps", "0",
        "--sample_every_n_steps", "0"]  # fmt: skip
SCRIPT = "train_vae.py"
TORCHRUN = Launcher("torchrun", 2)


@pytest.fixture
def make_lab(tmp_path: Path, needs: Callable[..., None]) -> Iterator[Callable[..., Lab]]:
    """Makes a lab that ends with the test; see `Lab`."""
    needs()
    labs: list[Lab] = []

    def make(**options: object) -> Lab:
        labs.append(Lab(tmp_path, **options))
        return labs[-1]

    yield make
    for lab in labs:
        lab.close()


def train(lab: Lab, *flags: str) -> list[Job]:
    return start_on_all(lab, TORCHRUN, SCRIPT, [*TINY, "--output_dir", str(lab.folder / "run"), *flags])


def assert_trained(jobs: list[Job], steps: int, run: Path) -> str:
    """Assert that a run went well to its last update. Returns what the root said."""
    finished = [finish(job) for job in jobs]
    assert [each.returncode for each in finished] == [0] * len(jobs), finished
    assert [line["step"] for line in lines(run)] == list(range(1, steps + 1))
    return finished[0].output


def wait_for_updates(job: Job, updates: int) -> None:
    """Wait until the root has completed this many updates."""
    wait_until(job, lambda: len(re.findall(r"step \d+/", job.output)) >= updates)


def test_machines_whose_names_lead_to_127_0_1_1_find_one_another(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(hosts="127.0.1.1 {name}")  # as Debian's installer writes it
    assert_trained(train(lab, "--max_steps", "3"), 3, lab.folder / "run")
