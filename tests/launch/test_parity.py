"""The real script: the losses of every launcher and ZeRO stage are those of one process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import fork
from jobs import Jobs, Task
from launching import CHOSEN, ONE_PROCESS, ZERO_STAGES, Launcher, run
from PIL import Image
from run_outputs import lines

MODEL = ["--image_size", "32", "--num_layers", "2", "--num_tokens", "64", "--hidden_dim", "16", "--emb_dim", "16",
         "--num_resnet_blocks", "1", "--image_folder", "demo:shapes:64", "--batch_size", "12", "--max_steps", "20",
         "--epochs", "100", "--num_workers", "0", "--log_every_n_steps", "1", "--save_every_n_steps", "0",
         "--sample_every_n_steps", "0", "--validate_every_n_steps", "10", "--ema_decay", "0.9"]  # fmt: skip
FLAGS = {"plain": [], "accumulating": ["--grad_accum_steps", "2"], "clipping": ["--max_grad_norm", "0.1"]}
RUNS = [
    (Launcher("torchrun", 2), "plain"),
    (Launcher("torchrun", 2), "accumulating"),
    (Launcher("torchrun", 4), "clipping"),
    (Launcher("horovodrun", 2), "clipping"),
    (Launcher("horovodrun", 3), "plain"),
    (ZERO_STAGES[0], "accumulating"),
    (ZERO_STAGES[1], "clipping"),
    (ZERO_STAGES[2], "plain"),
    (ZERO_STAGES[3], "accumulating"),
    (Launcher("deepspeed", 3, zero_stage=3), "clipping"),
    *((launcher, "accumulating" if launcher.processes == 2 else "clipping") for launcher in CHOSEN),
    *((ONE_PROCESS, name) for name in FLAGS),
]


TINY = ["--image_size", "16", "--num_layers", "2", "--num_tokens", "16", "--hidden_dim", "8", "--emb_dim", "8",
        "--num_resnet_blocks", "0", "--max_steps", "14", "--num_workers", "0", "--valid_fraction", "0",
        "--log_every_n_steps", "1", "--save_every_n_steps", "0"]  # fmt: skip
WITH_BROKEN_PHOTOS = [Launcher("torchrun", 2), ZERO_STAGES[0], Launcher("horovodrun", 2)]
BROKEN = (5, 17, 40)


def tasks(launcher: Launcher, kind: str, jobs: Jobs) -> Iterator[Task]:
    if kind == "rounded":
        for name in [name for who, name in RUNS if who == launcher]:
            yield Task(f"parity-{name}", "train_vae", [*MODEL, *FLAGS[name]])
        if launcher in [ONE_PROCESS, *WITH_BROKEN_PHOTOS]:
            photos = sixty_photos(jobs.folder / f"photos-{launcher}")
            yield Task("broken-photos", "train_vae", [*TINY, "--image_folder", str(photos)])


def sixty_photos(folder: Path) -> Path:
    folder.mkdir()
    for index in range(60):
        path = folder / f"{index:03d}.png"
        Image.new("RGB", (40, 30), (index, 2 * index, 255 - index)).save(path)
        if index in BROKEN:
            path.write_bytes(path.read_bytes()[:60])
    return folder


def log(jobs: Jobs, launcher: Launcher, name: str) -> list[dict[str, float]]:
    return lines(jobs.output(launcher, "rounded", f"parity-{name}"))


def relative(ours: list[dict[str, float]], reference: list[dict[str, float]], key: str) -> list[float]:
    pairs = [(a[key], b[key]) for a, b in zip(ours, reference, strict=True) if key in b]
    return [abs(a - b) / abs(b) for a, b in pairs]


@pytest.mark.parametrize(("launcher", "name"), RUNS[: -len(FLAGS)], ids=str)
def test_losses_equal_those_of_one_process(launcher: Launcher, name: str, jobs: Jobs) -> None:
    ours, reference = log(jobs, launcher, name), log(jobs, ONE_PROCESS, name)
    assert [line["step"] for line in ours] == list(range(1, 21))
    losses = relative(ours, reference, "loss")
    # Summing fp32 numbers in another order changes a loss by about 1e-7; Adam passes that on from update to update.
    assert losses[0] <= 1e-6
    assert max(losses) <= 1e-5
    assert max(relative(ours, reference, "grad_norm")) <= 1e-5
    # All processes validate, in parts of other sizes than one process; PSNR is a mean over images of 10 log10 of small
    # sums.
    for key in ("valid/loss", "valid/ema/loss", "valid/psnr"):
        assert max(relative(ours, reference, key)) <= 1e-4, key


def test_accumulation_changes_no_number(jobs: Jobs) -> None:
    losses = relative(log(jobs, ONE_PROCESS, "accumulating"), log(jobs, ONE_PROCESS, "plain"), "loss")
    assert max(losses) <= 1e-5


def test_a_compiled_model_has_the_losses_of_one_that_is_not(tmp_path: Path) -> None:
    """The model is small, because a compiler for C++ is started for every kernel of every process."""
    flags = [*TINY, "--num_layers", "1", "--image_folder", "demo:shapes:64"]
    [whole] = fork("train_vae", [*flags, "--output_dir", str(tmp_path / "one")], tmp_path / "log")
    assert whole.returncode == 0, whole.output
    command = [*flags, "--compile", "--output_dir", str(tmp_path / "two")]
    finished = run(Launcher("torchrun", 2), "train_vae.py", command)
    assert finished.returncode == 0, finished.output[-4000:]
    losses = relative(lines(tmp_path / "two"), lines(tmp_path / "one"), "loss")
    assert len(losses) == 14
    # Fused kernels round differently, by as much as another order of sums does.
    assert losses[0] <= 1e-6
    assert max(losses) <= 1e-5


@pytest.mark.parametrize("launcher", WITH_BROKEN_PHOTOS, ids=str)
def test_three_broken_photos_are_named_once_and_counted_alike(launcher: Launcher, jobs: Jobs) -> None:
    losses = []
    for each in (ONE_PROCESS, launcher):
        of_run, said = lines(jobs.output(each, "rounded", "broken-photos")), jobs.said(each, "rounded")
        assert of_run[-1]["bad_samples"] == len(BROKEN)
        losses.append([line["loss"] for line in of_run])
        for index in BROKEN:
            assert len(re.findall(rf"cannot read \S*photos-\S*{index:03d}\.png", said)) == 1, said
    # Sums of fp32 in another order: 1e-5 relative over the first 20 updates.
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
