"""Autoencoders of diffusers and ours with the same random weights: folders that either writes, and their outputs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.models import VQGAN
from tandem.weights.formats.detection import FORMATS
from tandem.weights.load import load_model
from tests.models.helpers import assert_same_bits
from tests.models.reference.autoencoders import CASES, DIFFUSERS, images
from tests.models.reference.unets import weights_of

DIFFUSERS_CASES = [name for name, case in CASES.items() if case.package in DIFFUSERS]


def random_model(case: str) -> Any:
    """A model of diffusers with random weights, norms among them."""
    model = getattr(importlib.import_module("diffusers"), CASES[case].package)(**CASES[case].arguments).eval()
    shapes = {name: list(weight.shape) for name, weight in model.state_dict().items()}
    model.load_state_dict(weights_of(f"{case} again", shapes))
    return model


def assert_compute_the_same(ours: Any, theirs: Any, case: str) -> None:
    """The latents or the codes of images, and the reconstructions from them. fp32 rounds sums of some hundred terms."""
    pixels = images(case)
    with torch.no_grad():
        if ours.num_codes:
            latents = theirs.encode(2 * pixels - 1).latents
            codes = theirs.quantize(latents)[2][2].view(len(pixels), *latents.shape[2:])
            assert len(codes.unique()) > 3
            torch.testing.assert_close(ours.encode(pixels), codes, rtol=0, atol=0)
            expected, encoded = theirs.decode(latents).sample, codes
        else:
            encoded = theirs.encode(2 * pixels - 1).latent_dist.mean
            torch.testing.assert_close(ours.encode(pixels), encoded, rtol=1e-5, atol=1e-5)
            expected = theirs.decode(encoded).sample
        for reconstruction in (ours.decode(encoded), ours(pixels).reconstruction):
            torch.testing.assert_close(reconstruction, expected / 2 + 0.5, rtol=1e-5, atol=1e-5)


def given_to_a_generator(model: Any, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What pipelines of diffusers do with latents: those of FLUX and, without a shift, of Stable Diffusion 1; and those
    of Stable Diffusion XL (pipeline_stable_diffusion_xl_img2img.py)."""
    config = model.config
    mean, std = (torch.tensor(config[name]).view(1, -1, 1, 1) for name in ("latents_mean", "latents_std"))
    scaled = (latents - (config.shift_factor or 0)) * config.scaling_factor
    return scaled, (latents - mean) * config.scaling_factor / std


def test_latents_of_a_measured_model_have_deviation_1_in_every_pipeline_of_diffusers(tmp_path: Path) -> None:
    """None of them multiplies by both deviations: latents_std is in units of 1 / scaling_factor."""
    torch.manual_seed(0)
    sizes = {"body": "taming", "dim": 8, "ch_mult": [1, 2], "norm_groups": 4, "num_resnet_blocks": [1]}
    ours = VQGAN.from_dict({**sizes, "image_size": 16, "quantizer": "kl", "latent_dim": 4})
    pixels = torch.rand(8, 3, 16, 16)
    with torch.no_grad():
        ours.encoder.quant_conv.weight *= torch.tensor([1, 2, 5, 10] * 2).view(-1, 1, 1, 1)
    ours(pixels)
    ours.quantizer.after_step(0, 0)
    FORMATS["diffusers"].save(ours.eval(), tmp_path)
    theirs = importlib.import_module("diffusers").AutoencoderKL.from_pretrained(tmp_path)
    assert theirs.config.latents_mean == ours.latents_mean and theirs.config.scaling_factor == ours.scaling_factor
    with torch.no_grad():
        latents = theirs.encode(2 * pixels - 1).latent_dist.mean
    scaled, by_channel = given_to_a_generator(theirs, latents)
    assert (scaled.mean().item(), scaled.std().item()) == pytest.approx((0, 1), abs=1e-3)
    torch.testing.assert_close(by_channel.mean((0, 2, 3)), torch.zeros(4), rtol=0, atol=1e-3)
    torch.testing.assert_close(by_channel.std((0, 2, 3)), torch.ones(4), rtol=0, atol=2e-3)
    back = load_model(tmp_path)
    assert back.latents_mean == pytest.approx(ours.latents_mean, rel=1e-5, abs=1e-5)
    assert back.latents_std == pytest.approx(ours.latents_std, rel=1e-5)


