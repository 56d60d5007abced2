"""Decoders of DALLE2-pytorch: every layout is read, several files become one decoder, what goes out comes back, and
files that were made to do harm are refused."""

from __future__ import annotations

import json
import math
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

from models import Unet
from models.files.dalle2 import (
    build_unets,
    check_is_public,
    from_public,
    read_public,
    save_public,
    to_public,
)  # fmt: skip
from models.files.dalle2_config import DECODER_WIDE
from models.unets.config import UnetConfig
from tests.models.helpers import Call, assert_same_bits, one_line_of, refused
from tests.models.reference.unets import (
    BASE,
    CASES,
    LONG_STRIDE,
    TEXT,
    TIMESTEPS,
    public_config,
    stored,
    stored_decoder,
    weights_of,
)  # fmt: skip

CONFIG = public_config("lowres")  # of two unets
SHAPES, OTHERS = stored_decoder()  # ... and the public state dict of it
PUBLIC = {**{name: weight for name, weight in weights_of("two", SHAPES).items() if name.startswith("unets.")}, **OTHERS}
UNUSED = {
    "unets.0.null_text_embed", "unets.0.norm_cond.weight", "unets.0.norm_cond.bias", "unets.1.null_text_embed",
    "unets.1.null_image_embed", "unets.1.null_image_hiddens",
}  # fmt: skip
VERSION = packaging.version.Version("1.10.5rc1")
Decoder = dict[str, Any]


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


def expected(index: int, factor: float = 1.0) -> dict[str, Tensor]:
    """Our weights of a unet of PUBLIC: 8 is the size of the heads."""
    names = {name: tensor for name, tensor in of_unet(index).items() if name not in UNUSED and name not in OTHERS}
    ours = {name.removeprefix(f"unets.{index}."): factor * tensor for name, tensor in names.items()}
    return {name: tensor * 8**-0.5 if "fn.fn.to_q" in name else tensor for name, tensor in ours.items()}


@pytest.mark.parametrize("layout", [laion, bare, checkpoint])
def test_every_layout_gives_the_unets_and_what_is_around_them(layout: Any, tmp_path: Path) -> None:
    found = read_public([layout(tmp_path / "latest.pth")])
    factor = 2.0 if layout is checkpoint else 1.0
    for index, (arguments, weights) in enumerate(found.unets):
        assert_same_bits(weights, expected(index, factor))
        assert arguments["lowres_cond"] is arguments["lowres_noise_cond"] is (index == 1)
    assert found.settings == {
        **DECODER_WIDE, "image_sizes": [8, 16], "timesteps": TIMESTEPS, "beta_schedule": ["cosine", "linear"],
        "objective": ["noise", "noise"], "learned_variance": [False, False], "sample_timesteps": [None, None],
        "random_crop_sizes": [None, None], "use_noise_for_lowres_cond": [False, True],
        "use_blur_for_lowres_cond": [False, True], "p2_loss_weight_gamma": [0.0, 0.0],
    }  # fmt: skip
    assert [unet.config["dim_mults"] for unet in build_unets(found)] == [[1], [1, 2, 3]]


