"""train_vae.py: its schedules, its losses, its files; tiny models, generated images, one process."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
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
from torch import Tensor
from torch.nn import functional as F

import data
import distributed
import train_vae
from models import DiscreteVAE
from reference.vae import Settings, schedule
from tests.scripts import (
    ROOT,
    VAE,
    VQGAN,
    Script,
    assert_same_bits,
    checkpoint,
    final_weights,
    metrics,
    validation_images,
)
from training.noise import Noise
from training.run.costs import COSTS


def dalle_weights(run: Path) -> dict[str, Tensor]:
    return dict(torch.load(run / "vae-final.pt", weights_only=True)["weights"])


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


def test_with_the_defaults_the_temperature_reaches_its_floor_near_step_11_800() -> None:
    args = VAE.parsed()
    first = next(step for step in range(20_000) if train_vae.gumbel_temperature(step, args) == 0.5)
    assert first == pytest.approx(11_800, abs=100)
    assert all(train_vae.gumbel_temperature(step, args) == 0.5 for step in range(first, 20_000, 7))


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


def test_updates_are_profiled(trained: Callable[..., Path]) -> None:
    folder = trained("--profile_steps", "2:2") / "profile"
    with gzip.open(folder / "updates_2-2.json.gz") as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert {"update 2", "aten::convolution"} <= names and "update 1" not in names
    assert "aten::convolution" in (folder / "updates_2-2.txt").read_text()


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


def test_with_ema_the_average_is_what_is_kept(tmp_path: Path) -> None:
    """a <- d a + (1 - d) w, d = min(decay, (1 + n) / (10 + n)) at update n."""
    run = VAE.train(tmp_path, "--ema_decay", "0.2", "--max_steps", "2", "--save_every_n_steps", "1")
    average = train_vae.build_model(VAE.arguments_of(run)).state_dict()
    for n, decay in ((1, 2 / 11), (2, 0.2)):
        saved = checkpoint(run, n)
        for name in average:
            average[name] = decay * average[name] + (1 - decay) * saved[f"engine: weights/{name}"]
    torch.testing.assert_close(final_weights(run), dict(average), rtol=1e-5, atol=1e-7)


def test_vae_final_that_was_lost_is_written_again(finished: Path, tmp_path: Path) -> None:
    """A run that was killed before it wrote its models."""
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    (run / "vae-final.pt").unlink()
    (run / "model" / "training.json").unlink()
    VAE.train(run, *VAE.eight)
    assert (run / "vae-final.pt").read_bytes() == (finished / "vae-final.pt").read_bytes()


# Flags that do not go together.


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (["--image_size", "100"], "--image_size 100 is not a power of two; use 64 or 128"),
        (["--image_size", "8", "--num_layers", "4"], "--image_size 8 is less than 2^num_layers for --num_layers 4"),
        (["--num_layers", "1000000"], "--image_size 16 is less than 2^num_layers for --num_layers 1000000"),
        (["--reinmax"], "--reinmax refines the gradient of --straight_through; give both"),
        (["--num_resnet_blocks", "-1"], "--num_resnet_blocks: "),
        (["--starting_temp", "0.3"], "--starting_temp 0.3 is below --temp_min 0.5, "),
        (["--temp_min", "2"], "--starting_temp 1.0 is below --temp_min 2.0, "),
        (["--starting_temp", "0.3", "--temp_min", "0.31"], "raise the one or lower the other"),
        (["--config", "hot.yaml", "--starting_temp", "0.7"], "--starting_temp 0.7 is below --temp_min 0.8, "),
    ],
    ids=str,
)
def test_flags_that_contradict_each_other_are_refused_by_name_before_anything_starts(
    said: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hot.yaml").write_text("temp_min: 0.8")
    monkeypatch.setattr(distributed, "from_args", lambda *_: pytest.fail("a backend was started"))
    assert text in VAE.refused(tmp_path / "run", *said)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("said", [[], ["--starting_temp", "0.5"], ["--starting_temp", "0.3", "--temp_min", "0.3"],
                                  ["--image_size", "8", "--num_layers", "3"], ["--straight_through", "--reinmax"]],
                         ids=str)  # fmt: skip
def test_flags_that_go_together_are_let_pass(said: list[str]) -> None:
    parser = train_vae.build_parser()
    train_vae.refuse_contradictions(parser, parser.parse(said))


# --init_from


def test_init_from_takes_the_weights_of_vae_final(finished: Path, tmp_path: Path) -> None:
    nothing_learned = ("--max_steps", "1", "--learning_rate", "1e-30")
    VAE.train(tmp_path, *nothing_learned, "--init_from", str(finished / "vae-final.pt"))
    assert_same_bits(final_weights(tmp_path), final_weights(finished))


@pytest.mark.parametrize("source", ["vae-final.pt", "model"])
@pytest.mark.parametrize(
    ("said", "named"),
    [
        (["--num_tokens", "32"], "--num_tokens 16"),
        (["--hidden_dim", "4", "--num_layers", "1"], "--num_layers 2, --hidden_dim 8"),
        (["--emb_dim", "8", "--num_resnet_blocks", "0"], "--emb_dim 6, --num_resnet_blocks 1"),
        (["--transparent"], "no --transparent"),
    ],
    ids=str,
)
def test_init_from_another_model_names_the_flags_that_differ(
    source: str, said: list[str], named: str, finished: Path, tmp_path: Path
) -> None:
    line = VAE.refused(tmp_path, "--init_from", str(finished / source), *said)
    before, _, differing = line.partition("; they need ")
    assert str(finished / source) in before
    # The normalization has a value per channel, and no flag.
    assert differing.partition(", normalization")[0] == named


def test_init_from_does_not_translate_a_path(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "codebook_dim 6"
    shutil.copytree(finished / "model", folder)
    line = VAE.refused(tmp_path / "run", "--init_from", str(folder), "--emb_dim", "8")
    assert str(folder) in line and line.endswith("; they need --emb_dim 6")


def test_init_from_a_model_with_alpha_says_that_it_is_transparent(tmp_path: Path, trained: Callable[..., Path]) -> None:
    model = trained("--transparent") / "model"
    assert "; they need --transparent, " in VAE.refused(tmp_path / "run", "--init_from", str(model))


# Tars.


@pytest.mark.parametrize("script", [VAE, VQGAN], ids=str)
def test_images_in_tars_train_the_same_model_as_in_a_folder(script: Script, tmp_path: Path) -> None:
    folder, tars = script.data.write(tmp_path / "photos", 24), tmp_path / "tars"
    tars.mkdir()
    for shard in range(2):
        with tarfile.open(tars / f"{shard:05d}.tar", "w") as tar:
            for image in sorted(folder.iterdir())[12 * shard : 12 * (shard + 1)]:
                tar.add(image, image.name)
    runs = [
        script.train(tmp_path / f"run{n}", "--image_folder", str(spec), "--max_steps", "2", "--random_flip")
        for n, spec in enumerate((folder, tars / "{00000..00001}.tar"))
    ]
    assert_same_bits(*map(final_weights, runs))


# The flags of the loss, each against the formula written out on the first batch.


class FirstUpdate:
    """The model, images and noise that the first update of a run sees."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model = train_vae.build_model(args)
        channels = self.model.channels
        dataset = data.open_images(args.image_folder, image_size=args.image_size, channels=channels, seed=args.seed)
        train_set, _ = data.split(len(dataset), args.valid_fraction, args.seed, at_least=args.batch_size)
        stream = data.TrainingStream(
            dataset, train_set, batch_size=args.batch_size, rank=0, world_size=1, seed=args.seed
        )
        batch = next(iter(stream))
        self.images = data.to_unit_range(batch["images"])
        noise = Noise(args.seed, "gumbel").gumbel(0, batch["positions"], self.model.noise_shape)
        self.x = torch.cat([2 * self.images[:, :3] - 1, self.images[:, 3:]], dim=1)
        self.logits = self.model.encoder(self.x).detach()
        self.noisy = self.logits + noise

    def decoded(self, weights: Tensor) -> Tensor:
        """Weights (b, K, s, s) over the codes -> images in normalised space."""
        mixed = torch.einsum("bkhw,kd->bdhw", weights, self.model.codebook.weight)
        return self.model.decoder(mixed).detach()

    def soft(self) -> Tensor:
        return self.decoded(self.noisy.softmax(dim=1))  # the temperature starts at 1

    def hard(self) -> Tensor:
        return self.decoded(F.one_hot(self.noisy.argmax(dim=1), 16).movedim(-1, 1).float())

    def kl(self) -> float:
        q = self.logits.softmax(dim=1)
        return float((q * (q * 16).log()).sum(dim=1).mean())


