"""Decoders of DALLE2-pytorch: every layout is read, several files become one decoder, what goes out comes back, and
files that were made to do harm are refused."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import packaging._structures
import packaging.version
import pytest
import torch
from torch import Tensor

from tandem.config.models.decoder import DecoderConfig
from tandem.models import Decoder
from tandem.models.building import build_on_meta
from tandem.models.diffusion.schedule import Schedule
from tandem.weights.formats.dalle2 import public_state, save_public_decoder
from tandem.weights.formats.dalle2_config import decoder_config
from tandem.weights.formats.detection import FORMATS
from tests.models.helpers import Call, assert_same_bits, one_line_of, refused
from tests.models.reference.unets import (
    LONG_STRIDE,
    PUBLISHED,
    TIMESTEPS,
    public_config,
    published_config,
    published_shapes,
    stored_decoder,
    weights_of,
)  # fmt: skip

DALLE2 = FORMATS["dalle2"]
CONFIG = public_config("lowres")  # of two unets
SHAPES, OTHERS = stored_decoder()  # ... and the public state dict of it
PUBLIC = {**{name: weight for name, weight in weights_of("two", SHAPES).items() if name.startswith("unets.")}, **OTHERS}
UNUSED = {
    "unets.0.null_text_embed", "unets.0.norm_cond.weight", "unets.0.norm_cond.bias", "unets.1.null_text_embed",
    "unets.1.null_image_embed", "unets.1.null_image_hiddens",
}  # fmt: skip
VERSION = packaging.version.Version("1.10.5rc1")


def of_unet(index: int, state: dict[str, Tensor] = PUBLIC) -> dict[str, Tensor]:
    """What is left of a state dict if the other unet was not trained."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(f"unets.{1 - index}.")}


def laion(path: Path, config: Any = CONFIG, model: Any = PUBLIC, version: Any = "1.15.6", **more: Any) -> Path:
    torch.save({"version": version, "config": {"decoder": config, "seed": 0}, "model": model, **more}, path)
    return path


def bare(path: Path, config: Any = CONFIG, model: Any = PUBLIC) -> Path:
    torch.save(model, path)
    path.with_name("decoder_config.json").write_text(json.dumps({"decoder": config, "train": {"lr": 1e-4}}))
    return path


def averages(factor: float) -> dict[str, Tensor]:
    """The part "ema" of a checkpoint, whose averages are ``factor`` times the trained weights."""
    found: dict[str, Tensor] = {"0.initted": torch.tensor(True), "0.step": torch.tensor(3)}
    for name, tensor in PUBLIC.items():
        if name.startswith("unets."):
            number, weight = name.removeprefix("unets.").split(".", 1)
            found |= {f"{number}.online_model.{weight}": tensor, f"{number}.ema_model.{weight}": factor * tensor}
    return found


def checkpoint(path: Path) -> Path:
    moments = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1e-4}]}
    return laion(path, optim0=moments, sched0={"last_epoch": 3}, optim1=None, steps=torch.tensor([3, 0]), epoch=1,
                 next_task="train", validation_losses=[torch.tensor(0.5)], ema=averages(2.0))  # fmt: skip


def assert_read(model: Decoder, factor: float = 1.0, names: Any = SHAPES) -> None:
    """The weights are those of PUBLIC times ``factor``. 8^-1/2 and back costs one rounding each."""
    state = public_state(model)
    for name in names - UNUSED - OTHERS.keys():
        torch.testing.assert_close(state[name], factor * PUBLIC[name], rtol=2**-22, atol=0, msg=name)


@pytest.mark.parametrize("layout", [laion, bare, checkpoint])
def test_every_layout_gives_the_unets_and_what_is_around_them(layout: Any, tmp_path: Path) -> None:
    model = DALLE2.load(layout(tmp_path / "latest.pth"))
    assert_read(model, 2.0 if layout is checkpoint else 1.0, SHAPES.keys())
    config = DecoderConfig(**model.config)
    assert config.image_sizes == [8, 16] and config.noise_schedule == ["cosine", "linear"]
    assert (config.timesteps, config.objective, config.learned_variance) == (TIMESTEPS, ["noise"] * 2, [0, 0])
    assert config.lowres_condition == "noise" and not config.zero_terminal_snr and not model.training
    assert [unet.dim_mults for unet in config.unets()] == [[1], [1, 2, 3]]


