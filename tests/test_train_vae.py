"""train_vae.py: its schedules, its losses, its files; tiny models, generated images, one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import train_vae
from models import DiscreteVAE
from reference.vae import Settings, schedule
from tests.scripts import (
    ROOT,
    VAE,
    Script,
    assert_same_bits,
    final_weights,
    metrics,
    validation_images,
)
from training.run.costs import COSTS


def from_vae_final(run: Path) -> DiscreteVAE:
    return DiscreteVAE.from_dalle(run / "vae-final.pt")


def from_model_folder(run: Path) -> DiscreteVAE:
    return DiscreteVAE.from_pretrained(run / "model")


@pytest.mark.parametrize(
    "said",
    [
        [],
        ["--anneal_rate", "1e-4", "--temp_min", "0.3", "--lr_decay_rate", "0.85"],
        ["--starting_temp", "2", "--temp_min", "1.9", "--learning_rate", "0.3"],
        ["--anneal_rate", "0", "--lr_decay_rate", "1"],
    ],
    ids=["defaults", "demo", "hot", "constant"],
)
def test_temperature_and_learning_rate_follow_the_recurrence(said: list[str]) -> None:
    args = VAE.parsed(*said)
    names = ("learning_rate", "lr_decay_rate", "starting_temp", "temp_min", "anneal_rate")
    recurrence = schedule(Settings(**{name: getattr(args, name) for name in names}))
    ours = [(train_vae.learning_rate(n, args), train_vae.gumbel_temperature(n, args)) for n in range(13_000)]
    np.testing.assert_allclose(ours, list(islice(recurrence, 13_000)), rtol=1e-12)


# A run and what it leaves.


@pytest.fixture(scope="module")
def finished(run_of_eight: Callable[[Script], Path]) -> Path:
    """Eight updates with an average of the weights. Tests only look at it."""
    return run_of_eight(VAE)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Gives the run of two updates with some flags. Tests only look at it."""

    @cache
    def run(*flags: str) -> Path:
        return VAE.train(tmp_path_factory.mktemp("vae"), *flags, "--max_steps", "2")

    return run


def test_the_log_tells_the_losses_and_the_rate_and_temperature_of_the_update_itself(finished: Path) -> None:
    args = VAE.arguments_of(finished)
    shared = {"step", "samples", "epoch", "loss", "lr", "grad_norm", "bad_samples"}
    shared |= set(COSTS) - {"peak_device_memory_gb"}  # of GPUs
    own = {"recon_loss", "kl", "temperature", "skipped_updates", "codes_used", "codes_used_fraction", "perplexity"}
    measured = {"loss", "psnr", "ssim", "codes_used", "codes_used_fraction", "perplexity"}
    measured |= {"variance_kept", "explained_variance"}
    validation = {f"{which}/{key}" for which in ("valid", "valid/ema") for key in measured}
    for line in metrics(finished):
        assert line.keys() == shared | own | (validation if line["step"] % 2 == 0 else set())
        assert line["lr"] == pytest.approx(train_vae.learning_rate(line["step"] - 1, args), rel=1e-11)
        assert line["temperature"] == train_vae.gumbel_temperature(line["step"] - 1, args)


def test_the_picture_shows_as_many_originals_and_reconstructions_as_asked_at_true_brightness(finished: Path) -> None:
    """Eleven, more than a batch of 8. Below each original: its soft and its hard reconstruction by the model. Images of
    16 pixels are drawn eight times as large."""
    picture = np.asarray(Image.open(finished / "samples" / "step_00000008.png"))
    n, side, gap, factor = 11, 128, 2, 8
    assert picture.shape[0] == gap + 3 * (side + gap)
    originals = validation_images(VAE.arguments_of(finished))[:n]
    model = from_model_folder(finished)
    with torch.no_grad():
        soft = model(originals, temperature=metrics(finished)[-1]["temperature"]).reconstruction
        hard = model.decode(model.get_codebook_indices(originals))
    for row, images in enumerate([originals, soft, hard]):
        for column, image in enumerate(images):
            top, left = gap + row * (side + gap), picture.shape[1] - (n - column) * (side + gap)
            shown = picture[top : top + side : factor, left : left + side : factor].astype(int)
            expected = (image.clamp(0, 1) * 255).round().permute(1, 2, 0).numpy().astype(int)
            assert np.abs(shown - expected).max() <= (row > 0)  # one grey level where a rounding may go either way