EXPECTED_LOSS: dict[str, tuple[list[str], Callable[[FirstUpdate], Tensor]]] = {
    "mse": ([], lambda first: F.mse_loss(first.soft(), first.x)),
    "smooth l1": (["--smooth_l1_loss"], lambda first: F.smooth_l1_loss(first.soft(), first.x)),
    "straight-through": (["--straight_through"], lambda first: F.mse_loss(first.hard(), first.x)),
    "reinmax": (["--straight_through", "--reinmax"], lambda first: F.mse_loss(first.hard(), first.x)),
    "kl": (["--kl_loss_weight", "0.5"], lambda first: F.mse_loss(first.soft(), first.x) + 0.5 * first.kl()),
    "transparent": (["--transparent"], lambda first: F.mse_loss(first.soft(), first.x)),
}


@pytest.mark.parametrize("name", EXPECTED_LOSS)
def test_the_first_loss_is_the_formulas(name: str, trained: Callable[..., Path]) -> None:
    flags, expected = EXPECTED_LOSS[name]
    run = trained(*flags)
    args, lines = VAE.arguments_of(run), metrics(run)
    first = FirstUpdate(args)
    assert lines[0]["loss"] == pytest.approx(float(expected(first)), rel=1e-5)
    assert lines[0]["kl"] == pytest.approx(first.kl(), rel=1e-4)
    assert len(lines) == 2
    for line in lines:  # the KL divergence is a mean over batch and positions
        assert line["loss"] == pytest.approx(line["recon_loss"] + args.kl_loss_weight * line["kl"], rel=1e-6)


def test_reinmax_changes_the_gradient_and_not_the_loss(trained: Callable[..., Path]) -> None:
    plain, reinmax = (metrics(trained(*EXPECTED_LOSS[name][0]))[0] for name in ("straight-through", "reinmax"))
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
