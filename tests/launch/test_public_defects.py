"""Defects of the public trainers that only several processes or several epochs show, and that are not here."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from jobs import Jobs, Task
from launching import CHOSEN_ON_TWO, ONE_PROCESS, ZERO_STAGES, Launcher, run
from PIL import Image
from run_outputs import lines

MODEL = ["--image_size", "16", "--num_layers", "1", "--num_tokens", "16", "--hidden_dim", "8", "--emb_dim", "8",
         "--num_resnet_blocks", "1", "--image_folder", "demo:shapes:64", "--batch_size", "8", "--num_workers", "0",
         "--valid_fraction", "0.2", "--validate_every_n_steps", "0", "--save_every_n_steps", "0"]  # fmt: skip
# 51 images are trained on, so an epoch ends within an update, after 6 or 7 of them.
EPOCHS = [*MODEL, "--max_steps", "110", "--epochs", "100", "--log_every_n_steps", "1", "--sample_every_n_steps", "50",
          "--anneal_rate", "0.002", "--temp_min", "0.1", "--lr_decay_rate", "0.5",
          "--batch_parts", "2"]  # fmt: skip
LAUNCHERS = [ZERO_STAGES[3], *CHOSEN_ON_TWO]


def tasks(launcher: Launcher, kind: str, jobs: Jobs) -> Iterator[Task]:
    if kind == "bits" and launcher in [ONE_PROCESS, *LAUNCHERS]:
        yield Task("vae-epochs", "train_vae", EPOCHS)


@pytest.mark.parametrize("launcher", [ONE_PROCESS, *LAUNCHERS], ids=str)
def test_the_end_of_an_epoch_anneals_nothing(launcher: Launcher, jobs: Jobs) -> None:
    """DALLE-pytorch counts updates from 0 in each epoch, and anneals at each one's first."""
    found = [(line["temperature"], line["lr"]) for line in lines(jobs.output(launcher, "bits", "vae-epochs"))]
    # Both change after the updates 0, 100, 200, ...: exp(-rate * update), the learning rate by its factor.
    expected = [(1.0, 1e-3), *[(1.0, 5e-4)] * 100, *[(np.exp(-0.2), 2.5e-4)] * 9]
    np.testing.assert_allclose(found, expected, rtol=1e-6)  # the log has seven digits


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=str)
def test_pictures_and_the_final_file_of_sharded_weights_are_those_of_one_process(
    launcher: Launcher, jobs: Jobs
) -> None:
    """Under ZeRO 3, DALLE-pytorch decodes and saves the parts of the weights that one process happens to hold."""
    ours, reference = (jobs.output(who, "bits", "vae-epochs") for who in (launcher, ONE_PROCESS))
    pictures = {path.name: np.asarray(Image.open(path)) for path in (reference / "samples").glob("*.png")}
    assert len(pictures) >= 3
    for name, picture in pictures.items():
        np.testing.assert_array_equal(np.asarray(Image.open(ours / "samples" / name)), picture, err_msg=name)
    ours_final, final = (torch.load(run / "vae-final.pt", weights_only=True) for run in (ours, reference))
    assert ours_final["hparams"] == final["hparams"]
    assert ours_final["weights"].keys() == final["weights"].keys()
    assert [name for name, w in final["weights"].items() if not torch.equal(ours_final["weights"][name], w)] == []


@pytest.mark.parametrize("launcher", [Launcher("torchrun", 2), Launcher("horovodrun", 2)], ids=str)
def test_fresh_under_a_launcher_renames_the_old_run_once_and_asks_nobody(
    launcher: Launcher, jobs: Jobs, tmp_path: Path
) -> None:
    """The public trainers ask on every process whether to delete the folder, and each of them deletes it."""
    shutil.copytree(jobs.output(ONE_PROCESS, "bits", "vae-epochs"), tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    old = contents(tmp_path / "run")
    short = [*MODEL, "--max_steps", "2", "--epochs", "100", "--output_dir", str(tmp_path / "run"), "--fresh"]
    finished = run(launcher, "train_vae.py", short)
    assert finished.returncode == 0, finished.output[-4000:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.old-1"]
    assert contents(tmp_path / "run.old-1") == old
    assert [line["step"] for line in lines(tmp_path / "run")] == [2] and not (tmp_path / "run" / "notes.txt").exists()


def contents(folder: Path) -> dict[Path, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]  # which says who is in it
    return {path.relative_to(folder): path.read_bytes() for path in files}
