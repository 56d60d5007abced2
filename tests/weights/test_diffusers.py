"""Autoencoders of diffusers and ours with the same random weights: folders that either writes, and their outputs."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from einops import rearrange
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from tandem.data.stores.latents import _as_stored
from tandem.models import VQGAN
from tandem.weights.formats.detection import FORMATS
from tandem.weights.formats.taming import GROUPS
from tandem.weights.load import load_model
from tests.models.helpers import assert_same_bits, one_line_of, some
from tests.models.reference.autoencoders import CASES, DIFFUSERS, images, of_diffusers
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


FLUX_2 = of_diffusers(
    [16, 32, 64, 64], layers_per_block=2, norm_num_groups=16, latent_channels=6, sample_size=64, batch_norm_eps=1e-3
)


def random_flux_2(**changed: Any) -> Any:
    """An AutoencoderKLFlux2 with random weights, and a BatchNorm as if after training."""
    theirs = diffusers.AutoencoderKLFlux2(**{**FLUX_2, **changed}).eval()
    shapes = {name: list(parameter.shape) for name, parameter in theirs.named_parameters()}
    theirs.load_state_dict(weights_of("flux2", shapes), strict=False)
    theirs.bn.running_mean.copy_(some(len(theirs.bn.running_mean)))
    theirs.bn.running_var.copy_(some(len(theirs.bn.running_var), seed=2).square() + 0.1)
    return theirs


def of_flux_2_pipeline(theirs: Any, pixels: torch.Tensor) -> torch.Tensor:
    """The latents of images as the pipeline gives them to its generator, in patches."""
    pipeline = diffusers.Flux2Pipeline
    held = SimpleNamespace(vae=theirs, _patchify_latents=pipeline._patchify_latents)
    with torch.no_grad():
        return pipeline._encode_vae_image(held, 2 * pixels - 1, None)


def test_flux_2_is_read_and_its_latents_are_normalised_as_its_pipeline_does(tmp_path: Path) -> None:
    """By 4 numbers for each channel, one for each place of a patch of 2 x 2; `encode.py --normalize channels`."""
    theirs = random_flux_2()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    assert ours.config.items() >= {"latent_patch": 2, "latent_dim": 6, "scaling_factor": ours.scaling_factor}.items()
    assert ours.has_given_channels and len(ours.latents_mean) == len(ours.latents_std) == 24
    assert_compute_the_same(ours, theirs, "sd")
    pixels = images("sd")
    settings = {
        "latent": "mean", "normalize": "channels", "grid": [6, 2, 4], "dtype": "float32", "config": ours.config,
        "latents_mean": ours.latents_mean, "latents_std": ours.latents_std,
    }  # fmt: skip
    stored = _as_stored(ours.posterior(pixels), lambda: torch.empty(0), settings)
    expected = of_flux_2_pipeline(theirs, pixels)
    torch.testing.assert_close(F.pixel_unshuffle(stored, 2), expected, rtol=1e-4, atol=1e-5)
    odd = {**settings, "grid": [6, 1, 3]}  # a film or an image of other sides
    part = _as_stored(ours.posterior(pixels)[:, :, :1, :3], lambda: torch.empty(0), odd)
    torch.testing.assert_close(part, stored[:, :, :1, :3])


def test_flux_2_comes_back_from_training_with_the_statistics_of_its_latents(tmp_path: Path) -> None:
    theirs = random_flux_2()
    theirs.save_pretrained(tmp_path / "theirs")
    ours, pixels = load_model(tmp_path / "theirs"), images("sd")
    ours.save_pretrained(tmp_path / "kept")
    assert len(json.loads((tmp_path / "kept" / "config.json").read_text())["latents_mean"]) == 24
    for number, model in enumerate((ours, VQGAN.from_pretrained(tmp_path / "kept"))):
        note = FORMATS["diffusers"].save(model, tmp_path / f"back{number}")
        assert note == "load it by AutoencoderKLFlux2.from_pretrained"
        back = diffusers.AutoencoderKLFlux2.from_pretrained(tmp_path / f"back{number}").eval()
        assert_same_bits(dict(back.named_parameters()), dict(theirs.named_parameters()))
        # fp32 rounds mean^2 + deviation^2.
        torch.testing.assert_close(
            of_flux_2_pipeline(back, pixels), of_flux_2_pipeline(theirs, pixels), rtol=1e-4, atol=1e-5
        )
        written, expected = ({k: v for k, v in each.config.items() if k[0] != "_"} for each in (back, theirs))
        assert {**written, "patch_size": (2, 2)} == {**expected, "batch_norm_eps": 1e-4}
    measure(ours, pixels)
    FORMATS["diffusers"].save(ours, tmp_path / "trained")
    trained = diffusers.AutoencoderKLFlux2.from_pretrained(tmp_path / "trained").bn
    with torch.no_grad():
        latents = theirs.encode(2 * pixels - 1).latent_dist.mean
    patches = rearrange(latents, "b c (h y) (w x) -> (c y x) (b h w)", y=2, x=2).double()
    mean, variance = (tensor.double() for tensor in (theirs.bn.running_mean, theirs.bn.running_var + 1e-3))
    square = 0.99 * (variance + mean.square()) + 0.01 * patches.square().mean(1)
    mean = 0.99 * mean + 0.01 * patches.mean(1)
    torch.testing.assert_close(trained.running_mean.double(), mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(trained.running_var.double() + 1e-4, square - mean.square(), rtol=1e-4, atol=1e-5)


def test_flux_2s_own_file_is_the_same_model(tmp_path: Path) -> None:
    """It has latent diffusion's names, but for two convolutions inside of the encoder and of the decoder."""
    random_flux_2(norm_num_groups=GROUPS, block_out_channels=[32, 32, 64, 64]).save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    FORMATS["taming"].save(ours, tmp_path / "ldm.ckpt")
    state = torch.load(tmp_path / "ldm.ckpt", weights_only=True)["state_dict"]
    outer = {"quant_conv": "encoder.quant_conv", "post_quant_conv": "decoder.post_quant_conv"}
    state = {".".join([outer.get(name.split(".")[0], name.split(".")[0]), *name.split(".")[1:]]): w
             for name, w in state.items()}  # fmt: skip
    statistics = load_file(tmp_path / "theirs" / "diffusion_pytorch_model.safetensors")
    statistics = {name: tensor for name, tensor in statistics.items() if name.startswith("bn.")}
    save_file({**state, **statistics}, tmp_path / "ae.safetensors")
    own = load_model(tmp_path / "ae.safetensors")
    assert own.config["latent_patch"] == 2 and own.has_given_channels
    epsilon = 1e-4  # of its code; that of `theirs` is another
    assert own.latents_std == pytest.approx([math.sqrt(x + epsilon) for x in statistics["bn.running_var"].tolist()])
    weights = [{k: v for k, v in model.state_dict().items() if "stats" not in k} for model in (own, ours)]
    assert_same_bits(*weights)