def test_either_weights_of_a_checkpoint_are_taken(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoint.pth")
    for which, factor in (("best", 2.0), ("ema", 2.0), ("online", 1.0)):
        assert_read(DALLE2.load(path, weights=which), factor, SHAPES.keys())
    plain = laion(tmp_path / "plain.pth")
    assert "holds no moving average" in one_line_of(lambda path: DALLE2.load(path, weights="ema"), plain)


def test_a_version_is_skipped_and_none_of_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = laion(tmp_path / "latest.pth", version=VERSION)
    monkeypatch.setitem(sys.modules, "packaging.version", types.ModuleType("packaging.version"))  # nothing in it
    monkeypatch.setitem(sys.modules, "packaging._structures", types.ModuleType("packaging._structures"))
    assert_read(DALLE2.load(path), names=SHAPES.keys())


def test_a_file_of_the_first_unet_alone_is_a_decoder_and_one_of_the_second_alone_is_none(tmp_path: Path) -> None:
    first = DALLE2.load(laion(tmp_path / "1.pth", model=of_unet(0)))
    assert first.image_sizes == [8] and len(first.unets) == 1
    second = laion(tmp_path / "2.pth", model=of_unet(1))
    assert "holds unet 2 and no unet 1" in refused(DALLE2.load, second)


def test_what_the_public_package_would_load_strictly_is_written_and_comes_back(tmp_path: Path) -> None:
    """All names and shapes, and all values but those that nothing uses."""
    model = DALLE2.load(laion(tmp_path / "latest.pth"))
    ours = public_state(model)
    assert {name: list(tensor.shape) for name, tensor in ours.items()} == SHAPES
    assert_read(model, names=SHAPES.keys())
    for name, tensor in OTHERS.items():
        found = ours[name] if len(tensor) == len(ours[name]) else ours[name][::LONG_STRIDE]
        assert torch.allclose(found, tensor, rtol=2**-22, atol=1e-12), name  # fp64 there and here, rounded to fp32
    save_public_decoder(model, tmp_path / "ours.pth")
    again = DALLE2.load(tmp_path / "ours.pth")
    assert again.config == model.config
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=2**-22, atol=0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_decoders_have_the_public_names_and_shapes_here(name: str) -> None:
    model = build_on_meta(lambda: Decoder(decoder_config(published_config(name))))
    assert {each: list(tensor.shape) for each, tensor in public_state(model).items()} == published_shapes(name)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_table_of_noise_says_whether_its_last_level_is_noise_alone(
    zero: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    schedules = [Schedule.from_name(name, TIMESTEPS, zero_terminal_snr=zero) for name in ("cosine", "linear")]
    tables = {f"noise_schedulers.{n}.alphas_cumprod": (each.alpha**2).to(dtype) for n, each in enumerate(schedules)}
    config = {**CONFIG, "predict_v": True}
    model = DALLE2.load(laion(tmp_path / "decoder.pth", config, {**PUBLIC, **tables}))
    assert model.config["zero_terminal_snr"] is zero
    for ours, theirs in zip(model.schedules, schedules, strict=True):
        assert torch.equal(ours.alpha, theirs.alpha)
    save_public_decoder(model, tmp_path / "again.pth")
    assert DALLE2.load(tmp_path / "again.pth").config == model.config


def test_names_of_before_1_15_and_half_precision_are_read(tmp_path: Path) -> None:
    model = {name.replace(".cross_attn.", ".cross_attn.fn."): tensor.half() for name, tensor in PUBLIC.items()}
    read = DALLE2.load(laion(tmp_path / "latest.pth", model={**model, **OTHERS}))
    assert {weight.dtype for weight in read.parameters()} == {torch.float32}
    torch.testing.assert_close(
        public_state(read)["unets.1.to_out.weight"], PUBLIC["unets.1.to_out.weight"], rtol=1e-3, atol=1e-4
    )


def test_keys_without_any_effect_there_have_none_here(tmp_path: Path) -> None:
    """As in the public package, whose README itself gives one that does nothing; CLIP's weights are left out."""
    unet = {**CONFIG["unets"][1], "sparse_attn_window": 3, "lowres_cond": False, "final_conv_kernel_size": 1}
    config = {**CONFIG, "unets": [CONFIG["unets"][0], unet], "colour": 1}
    model = {**PUBLIC, "clip.clip.logit_scale": torch.ones(())}
    found = DALLE2.load(laion(tmp_path / "latest.pth", config, model))
    plain = DALLE2.load(laion(tmp_path / "plain.pth"))
    assert found.config == plain.config
    assert_same_bits(found.state_dict(), plain.state_dict())


def changed(**changes: Any) -> dict[str, Any]:
    return {**CONFIG, **changes}


def with_unet(**changes: Any) -> dict[str, Any]:
    return {**CONFIG, "unets": [CONFIG["unets"][0], {**CONFIG["unets"][1], **changes}]}


def doubled(times: int) -> list[Any]:
    """2^times lists to whoever walks through them, of which few are in the file."""
    value: list[Any] = []
    for _ in range(times):
        value = [value, value]
    return value


TABLE = "noise_schedulers.1.alphas_cumprod"
# What differs from a decoder's file, in the arguments of `laion`, and what the message has to say.
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no unets": ({"config": changed(unets=[])}, "unets"),
    "one unet": ({"config": changed(unets=CONFIG["unets"][:1])}, "unet 2"),
    "a configuration that is a list": ({"config": []}, "no part about a decoder"),
    "sizes": ({"config": changed(image_sizes=[8])}, "image_sizes [8]"),
    "schedule": ({"config": changed(beta_schedule="exp")}, "['exp', 'exp']"),
    "more blocks": ({"config": with_unet(num_resnet_blocks=2)}, "should have shape"),
    "a huge width": ({"config": with_unet(dim=10**12)}, "dim 1000000000000"),
    "many blocks": ({"config": with_unet(num_resnet_blocks=4_000_000)}, "many more weights"),
    "a dict as a width": ({"config": with_unet(dim={})}, "dim {}"),
    "groups": ({"config": with_unet(resnet_groups=3)}, "resnet_groups 3"),
    "2^40 sizes": ({"config": changed(image_sizes=[doubled(40)])}, "1048576"),
    "no weights": ({"model": {"a": torch.ones(1)}}, "no weights of unets"),
    "a word as a weight": ({"model": {"unets.0.a": "b"}}, "unets.0.a"),
    "a VQGAN": ({"model": {**PUBLIC, "vaes.0.a": torch.ones(1)}}, "VQGAN"),
    "stride 0": ({"model": {**PUBLIC, "unets.0.to_out.bias": torch.zeros(1).expand(10**9)}}, "larger than"),
    "code as the version": ({"version": Call(os.mkdir, "ran")}, "posix.mkdir"),
    "code in the weights": ({"model": Call(os.system, "mkdir ran")}, "posix.system"),
    "a function of packaging": ({"version": Call(packaging.version.parse, "1.0")}, "packaging.version.parse"),
    "cosines": ({"config": with_unet(cosine_sim_self_attn=True)}, "unets[1].cosine_sim_self_attn True: here"),
    "groups of a level": ({"config": with_unet(resnet_groups=[4, 4, 2])}, "not the same for all levels"),
    "texts for the second": ({"config": with_unet(cond_on_text_encodings=True)}, "conditioned on texts"),
    "a retired schedule": ({"config": changed(beta_schedule="jsd")}, "cosine, linear, sigmoid"),
    "other noise": ({"model": {**PUBLIC, TABLE: PUBLIC[TABLE] * 1.01}}, "not those of its schedule"),
    "a level too few": ({"model": {**PUBLIC, TABLE: PUBLIC[TABLE][1:]}}, "unet 2 has 49 noise levels"),
    "noise that is none": ({"model": {**PUBLIC, TABLE: PUBLIC[TABLE] * torch.nan}}, "not those of its schedule"),
    "whole numbers of noise": ({"model": {**PUBLIC, TABLE: PUBLIC[TABLE].long()}}, "no table of numbers"),
    "a version as weights": ({"model": VERSION}, "no dict of names"),
    "a version as a number": ({"config": with_unet(dim=VERSION)}, "Ignored"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_decoder_is_refused_in_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong, complaint = BROKEN[name]
    path = laion(tmp_path / "latest.pth", **wrong)
    line = refused(DALLE2.load, path)
    assert complaint in line and str(path) in line
    assert not (tmp_path / "ran").exists()


def test_a_file_without_a_configuration_and_a_pipe_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "latest.pth"
    assert "cannot read" in one_line_of(DALLE2.load, path)
    torch.save(PUBLIC, path)
    assert "there is no " in one_line_of(DALLE2.load, path)
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in one_line_of(DALLE2.load, path)


@pytest.mark.parametrize(("changes", "complaint"), [
    ({"cross_attn_heads": [4]}, "(8, 64)"), ({"cond_dim": [5]}, "cond_dim"), ({"dim_mults": [[2, 2]]}, "dim_mults"),
    ({"condition_on": ("text",), "image_embed_dim": None, "text_embed_dim": 7}, "text"),
    ({"switches": [("coordinates",)]}, "coordinates"),
    ({"noise_schedule": ["flow"], "objective": ["flow"]}, "'flow'"),
])  # fmt: skip
def test_a_decoder_that_the_public_package_cannot_have_is_not_written(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    small: dict[str, Any] = {
        "image_sizes": [8], "dim": [8], "dim_mults": [[1]], "resnet_groups": [4], "image_embed_dim": 5, "timesteps": 9
    }  # fmt: skip
    save_public_decoder(Decoder(DecoderConfig(**small)), tmp_path / "fine.pth")
    said = refused(save_public_decoder, Decoder(DecoderConfig(**{**small, **changes})), tmp_path / "file.pth")
    assert complaint in said and not (tmp_path / "file.pth").exists()