def test_channels_of_a_model_of_diffusers_are_kept_with_its_scale(tmp_path: Path) -> None:
    """As Playground 2.5 has them: a scaling_factor beside the deviations, which is that of normalised latents."""
    theirs = random_model("sd")
    stated = {"latents_mean": [-1.6574, 1.886, -1.383, 2.5155], "latents_std": [8.4927, 5.9022, 6.5498, 5.2299]}
    theirs.register_to_config(**stated, scaling_factor=0.5)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    latents = torch.randn(2, 4, 3, 3)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (ours.latents_mean, ours.latents_std))
    expected = given_to_a_generator(theirs, latents)[1]
    torch.testing.assert_close((latents - mean) / std, expected, rtol=1e-5, atol=1e-6)
    FORMATS["diffusers"].save(ours, tmp_path / "back")
    back = type(theirs).from_pretrained(tmp_path / "back").config
    assert back.scaling_factor == 0.5
    for name, values in stated.items():
        assert back[name] == pytest.approx(values, rel=1e-5)
    measure(ours)
    FORMATS["diffusers"].save(ours, tmp_path / "trained")
    trained = type(theirs).from_pretrained(tmp_path / "trained").config
    assert trained.latents_mean == ours.latents_mean and trained.latents_mean != back.latents_mean


def test_channels_that_training_measured_are_not_written_beside_a_scale_that_was_given(tmp_path: Path) -> None:
    """Pipelines of Stable Diffusion XL would normalise by them, and their generators know the scale alone."""
    theirs = random_model("sd")
    theirs.register_to_config(scaling_factor=0.13025)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    for _ in range(5):
        measure(ours)
    assert ours.latents_mean and ours.scaling_factor == 0.13025
    ours.save_pretrained(tmp_path / "kept")
    for name, model in (("back", ours), ("kept and back", VQGAN.from_pretrained(tmp_path / "kept"))):
        FORMATS["diffusers"].save(model, tmp_path / name)
        back = type(theirs).from_pretrained(tmp_path / name).config
        assert back.scaling_factor == 0.13025
        assert [back.get("latents_mean"), back.get("latents_std")] == [None, None]


def measure(model: VQGAN) -> None:
    """An update without a change of the weights."""
    model.train()
    model(torch.rand(2, 3, 16, 16))
    model.quantizer.after_step(0, 0)
    model.eval()


@pytest.mark.parametrize("case", DIFFUSERS_CASES)
def test_a_model_of_diffusers_is_read_and_written_back_and_computes_the_same(case: str, tmp_path: Path) -> None:
    theirs = random_model(case)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    assert ours.config.items() >= {"body": "taming", **CASES[case].ours}.items() and not ours.training
    assert_compute_the_same(ours, theirs, case)
    note = FORMATS["diffusers"].save(ours, tmp_path / "back")
    back = type(theirs).from_pretrained(tmp_path / "back")
    assert note == f"load it by {CASES[case].package}.from_pretrained"
    ours_written, expected = ({k: v for k, v in each.config.items() if k[0] != "_"} for each in (back, theirs))
    assert ours_written == expected
    assert_same_bits(back, theirs)
    assert_compute_the_same(ours, back.eval(), case)


def test_pictures_of_four_channels_that_are_not_square_are_those_of_diffusers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"dim": 8, "ch_mult": [1, 2], "num_resnet_blocks": [1], "norm_groups": 4}
    ours = VQGAN(VQGAN.Config(body="taming", quantizer="kl", channels=4, image_size=(16, 24), **sizes)).eval()
    FORMATS["diffusers"].save(ours, tmp_path)
    theirs = importlib.import_module("diffusers").AutoencoderKL.from_pretrained(tmp_path)
    assert (theirs.config.in_channels, theirs.config.out_channels, theirs.config.sample_size) == (4, 4, [16, 24])
    pictures = torch.rand(2, 4, 16, 24)
    latents = ours.encode(pictures)
    assert latents.shape == (2, 4, 8, 12)
    with torch.no_grad():
        torch.testing.assert_close(theirs.encode(2 * pictures - 1).latent_dist.mean, latents, rtol=1e-4, atol=1e-5)
        expected = (theirs.decode(latents).sample + 1) / 2
        torch.testing.assert_close(ours.decode(latents), expected, rtol=1e-4, atol=1e-5)
    assert load_model(tmp_path).config.items() >= {"channels": 4, "image_size": [16, 24]}.items()