WEIGHTS = {
    "codebook.weight": (16, 6),
    "encoder.0.0.weight": (8, 3, 4, 4), "encoder.0.0.bias": (8,),
    "encoder.1.0.weight": (8, 8, 4, 4), "encoder.1.0.bias": (8,),
    "encoder.2.net.0.weight": (8, 8, 3, 3), "encoder.2.net.0.bias": (8,),
    "encoder.2.net.2.weight": (8, 8, 3, 3), "encoder.2.net.2.bias": (8,),
    "encoder.2.net.4.weight": (8, 8, 1, 1), "encoder.2.net.4.bias": (8,),
    "encoder.3.weight": (16, 8, 1, 1), "encoder.3.bias": (16,),
    "decoder.0.weight": (8, 6, 1, 1), "decoder.0.bias": (8,),
    "decoder.1.net.0.weight": (8, 8, 3, 3), "decoder.1.net.0.bias": (8,),
    "decoder.1.net.2.weight": (8, 8, 3, 3), "decoder.1.net.2.bias": (8,),
    "decoder.1.net.4.weight": (8, 8, 1, 1), "decoder.1.net.4.bias": (8,),
    "decoder.2.0.weight": (8, 8, 4, 4), "decoder.2.0.bias": (8,),
    "decoder.3.0.weight": (8, 8, 4, 4), "decoder.3.0.bias": (8,),
    "decoder.4.weight": (3, 8, 1, 1), "decoder.4.bias": (3,),
}  # fmt: skip


def test_vae_final_is_dalle_pytorchs_file_to_the_key(finished: Path) -> None:
    content = torch.load(finished / "vae-final.pt", weights_only=True)
    assert set(content) == {"hparams", "weights"}
    assert content["hparams"] == {
        "image_size": 16, "num_layers": 2, "num_tokens": 16, "channels": 3, "codebook_dim": 6, "hidden_dim": 8,
        "num_resnet_blocks": 1,
    }  # fmt: skip
    assert {name: tuple(tensor.shape) for name, tensor in content["weights"].items()} == WEIGHTS
    assert all(tensor.dtype == torch.float32 for tensor in content["weights"].values())
    assert_same_bits(content["weights"], final_weights(finished))


def validation_loss(model: DiscreteVAE, run: Path) -> float:
    """Of the validation split, at the temperature of the last update."""
    images = validation_images(VAE.arguments_of(run))
    with torch.no_grad():
        return float(model(images, temperature=metrics(run)[-1]["temperature"]).loss)


@pytest.mark.parametrize("load", [from_vae_final, from_model_folder])
def test_the_reloaded_model_reproduces_the_loss_of_the_average_or_without_one_of_the_weights(
    load: Callable[[Path], DiscreteVAE], finished: Path, trained: Callable[..., Path]
) -> None:
    last = metrics(finished)[-1]
    assert last["valid/loss"] != last["valid/ema/loss"]
    assert validation_loss(load(finished), finished) == pytest.approx(last["valid/ema/loss"], rel=1e-6)
    run = trained("--transparent")
    assert validation_loss(load(run), run) == pytest.approx(metrics(run)[-1]["valid/loss"], rel=1e-6)