@pytest.mark.parametrize("changed, complaint", [
    ({"patch_size": [2, 4]}, "its patch_size is [2, 4]"), ({"patch_size": "22"}, "its patch_size is 22"),
    ({"patch_size": [4, 4]}, "has 24 numbers, and its latents have 96 channels"),
    ({"patch_size": [10**9] * 2}, "its patch_size is"), ({"batch_norm_eps": "small"}, "batch_norm_eps small is no"),
    ({"batch_norm_eps": -100}, "is not finite"),
    ({"decoder_block_out_channels": [8] * 4}, "its decoder_block_out_channels is [8"),
])  # fmt: skip
def test_a_configuration_of_flux_2_that_fits_no_model_is_one_line(
    changed: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    random_flux_2().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    assert complaint in one_line_of(load_model, tmp_path)


def test_attention_in_the_encoder_alone_is_that_of_diffusers_and_comes_back(tmp_path: Path) -> None:
    """MAR's KL-16, as it was converted."""
    attended = of_diffusers([32, 64, 64], (2,), layers_per_block=1, norm_num_groups=16, latent_channels=6)
    theirs = diffusers.AutoencoderKL(**{**attended, "up_block_types": ["UpDecoderBlock2D"] * 3}).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    assert ours.config["attention_levels"] == [2] and not ours.config["decoder_attention"]
    assert_compute_the_same(ours, theirs, "sd")
    FORMATS["diffusers"].save(ours, tmp_path / "back")
    back = type(theirs).from_pretrained(tmp_path / "back")
    assert back.config.up_block_types == theirs.config.up_block_types
    assert_same_bits(back, theirs)


def measure(model: VQGAN, pixels: torch.Tensor | None = None) -> None:
    """An update without a change of the weights."""
    model.train()
    model(torch.rand(2, 3, 16, 16) if pixels is None else pixels)
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
