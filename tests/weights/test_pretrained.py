"""Weights on the disk. What is true of the folders of every model is in test_every_model.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tandem.models import DiscreteVAE
from tandem.weights.formats.dalle import save_dalle
from tandem.weights.formats.detection import FORMATS
from tests.models.helpers import VAE, assert_same_bits, one_line_of
from tests.models.reference import tokenizers


def small_vae(**overrides: Any) -> DiscreteVAE:
    return DiscreteVAE.from_dict({**VAE, **overrides})


def test_weights_in_any_memory_format_are_saved(tmp_path: Path) -> None:
    model = small_vae().to(memory_format=torch.channels_last)
    model.save_pretrained(tmp_path)
    save_dalle(model, tmp_path / "vae.pt")
    assert_same_bits(DiscreteVAE.from_pretrained(tmp_path), model)
    assert_same_bits(FORMATS["dalle"].load(tmp_path / "vae.pt"), model)


def test_a_run_without_a_model_yet_says_how_to_get_one(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for folder in (tmp_path / "run", tmp_path / "run" / "model"):
        complaint = one_line_of(DiscreteVAE.from_pretrained, folder)
        assert f"convert.py export {tmp_path / 'run'} DIR --to model" in complaint


def test_a_dalle_file_is_taken_by_a_model_that_differs_in_its_training_alone(tmp_path: Path) -> None:
    """What it holds is in tests/test_train_vae.py."""
    model, path = small_vae(num_resnet_blocks=1), tmp_path / "vae-final.pt"
    save_dalle(model, path)
    other = small_vae(num_resnet_blocks=1, image_size=32, smooth_l1_loss=True)
    other.load_weights_from(FORMATS["dalle"].load(path))
    assert_same_bits(other, model)
    third = small_vae(num_tokens=7, hidden_dim=8, transparent=True)
    complaint = one_line_of(lambda file: third.load_weights_from(FORMATS["dalle"].load(file), str(file)), path)
    assert "they need transparent False, num_tokens 13, num_resnet_blocks 1, hidden_dim 5" in complaint


def test_a_dalle_file_of_before_1_6_0_is_read_as_three_channels_and_gives_the_public_codes(tmp_path: Path) -> None:
    """96 of the 104 releases of DALLE-pytorch wrote no `channels`. What is written back has all seven hparams."""
    path, state = tmp_path / "vae.pt", tokenizers.state_of("vae")
    torch.save({"hparams": tokenizers.VAE, "weights": state}, path)
    model = FORMATS["dalle"].load(path)
    assert_same_bits(model.state_dict(), state)
    codes = model.get_codebook_indices(tokenizers.images("vae"))
    assert torch.equal(codes, tokenizers.stored_output("vae", "codes"))
    public = tokenizers.stored_output("vae", "reconstruction") / 2 + 0.5  # its decoder leaves them normalised
    torch.testing.assert_close(model.decode(codes), public, rtol=0, atol=1e-5)
    save_dalle(model, tmp_path / "back.pt")
    content = torch.load(tmp_path / "back.pt", weights_only=True)
    assert content["hparams"] == {**tokenizers.VAE, "channels": 3}
    assert_same_bits(content["weights"], state)