# Flags that do not go together.


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (["--image_size", "100"], "64 or 128"),
        (["--num_layers", "1000000"], "--num_layers 1000000"),
        (["--reinmax"], "--straight_through"),
        (["--num_resnet_blocks", "-1"], "--num_resnet_blocks: "),
        (["--temp_min", "2"], "--starting_temp 1.0 is below --temp_min 2.0"),
        (["--config", "hot.yaml", "--starting_temp", "0.7"], "--starting_temp 0.7 is below --temp_min 0.8"),
    ],
    ids=str,
)
def test_flags_that_contradict_each_other_are_refused_by_name_before_anything_starts(
    said: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hot.yaml").write_text("temp_min: 0.8")
    assert text in VAE.refused(tmp_path / "run", *said)
    assert not (tmp_path / "run").exists()


# --init_from


def test_init_from_takes_the_weights_of_vae_final(finished: Path, tmp_path: Path) -> None:
    nothing_learned = ("--max_steps", "1", "--learning_rate", "1e-30")
    VAE.train(tmp_path, *nothing_learned, "--init_from", str(finished / "vae-final.pt"))
    assert_same_bits(final_weights(tmp_path), final_weights(finished))


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (["--hidden_dim", "4", "--num_layers", "1"], "--num_layers 2, --hidden_dim 8"),
        (["--emb_dim", "8", "--num_resnet_blocks", "0"], "--emb_dim 6, --num_resnet_blocks 1"),
        (["--transparent"], "no --transparent"),
    ],
    ids=str,
)
def test_init_from_another_model_names_the_flags_that_differ(
    said: list[str], named: str, finished: Path, tmp_path: Path
) -> None:
    line = VAE.refused(tmp_path, "--init_from", str(finished / "vae-final.pt"), *said)
    before, _, differing = line.partition("; they need ")
    assert str(finished / "vae-final.pt") in before
    # The normalization has a value per channel, and no flag.
    assert differing.partition(", normalization")[0] == named


def test_init_from_a_model_with_alpha_says_that_it_is_transparent(tmp_path: Path, trained: Callable[..., Path]) -> None:
    model = trained("--transparent") / "model"
    assert "; they need --transparent, " in VAE.refused(tmp_path / "run", "--init_from", str(model))


# Tars.


def test_images_in_tars_train_the_same_model_as_in_a_folder(tmp_path: Path) -> None:
    folder, tars = VAE.data.write(tmp_path / "photos", 24), tmp_path / "tars"
    tars.mkdir()
    for shard in range(2):
        with tarfile.open(tars / f"{shard:05d}.tar", "w") as tar:
            for image in sorted(folder.iterdir())[12 * shard : 12 * (shard + 1)]:
                tar.add(image, image.name)
    runs = [
        VAE.train(tmp_path / f"run{n}", "--image_folder", str(spec), "--max_steps", "2", "--random_flip")
        for n, spec in enumerate((folder, tars / "{00000..00001}.tar"))
    ]
    assert_same_bits(*map(final_weights, runs))


# The flags of the loss, each against the formula written out on the first batch.


def test_reinmax_changes_the_gradient_and_not_the_loss(trained: Callable[..., Path]) -> None:
    plain, reinmax = (metrics(trained("--straight_through", *more))[0] for more in ((), ("--reinmax",)))
    assert plain["loss"] == reinmax["loss"]
    assert plain["grad_norm"] != reinmax["grad_norm"]


def test_transparent_means_four_channels_to_the_end(trained: Callable[..., Path]) -> None:
    content = torch.load(trained("--transparent") / "vae-final.pt", weights_only=True)
    assert content["hparams"]["channels"] == 4
    assert content["weights"]["encoder.0.0.weight"].shape == (8, 4, 4, 4)
    assert content["weights"]["decoder.4.weight"].shape == (4, 8, 1, 1)


# Starting.


def test_a_deepspeed_scheduler_wins_and_the_log_tells_the_rate_that_was_used(
    tmp_path: Path, trained: Callable[..., Path]
) -> None:
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.008, "warmup_num_steps": 4, "warmup_type": "linear"}
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.008, "weight_decay": 0.0}},
        "scheduler": {"type": "WarmupLR", "params": warmup},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    said = VAE.flags(tmp_path / "run", "--deepspeed_config", str(tmp_path / "ds.json"), "--max_steps", "6")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train_vae.py", *said]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "AdamW of the JSON" in finished.stderr and "scheduler of the JSON" in finished.stderr
    lines = metrics(tmp_path / "run")
    assert [line["lr"] for line in lines] == pytest.approx([0.0, 0.0, 0.002, 0.004, 0.006, 0.008])
    assert lines[0]["loss"] == pytest.approx(metrics(trained())[0]["loss"], rel=1e-5)
