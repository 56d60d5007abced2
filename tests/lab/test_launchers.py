"""Two machines that every launcher starts: the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from forks import fork
from lab import Lab, missing
from launches import TOOLS, start_on_all
from slurm import Slurm

from benchmarks.launching import CHOSEN_ON_TWO, Launcher, finish
from scripts.parity import SHARED, SMALL_MODELS
from tests.scripts import assert_same_bits, shared_state

LAUNCHERS = [Launcher("torchrun", 2), Launcher("deepspeed", 2, zero_stage=2), Launcher("horovodrun", 2),
             Launcher("mpirun", 2), Launcher("srun", 2), *CHOSEN_ON_TWO]  # fmt: skip
SCRIPTS = ["train_vae.py", "train_mulan.py", "train_vqgan.py"]


@dataclass(frozen=True)
class Runs:
    """Runs of this module by script and flags, on one machine and on two."""

    lab: Lab
    folder: Path
    slurm: Slurm | None

    def flags(self, script: str, name: str) -> list[str]:
        return [*SHARED, *SMALL_MODELS[script].split(), "--batch_parts", "4", "--output_dir", str(self.folder / name)]

    @cache  # noqa: B019
    def alone(self, script: str) -> Path:
        """The run of one process on one machine."""
        name = f"alone-{script}"
        [finished] = fork(script.removesuffix(".py"), self.flags(script, name), self.folder / "log")
        assert finished.returncode == 0, finished.output
        return self.folder / name

    def on_two(self, launcher: Launcher, script: str) -> Path:
        name = f"{launcher}-{script}"
        jobs = start_on_all(self.lab, launcher, script, self.flags(script, name), self.slurm)
        for finished in [finish(job) for job in jobs]:
            assert finished.returncode == 0, finished.output
        return self.folder / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    if lacks := missing():
        pytest.skip(f"no machines here: {lacks}")
    folder = tmp_path_factory.mktemp("launchers")
    with Lab(folder) as lab:
        if not missing(*TOOLS["horovodrun"]):
            lab.start_sshd()
        yield Runs(lab, folder, None if missing(*TOOLS["srun"]) else Slurm(lab))


# `make test` shows the first of these.
@pytest.mark.parametrize(("launcher", "script"), [
    pytest.param(launcher, script, marks=[pytest.mark.long] if (launcher, script) != (LAUNCHERS[0], SCRIPTS[0]) else [])
    for launcher in LAUNCHERS for script in SCRIPTS
], ids=str)  # fmt: skip
def test_every_launcher_gives_the_bits_of_one_machine(
    launcher: Launcher, script: str, runs: Runs, needs: Callable[..., None]
) -> None:
    needs(*TOOLS[launcher.name])
    assert_same_bits(shared_state(runs.on_two(launcher, script)), shared_state(runs.alone(script)))
