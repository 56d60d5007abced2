"""Video autoencoders of Wan in diffusers and ours with the same random weights: folders and files that either writes,
their latents and their frames."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import encode
from tandem.models import StreamState, VideoTokenizer
from tandem.weights.formats.detection import FORMATS, detect_format
from tandem.weights.load import load_model
from tests.models.helpers import WAN, assert_same_bits

SIZES: dict[str, Any] = {
    "base_dim": 4, "z_dim": 4, "latents_mean": [0.1, -0.2, 0.0, 3.0], "latents_std": [1.5, 2.0, 3.0, 4.0],
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "2.1": ("AutoencoderKLWan", {**SIZES, "num_res_blocks": 1}),
    "2.2": (
        "AutoencoderKLWan",
        {**SIZES, "decoder_base_dim": 6, "is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12,
         "scale_factor_spatial": 16},
    ),
    "qwen": ("AutoencoderKLQwenImage", SIZES),
    "four channels": ("AutoencoderKLWan", {**SIZES, "in_channels": 4, "out_channels": 4}),
}  # fmt: skip


def random_model(case: str) -> Any:
    """A model of diffusers with random weights, norms among them."""
    class_name, arguments = CASES[case]
    model = getattr(importlib.import_module("diffusers"), class_name)(**arguments).eval()
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        is_norm = weight.ndim > 1 and weight.shape[1:].numel() == 1
        weight.data = torch.randn(weight.shape, generator=generator) * (0.3 if is_norm else 0.06) + is_norm
    return model


@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_diffusers_gives_its_latents_and_frames_whole_and_in_a_stream(case: str, tmp_path: Path) -> None:
    """In fp64; only results, and what diffusers repeats, are rounded to fp32."""
    theirs = random_model(case)
    theirs.save_pretrained(tmp_path)
    ours, theirs = load_model(tmp_path).double(), theirs.double()
    assert isinstance(ours, VideoTokenizer)
    assert ours.latents_mean == pytest.approx(SIZES["latents_mean"]) and ours.has_given_channels
    assert ours.latents_std == pytest.approx(SIZES["latents_std"])
    videos = torch.rand(2, ours.channels, 9, 32, 48, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        posterior = theirs.encode(2 * videos - 1).latent_dist
        moments = ours.posterior(videos)
        expected = torch.cat([posterior.mean, posterior.std], dim=1).float()
        torch.testing.assert_close(moments, expected, rtol=1e-5, atol=1e-5)
        image = theirs.encode(2 * videos[:, :, :1] - 1).latent_dist.mean
        torch.testing.assert_close(ours.encode(videos[:, :, 0]), image[:, :, 0].float(), rtol=1e-5, atol=1e-5)
        frames, clamped = ours.decode(posterior.mean), theirs.decode(posterior.mean).sample.float() / 2 + 0.5
        torch.testing.assert_close(frames.clamp(0, 1), clamped, rtol=0, atol=1e-5)
        assert frames.std() > 0.05 and moments[:, :4].std() > 0.05
        ours.train()  # at once
        torch.testing.assert_close(ours(videos).latents, posterior.mean.float(), rtol=1e-5, atol=1e-5)
        ours.eval()
        state = StreamState()
        parts = [ours.posterior_next(part, state) for part in videos.split([2, 4, 3], dim=2)]
    assert torch.equal(torch.cat(parts, dim=2), moments)


@pytest.mark.parametrize("case", CASES)
def test_every_weight_and_argument_comes_back_to_diffusers(case: str, tmp_path: Path) -> None:
    theirs = random_model(case)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    FORMATS["diffusers"].save(load_model(tmp_path / "ours"), tmp_path / "back")
    back = importlib.import_module("diffusers").AutoencoderKLWan.from_pretrained(tmp_path / "back")
    assert_same_bits(back, theirs)
    for name, value in CASES[case][1].items():
        assert back.config[name] == (pytest.approx(value, rel=1e-5) if name.startswith("latents") else value)
    statistics = {"latents_mean", "latents_std"}
    written, read = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("back", "theirs"))
    shared = {name for name in written if name in read and not name.startswith("_")} - statistics
    assert {name: written[name] for name in shared} == {name: read[name] for name in shared}


def test_wans_own_file_has_the_names_that_diffusers_reads(tmp_path: Path) -> None:
    theirs = random_model("2.1")
    arguments = {**CASES["2.1"][1], "num_res_blocks": 2}  # the only number that the converter of diffusers knows
    theirs = type(theirs)(**arguments).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    FORMATS["wan"].save(ours, tmp_path / "vae.pth")
    original = torch.load(tmp_path / "vae.pth", weights_only=True)
    converter = importlib.import_module("diffusers.loaders.single_file_utils").convert_wan_vae_to_diffusers
    converted = converter(dict(original))
    assert converted.keys() == theirs.state_dict().keys()
    assert all(torch.equal(converted[name], weight) for name, weight in theirs.state_dict().items())


@pytest.mark.parametrize("case", ["2.1", "2.2"])
@pytest.mark.parametrize("part", ["", "model_state"])
def test_wans_own_file_is_recognised_and_its_arguments_follow_from_the_shapes(
    case: str, part: str, tmp_path: Path
) -> None:
    random_model(case).save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    FORMATS["wan"].save(ours, tmp_path / "vae.pth")
    if part:
        torch.save({part: torch.load(tmp_path / "vae.pth", weights_only=True)}, tmp_path / "vae.pth")
    assert detect_format(tmp_path / "vae.pth") is FORMATS["wan"]
    back = load_model(tmp_path / "vae.pth")
    unknown = {"scaling_factor": None, "shift_factor": None}  # no file of Wan holds a scale
    assert back.config == {**ours.config, **unknown}
    for name, weight in back.state_dict().items():
        assert name.startswith("quantizer.") or torch.equal(weight, ours.state_dict()[name])


def test_the_latents_of_a_file_of_the_size_of_wan_2_1_are_normalised_as_published() -> None:
    from tandem.weights.formats import wan

    default = importlib.import_module("diffusers").AutoencoderKLWan.__init__
    defaults = importlib.import_module("inspect").signature(default).parameters
    arguments, statistics = wan.read_config({})
    assert statistics == [defaults["latents_mean"].default, defaults["latents_std"].default]
    assert "are those of Wan 2.1" in wan.assumptions(arguments)
    assert "unknown" in wan.assumptions({**arguments, "init_dim": 12})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "attention": ({"attn_scales": [0.5]}, "its attn_scales is"),
    "one level of time": ({"temperal_downsample": [False, False, True]}, "two true"),
    "channels that are not joined": ({"in_channels": 3, "out_channels": 1}, "one number of channels"),
    "channels of half a pixel": ({"patch_size": 2, "in_channels": 6, "out_channels": 6}, "one number of channels"),
    "channels in words": ({"in_channels": "three", "out_channels": "three"}, "its in_channels"),
    "grey weights of colours": ({"in_channels": 1, "out_channels": 1}, "shape"),
    "levels": ({"dim_mult": [1, 2]}, "its dim_mult is"),
    "statistics": ({"latents_std": [1.0]}, "its latents_mean and latents_std are not two lists of one length"),
    "number of statistics": ({"latents_mean": [0.0], "latents_std": [1.0]}, "its latents have 4 channels"),
    "deviation": ({"latents_std": [1.0, 1.0, -1.0, 1.0]}, "its latents_std is -1.0, not above 0"),
    "a width": ({"base_dim": "wide"}, "its base_dim"),
    "no patches": ({"patch_size": "2"}, "its patch_size"),
    "more layers": ({"num_res_blocks": 2}, "no weight of such a model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_of_another_model_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    random_model("2.1").save_pretrained(tmp_path)
    path, (changes, reason) = tmp_path / "config.json", REFUSED[name]
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=reason) as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"quantizer": "lfq"}, "--quantizer kl"), ({"body": "layers"}, "--body wan"), ({"time_levels": [0]}, "twice"),
     ({"patch_size": 2, "patch": "haar"}, "--patch pixels")],
    ids=str,
)  # fmt: skip
def test_a_model_that_diffusers_lacks_is_not_exported(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    sizes = {**WAN, "ch_mult": [1, 2, 2], "time_levels": [0, 1], "quantizer": "kl", "image_size": 16, "init_dim": 4}
    model = VideoTokenizer.from_dict({**sizes, **changes})
    for name in ("diffusers", "wan"):
        with pytest.raises(ValueError, match=reason):
            FORMATS[name].save(model, tmp_path / name)


def test_a_tool_says_what_the_file_of_a_package_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {**WAN, "ch_mult": [1, 2, 2], "time_levels": [0, 1], "quantizer": "kl", "image_size": 16, "init_dim": 4}
    model = VideoTokenizer.from_dict(sizes)
    FORMATS["wan"].save(model, tmp_path / "wan.pth")
    model.save_pretrained(tmp_path / "model")
    for name, is_assumed in {"wan.pth": True, "model": False}.items():
        flags = ["--model", str(tmp_path / name), "--video_folder", "demo:moving:1", "--image_size", "16"]
        encode.main([*flags, "--output", str(tmp_path / f"latents of {name}"), "--num_workers", "0"])
        assert ("latents_mean and latents_std are unknown" in capsys.readouterr().out) == is_assumed


def test_a_model_of_other_channels_has_no_file_of_wan(tmp_path: Path) -> None:
    sizes = {**WAN, "ch_mult": [1, 2, 2], "time_levels": [0, 1], "quantizer": "kl", "image_size": 16, "init_dim": 4}
    model = VideoTokenizer.from_dict({**sizes, "channels": 4})
    with pytest.raises(ValueError, match="frames of 3 channels, and this model has 4"):
        FORMATS["wan"].save(model, tmp_path / "wan.pth")
    assert not any(tmp_path.iterdir())