def test_either_weights_of_a_checkpoint_are_taken(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoint.pth")
    for which, factor in (("best", 2.0), ("ema", 2.0), ("online", 1.0)):
        assert_same_bits(read_public([path], weights=which).unets[1][1], expected(1, factor))
    plain = laion(tmp_path / "plain.pth")
    assert "holds no moving average" in one_line_of(lambda path: read_public([path], weights="ema"), plain)


def test_a_version_is_skipped_and_none_of_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = laion(tmp_path / "latest.pth", version=VERSION)
    monkeypatch.setitem(sys.modules, "packaging.version", types.ModuleType("packaging.version"))  # nothing in it
    monkeypatch.setitem(sys.modules, "packaging._structures", types.ModuleType("packaging._structures"))
    assert_same_bits(read_public([path]).unets[0][1], expected(0))


def test_files_of_one_unet_each_become_one_decoder(tmp_path: Path) -> None:
    """Each with a configuration of both, of which one part was never trained; in any order."""
    first = laion(
        tmp_path / "1.pth",
        {**CONFIG, "beta_schedule": ["sigmoid", "cosine"], "predict_v": True, "predict_x_start": True},
        of_unet(0),
    )
    second = laion(
        tmp_path / "2.pth", {**CONFIG, "beta_schedule": ["cosine", "jsd"], "predict_x_start": True}, of_unet(1)
    )
    for paths in ([first, second], [second, first]):
        found = read_public(paths)
        for index, (_, weights) in enumerate(found.unets):
            assert_same_bits(weights, expected(index))
        assert found.settings["beta_schedule"] == ["sigmoid", "jsd"]
        assert found.settings["objective"] == ["v", "x_start"]
    assert len(read_public([first]).unets) == 1


def test_files_that_make_no_decoder_together_are_refused(tmp_path: Path) -> None:
    first, second, both = (laion(tmp_path / f"{index}.pth", model=model) for index, model in
                           enumerate((of_unet(0), of_unet(1), PUBLIC)))  # fmt: skip
    slow = laion(tmp_path / "slow.pth", {**CONFIG, "timesteps": 20}, of_unet(1))
    large = laion(tmp_path / "large.pth", {**CONFIG, "image_sizes": [4, 16]}, of_unet(1))
    for paths, numbers, complaint in (
        ([second], None, "unet 1 is in none of the files; give the file that holds it too"),
        ([first, both], None, f"unet 1 is in {first} and in {both}: say which to take from each"),
        ([first, both], [[1], [3]], f"{both} holds no unet 3; it holds 1, 2"),
        ([first, both], [[1]], "unet numbers are given for 1 files, and there are 2"),
        ([first, slow], None, f"different timesteps: [20, {TIMESTEPS}]"),
        ([first, large], None, "unet 2 enlarges images of [4], but the ones before make [8]"),
    ):
        assert complaint in refused(read_public, paths, numbers=numbers)
    assert_same_bits(read_public([first, both], numbers=[[1], [2]]).unets[1][1], expected(1))


def test_what_the_public_package_would_load_strictly_is_written_and_comes_back(tmp_path: Path) -> None:
    """All names and shapes, and all values but those that nothing uses. 8^-1/2 and back costs one rounding each."""
    unets = build_unets(read_public([laion(tmp_path / "latest.pth")]))
    angles = (torch.arange(TIMESTEPS + 1, dtype=torch.float64) / TIMESTEPS + 0.008) / 1.008 * math.pi / 2
    cosine = (1 - (angles[1:].cos() / angles[:-1].cos()) ** 2).clamp(max=0.999)  # Nichol & Dhariwal 2021, equation 17
    linear = torch.linspace(1e-4, 0.02, TIMESTEPS, dtype=torch.float64) * 1000 / TIMESTEPS
    written = to_public(unets, [cosine, linear])
    assert {name: list(tensor.shape) for name, tensor in written.items()} == SHAPES
    for name in SHAPES.keys() - UNUSED - OTHERS.keys():
        if "fn.fn.to_q" in name:
            assert torch.allclose(written[name], PUBLIC[name], rtol=2**-23, atol=0)
        else:
            assert torch.equal(written[name], PUBLIC[name]), name
    for name, tensor in OTHERS.items():
        ours = written[name] if len(tensor) == len(written[name]) else written[name][::LONG_STRIDE]
        assert torch.allclose(ours, tensor, rtol=2**-22, atol=1e-12), name  # fp64 there and here, rounded to fp32

    settings = {"image_sizes": [8, 16], "timesteps": TIMESTEPS, "beta_schedule": ["cosine", "linear"]}
    save_public(tmp_path / "ours.pth", unets, settings, [cosine, linear])
    again = read_public([tmp_path / "ours.pth"])
    for unet, other in zip(unets, build_unets(again), strict=True):
        assert unet.config == other.config
        assert all(
            torch.allclose(a, b, rtol=2**-22, atol=0)
            for a, b in zip(unet.parameters(), other.parameters(), strict=True)
        )
    assert again.settings["image_sizes"] == [8, 16] and again.settings["beta_schedule"] == ["cosine", "linear"]


@pytest.mark.parametrize("case", CASES)
def test_every_unet_comes_back_from_the_public_form_bit_by_bit(case: str) -> None:
    """Heads of size 16, because 1/4 is a number of fp32, and 8^-1/2 is none."""
    arguments = public_config(case)["unets"][-1]
    mine = Unet.made({**arguments, "attn_dim_head": 16, "cond_on_image_embeds": True, "lowres_cond": False})
    public = {name.removeprefix("unets.0."): tensor for name, tensor in to_public([mine]).items()}
    scaled = {**arguments, "attn_dim_head": 16, "cond_on_image_embeds": True}
    assert_same_bits(from_public(scaled, public), mine.state_dict())
    if not CASES[case].is_second and case not in ("unconditional", "self_cond"):
        assert public.keys() == stored(case).shapes.keys()


def test_a_scaled_embedding_is_written_as_larger_weights() -> None:
    plain, scaled = ({**BASE, "cond_on_image_embeds": True, "image_embed_scale": scale} for scale in (1.0, 4.0))
    weights = Unet.made(plain).state_dict()
    states = []
    for arguments in (plain, scaled):
        unet = Unet.made(arguments)
        unet.load_state_dict(weights)
        states.append(to_public([unet]))
    changed = {name for name in states[0] if not torch.equal(states[0][name], states[1][name])}
    assert changed == {"unets.0.image_to_tokens.0.weight", "unets.0.to_image_hiddens.0.weight"}
    assert all(torch.equal(4 * states[0][name], states[1][name]) for name in changed)


def test_names_of_before_1_15_and_half_precision_are_read(tmp_path: Path) -> None:
    model = {name.replace(".cross_attn.", ".cross_attn.fn."): tensor.half() for name, tensor in PUBLIC.items()}
    found = read_public([laion(tmp_path / "latest.pth", model=model)])
    assert found.unets[1][1].keys() == expected(1).keys()
    assert {tensor.dtype for _, weights in found.unets for tensor in weights.values()} == {torch.float32}
    build_unets(found)


def test_keys_without_any_effect_there_have_none_here(tmp_path: Path) -> None:
    """As in the public package, whose README itself gives one that does nothing; CLIP's weights are left out."""
    unet = {**CONFIG["unets"][1], "sparse_attn_window": 3, "lowres_cond": False}
    config = {**CONFIG, "unets": [CONFIG["unets"][0], unet], "colour": 1}
    model = {**PUBLIC, "clip.clip.logit_scale": torch.ones(())}
    found = read_public([laion(tmp_path / "latest.pth", config, model)])
    assert found.unets[1][0] == read_public([laion(tmp_path / "plain.pth")]).unets[1][0]
    assert_same_bits(found.unets[1][1], expected(1))


def changed(**changes: Any) -> Decoder:
    return {**CONFIG, **changes}


def with_unet(**changes: Any) -> Decoder:
    return {**CONFIG, "unets": [CONFIG["unets"][0], {**CONFIG["unets"][1], **changes}]}


def doubled(times: int) -> list[Any]:
    """2^times lists to whoever walks through them, of which few are in the file."""
    value: list[Any] = []
    for _ in range(times):
        value = [value, value]
    return value


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
    "a version as weights": ({"model": VERSION}, "no dict of names"),
    "a version as a number": ({"config": with_unet(dim=VERSION)}, "Ignored"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_decoder_is_refused_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    wrong, complaint = BROKEN[name]
    path = laion(tmp_path / "latest.pth", **wrong)
    line = refused(lambda: build_unets(read_public([path])))
    assert complaint in line and (str(path) in line or line.startswith("unet "))
    assert not (tmp_path / "ran").exists()


def test_a_file_without_a_configuration_a_file_cut_short_and_a_pipe_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "latest.pth"
    assert "cannot read" in one_line_of(lambda path: read_public([path]), path)
    for make, complaint in (
        (lambda: torch.save(PUBLIC, path), "there is no "),
        (lambda: torch.save({"config": 3, "model": PUBLIC}, path), "no part about a decoder"),
        (lambda: path.write_bytes(laion(path).read_bytes()[:-100]), "not a zip file"),
        (lambda: (path.unlink(), os.mkfifo(path)), "not a regular file"),
    ):
        make()
        assert complaint in one_line_of(lambda path: read_public([path]), path)


PRIVATE: dict[str, tuple[int, dict[str, Any], str]] = {
    "heads": (0, {"cross_attn_heads": 4}, "(8, 64)"),
    "low resolution first": (0, {"lowres_cond": True}, "low-resolution"),
    "no low resolution": (1, {"cond_on_image_embeds": False}, "low-resolution"),
    "embedding later": (1, {"lowres_cond": True}, "image embedding"),
    "text alone": (0, {**TEXT, "cond_on_image_embeds": False}, "text"),
    "output": (0, {"channels_out": 5}, "channels_out"),
    "first level": (0, {"dim_mults": [2, 2, 3]}, "dim_mults"),
}


@pytest.mark.parametrize("name", PRIVATE)
def test_a_unet_that_the_public_package_cannot_have_is_not_written(name: str) -> None:
    index, changes, complaint = PRIVATE[name]
    said = refused(check_is_public, UnetConfig(**{**BASE, "cond_on_image_embeds": True, **changes}), index)
    assert complaint in said and f"number {index + 1}" in said
    check_is_public(UnetConfig(**BASE, cond_on_image_embeds=True), 0)
    check_is_public(UnetConfig(**BASE, lowres_cond=True), 1)
