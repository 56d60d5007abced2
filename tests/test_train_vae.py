"""train_vae.py: its schedules, its losses, its files; tiny models, generated images, one process."""

from __future__ import annotations

import re
from argparse import Namespace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from reference.vae import Settings, schedule
from tandem import schedules
from tandem.models import DiscreteVAE
from tandem.training import dry_run as rehearsal
from tandem.training.logging import operations
from tandem.training.metrics.directions import COSTS
from tests.scripts import VAE, assert_same_bits, final_weights, metrics, validation_images

SCRIPT = VAE


def schedule_of(step: int, args: Namespace) -> tuple[float, float]:
    """Learning rate and temperature of an update."""
    temperature = schedules.anneal(step, args.starting_temp, args.anneal_rate, args.temp_min)
    return schedules.decay(step, args.learning_rate, args.lr_decay_rate), temperature


@pytest.mark.parametrize(
    "said", [[], ["--starting_temp", "2", "--temp_min", "1.9", "--learning_rate", "0.3"]], ids=["defaults", "hot"]
)
def test_temperature_and_learning_rate_follow_the_recurrence(said: list[str]) -> None:
    args = VAE.parsed(*said)
    names = ("learning_rate", "lr_decay_rate", "starting_temp", "temp_min", "anneal_rate")
    recurrence = schedule(Settings(**{name: getattr(args, name) for name in names}))
    ours = [schedule_of(n, args) for n in range(13_000)]
    np.testing.assert_allclose(ours, list(islice(recurrence, 13_000)), rtol=1e-12)


# A run and what it leaves.


def test_the_log_tells_the_losses_and_the_rate_and_temperature_of_the_update_itself(finished: Path) -> None:
    args = VAE.arguments_of(finished)
    shared = {"step", "samples", "epoch", "loss", "lr", "grad_norm", "bad_samples"}
    shared |= {name for name in COSTS if not name.startswith(("peak_device", "mfu", "evaluation"))}  # of GPUs
    own = {"recon_loss", "kl", "temperature", "skipped_updates", "codes_used", "codes_used_fraction", "perplexity"}
    measured = {"loss", "psnr", "ssim", "codes_used", "codes_used_fraction", "perplexity"}
    measured |= {"variance_kept", "explained_variance"}
    validation = {f"{which}/{key}" for which in ("valid", "valid/ema") for key in measured} | {"evaluation_seconds"}
    for line in metrics(finished):
        assert line.keys() == shared | own | (validation if line["step"] % 2 == 0 else set())
        rate, temperature = schedule_of(line["step"] - 1, args)
        assert line["lr"] == pytest.approx(rate, rel=1e-11) and line["temperature"] == temperature


def test_on_a_device_whose_peak_is_known_lines_and_dry_run_tell_the_share_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (operations, rehearsal):
        monkeypatch.setattr(module, "device_name", lambda device: "NVIDIA L4")
    for line in metrics(VAE.train(tmp_path, "--max_steps", "2")):
        assert line["mfu"] == pytest.approx(line["tflops_per_second"] / 30.3, rel=1e-4) and line["mfu"] > 0
    said = VAE.output_of(tmp_path, "--max_steps", "2", "--dry_run")
    assert re.search(r"/s, \S+ of the peak of 1 x NVIDIA L4 \(30.3 TFLOP/s in fp32\)", said), said


def test_vae_final_is_dalle_pytorchs_file_to_the_key_and_starts_another_run(finished: Path, tmp_path: Path) -> None:
    """tests/test_convert.py reads one that has the keys of the public package."""
    content = torch.load(finished / "vae-final.pt", weights_only=True)
    assert set(content) == {"hparams", "weights"}
    assert content["hparams"] == {
        "image_size": 16, "num_layers": 2, "num_tokens": 16, "channels": 3, "codebook_dim": 6, "hidden_dim": 8,
        "num_resnet_blocks": 1,
    }  # fmt: skip
    assert_same_bits(content["weights"], final_weights(finished))
    VAE.train(tmp_path, "--max_steps", "1", "--learning_rate", "1e-30", "--init_from", str(finished / "vae-final.pt"))
    assert_same_bits(final_weights(tmp_path), final_weights(finished))


def test_the_model_that_is_left_has_the_loss_that_was_validated_also_with_transparency(
    finished: Path, tmp_path: Path
) -> None:
    transparent = VAE.train(tmp_path, "--transparent", "--max_steps", "2")
    for run, name in ((finished, "valid/ema/loss"), (transparent, "valid/loss")):
        images, last = validation_images(VAE.arguments_of(run)), metrics(run)[-1]
        model = DiscreteVAE.from_pretrained(run / "model")
        with torch.no_grad():
            loss = float(model(images, temperature=last["temperature"]).recon_loss)
        assert loss == pytest.approx(last[name], rel=1e-6)
    content = torch.load(transparent / "vae-final.pt", weights_only=True)
    assert content["hparams"]["channels"] == 4 and content["weights"]["decoder.4.weight"].shape == (4, 8, 1, 1)
