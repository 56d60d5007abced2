"""Autoencoders with taming's body from other packages: the public weights give the public codes, latents and images,
what goes out comes back, and what has no counterpart is refused by its name."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

import train_vqgan
from tandem.config.models.autoencoders import VQGANConfig
from tandem.launch import adopt_architecture, describe_model
from tandem.models import VQGAN
from tandem.weights.formats.detection import FORMATS, detect_format
from tandem.weights.formats.diffusers import diffusers_folder
from tandem.weights.load import load_model, resolve
from tests.models.helpers import assert_same_bits, one_line_of, prefixed, refused, some_images, without
from tests.models.reference.autoencoders import CASES, WEIGHTS, images, state_of, stored, stored_output, written

FORMAT_OF = {"taming": "taming", "ldm": "taming", "llamagen": "llamagen", "ibq": "taming"}
each_stored_case = pytest.mark.parametrize("case", FORMAT_OF)


@each_stored_case
def test_public_weights_give_the_public_codes_latents_and_images(case: str, tmp_path: Path) -> None:
    """Of the packages themselves, whose outputs are stored; diffusers itself is in test_diffusers.py."""
    path = written(case, tmp_path)
    assert detect_format(path) is FORMATS[FORMAT_OF[case]]
    model = load_model(path)
    assert not model.training
    assert model.config.items() >= {"body": "taming", **CASES[case].ours}.items()
    encoded, expected = model.encode(images(case)), stored_output(case, "reconstruction") / 2 + 0.5
    if model.num_codes:
        assert torch.equal(encoded, stored_output(case, "codes"))
    else:
        torch.testing.assert_close(encoded, stored_output(case, "latents"), rtol=0, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model.decode(encoded), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(model(images(case)).reconstruction, expected, rtol=0, atol=1e-5)


@each_stored_case
def test_what_is_written_has_every_public_name_and_bit(case: str, tmp_path: Path) -> None:
    """But for LlamaGen's entries, which it scales to length 1 whenever it uses them, and ours are; and IBQ's weights as
    trained, which are the average, that stands beside them."""
    FORMATS[FORMAT_OF[case]].save(load_model(written(case, tmp_path)), tmp_path / "back")
    (back,), expected = torch.load(tmp_path / "back", weights_only=True).values(), state_of(case)
    if case == "ibq":
        averages = {name: tensor for name, tensor in expected.items() if name.startswith("model_ema.")}
        trained = {name: averages[f"model_ema.{name.replace('.', '')}"] for name in expected.keys() - averages}
        expected = {name: tensor for name, tensor in (averages | trained).items() if name in back}
    if case == "llamagen":
        expected["quantize.codebook_used"] = torch.zeros(65536)
        expected["quantize.embedding.weight"] = F.normalize(expected["quantize.embedding.weight"])
    assert_same_bits(back, expected)
    assert all(tensor.is_contiguous() for tensor in back.values())


@pytest.mark.parametrize("case", ["sd", "vq"])
def test_what_a_configuration_says_for_users_of_the_weights_comes_back_and_means_diffusers_default_without(
    case: str, tmp_path: Path
) -> None:
    """The side of images, by which diffusers cuts large ones into tiles, and whether fp16 is too narrow."""
    folder, public = written(case, tmp_path), FORMATS["diffusers"]
    for said, expected in (
        ({"sample_size": 512, "force_upcast": False}, (512, False)),
        ({"sample_size": 64, "force_upcast": True}, (64, True)),
        ({"sample_size": [48, 80], "force_upcast": True}, ([48, 80], True)),
        ({}, (256, case == "sd")),
    ):
        config = {name: value for name, value in stored(case, "config").items() if name not in SAID_TO_USERS}
        (folder / "config.json").write_text(json.dumps({**config, **said}))
        model = load_model(folder)
        assert (model.image_size, model.config["force_upcast"]) == expected
        public.save(model, tmp_path / "back")
        back = json.loads((tmp_path / "back" / "config.json").read_text())
        assert tuple(back[name] for name in SAID_TO_USERS) == expected


SAID_TO_USERS = ("sample_size", "force_upcast")


@pytest.mark.parametrize(("weights", "index"), [
    ("diffusion_pytorch_model{}.safetensors", "diffusion_pytorch_model.safetensors.index.json"),
    ("diffusion_pytorch_model.fp16{}.safetensors", "diffusion_pytorch_model.safetensors.index.fp16.json"),
    ("diffusion_pytorch_model{}.bin", "diffusion_pytorch_model.bin.index.json"),
])  # fmt: skip
def test_weights_in_several_files_are_those_that_the_index_names(weights: str, index: str, tmp_path: Path) -> None:
    folder, state, write = written("sd", tmp_path), state_of("sd"), torch.save if ".bin" in weights else save_file
    whole = load_model(folder)
    (folder / WEIGHTS).unlink()
    names, weight_map = sorted(state), {}
    for number, part in enumerate((names[:7], names[7:90], names[90:])):
        file = weights.format(f"-0000{number + 1}-of-00003")
        write({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert resolve(folder) == ("file", folder)
    assert_same_bits(load_model(folder), whole)
    (folder / file).unlink()
    assert file in one_line_of(load_model, folder)
    (folder / index).write_text(json.dumps({"weight_map": {"a": "../" + file}}))
    assert "no file in the folder" in one_line_of(load_model, folder)


def test_entries_of_llamagen_that_nothing_has_scaled_are_read_as_they_are(tmp_path: Path) -> None:
    """Without codebook_l2_norm, entries that were never chosen stay short, where the others have any length."""
    state, path = state_of("llamagen"), tmp_path / "plain.pt"
    entries = state["quantize.embedding.weight"]
    entries = torch.where(torch.arange(len(entries))[:, None] % 2 == 0, 3 * entries, entries / 1000)
    torch.save({"model": {**state, "quantize.embedding.weight": entries}}, path)
    model, public = load_model(path), FORMATS["llamagen"]
    assert not model.config["vq_cosine"] and torch.equal(model.quantizer.codebook, entries)
    with torch.no_grad():
        of_places = model.encoder(2 * images("llamagen") - 1).movedim(1, -1).flatten(0, -2)
    assert torch.equal(model.encode(images("llamagen")).flatten(), torch.cdist(of_places, entries).argmin(1))
    said = public.save(model, tmp_path / "back.pt")
    assert "codebook_l2_norm False" in said
    assert torch.equal(torch.load(tmp_path / "back.pt")["model"]["quantize.embedding.weight"], entries)
    for file, value in ((path, False), (written("llamagen", tmp_path), True)):
        assert f"codebook_l2_norm {value}" in describe_model(file)["assumed"]
    assert "assumed" not in describe_model(written("sd", tmp_path))


@pytest.mark.parametrize("quantizer, is_said", [("kl", True), ("vq", False)])
def test_a_scale_that_nobody_knows_is_said_to_be_assumed(quantizer: str, is_said: bool, tmp_path: Path) -> None:
    model = VQGAN.from_dict({**SMALL, "quantizer": quantizer})
    assert ("unknown" in str(FORMATS["diffusers"].save(model, tmp_path / "unknown"))) == is_said


def test_the_first_stage_of_a_whole_latent_diffusion_is_taken_from_both_kinds_of_file(tmp_path: Path) -> None:
    """Stable Diffusion's: a Unet, its average, a text encoder, tables of noise levels; and the scale of latents."""
    state = state_of("ldm")
    whole = {
        "model.diffusion_model.out.weight": torch.ones(2), "model_ema.diffusion_modeloutweight": torch.ones(2),
        "cond_stage_model.transformer.weight": torch.ones(2), "betas": torch.ones(3),
        **prefixed("first_stage_model.", {**state, "loss.logvar": torch.zeros(())}),
        "scale_factor": torch.tensor(0.25),
    }  # fmt: skip
    torch.save({"state_dict": whole, "global_step": 7, "epoch": 1}, tmp_path / "sd.ckpt")
    save_file(whole, tmp_path / "sd.safetensors")
    save_file(state, tmp_path / "ae.safetensors")
    plain = load_model(written("ldm", tmp_path))
    for name, scale in (("sd.ckpt", 0.25), ("sd.safetensors", 0.25), ("ae.safetensors", None)):
        model = load_model(tmp_path / name)
        assert_same_bits(model, plain)
        assert model.config == {**plain.config, "scaling_factor": scale}
    whole["scale_factor"] = torch.tensor(math.nan)
    save_file(whole, tmp_path / "nan.safetensors")
    assert "scaling_factor nan" in one_line_of(load_model, tmp_path / "nan.safetensors")


class ModelCheckpoint:
    """Of pytorch_lightning, whose objects and names stand in its checkpoints."""


def test_the_checkpoints_of_the_public_trainers_are_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With losses and a discriminator, objects of the trainer, an optimizer; LlamaGen's with an average. No class of
    them is imported."""
    module = ModuleType("pytorch_lightning.callbacks.model_checkpoint")
    module.ModelCheckpoint = ModelCheckpoint  # type: ignore[attr-defined]
    monkeypatch.setattr(ModelCheckpoint, "__module__", module.__name__)
    for name in ("pytorch_lightning", "pytorch_lightning.callbacks", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    state = state_of("taming")
    best = {"best_model_score": torch.tensor(0.3), "best": np.float64(0.25), "mode": ModelCheckpoint()}
    optimizer = {"state": {0: {"step": 3, "exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 1e-4, "params": [0]}]}
    losses = {
        "loss.discriminator.main.0.weight": torch.ones(2),
        "loss.perceptual_loss.lin0.model.1.weight": torch.ones(2),
    }
    checkpoint = {"callbacks": {ModelCheckpoint: best}, "optimizer_states": [optimizer], "lr_schedulers": []}
    torch.save({**checkpoint, "state_dict": {**state, **losses}}, tmp_path / "last.ckpt")
    average = state_of("llamagen")
    trained = {name: tensor + 1 for name, tensor in average.items()}
    training = {"model": trained, "ema": average, "optimizer": optimizer, "discriminator": losses, "steps": 7}
    torch.save({**training, "args": argparse.Namespace(lr=1e-4)}, tmp_path / "0000007.pt")
    for name in ("pytorch_lightning", "pytorch_lightning.callbacks", module.__name__):
        monkeypatch.delitem(sys.modules, name)
    assert_same_bits(load_model(tmp_path / "last.ckpt"), load_model(written("taming", tmp_path)))
    plain = load_model(written("llamagen", tmp_path))
    for which in ("best", "ema"):
        assert_same_bits(load_model(tmp_path / "0000007.pt", which), plain)
    bias = load_model(tmp_path / "0000007.pt", "online").state_dict()["encoder.conv_in.bias"]
    assert torch.equal(bias, plain.state_dict()["encoder.conv_in.bias"] + 1)


def test_the_average_of_ibq_is_taken_and_its_weights_as_trained_where_they_are_asked_for(tmp_path: Path) -> None:
    path, state = written("ibq", tmp_path), state_of("ibq")
    for which, name in (("best", "model_ema.encoderconv_inbias"), ("online", "encoder.conv_in.bias")):
        model = load_model(path, which)
        assert model.config["quantizer"] == "ibq"
        assert torch.equal(model.state_dict()["encoder.conv_in.bias"], state[name])
    assert "moving average" in one_line_of(lambda path: load_model(path, "ema"), written("taming", tmp_path))
    assert "--weights online" in one_line_of(lambda path: load_model(path, "online"), written("sd", tmp_path))


def test_a_pipeline_older_names_and_other_files_are_read_as_the_folder_itself(tmp_path: Path) -> None:
    """Of a pipeline that is on the disk its vae; the names of Stable Diffusion's published files; pickled, half
    precision."""
    plain = load_model(written("sd", tmp_path))
    pipeline = tmp_path / "pipeline"
    shutil.copytree(tmp_path / "sd", pipeline / "vae")
    (pipeline / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    (pipeline / "unet").mkdir()
    assert resolve(pipeline) == ("file", pipeline / "vae") and diffusers_folder(tmp_path) is None
    assert_same_bits(load_model(pipeline), plain)
    older = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    state = state_of("sd")
    for new, old in older.items():
        state = {name.replace(f".{new}.", f".{old}."): tensor for name, tensor in state.items()}
    assert state.keys() != state_of("sd").keys()
    (tmp_path / "sd" / WEIGHTS).unlink()
    torch.save(state, tmp_path / "sd" / "diffusion_pytorch_model.bin")
    assert_same_bits(load_model(tmp_path / "sd"), plain)
    half = {name: tensor.half() for name, tensor in state.items()}
    save_file(half, tmp_path / "sd" / "diffusion_pytorch_model.fp16.safetensors")
    rounded = load_model(tmp_path / "sd").state_dict()
    assert torch.equal(rounded["encoder.conv_in.weight"], half["encoder.conv_in.weight"].float())


def test_the_description_says_what_a_file_is_and_what_follows_from_it(tmp_path: Path) -> None:
    for case, kind in (("sd", "diffusers folder"), ("llamagen", "LlamaGen file")):
        path = written(case, tmp_path)
        facts = detect_format(path).describe(path)
        assert facts["kind"] == kind and facts["model"] == "VQGAN"
        assert facts["arguments"].items() >= CASES[case].ours.items()
        assert facts["parameters"] == sum(tensor.numel() for tensor in load_model(path).state_dict().values())


@pytest.mark.parametrize("case", ["taming", "llamagen", "vq"])
def test_training_goes_on_from_the_loaded_codebook(case: str, tmp_path: Path) -> None:
    """It is not started again from k-means: an update moves entries that vectors chose, by a fifth of the way to them,
    and leaves all others where they are."""
    model = load_model(written(case, tmp_path)).train()
    quantizer = model.quantizer
    before = quantizer.codebook.clone()
    assert not quantizer.needs_stats
    chosen = model(images(case)).codes.unique()
    quantizer.after_step(0, seed=0)
    others = [code for code in range(len(before)) if code not in chosen]
    torch.testing.assert_close(quantizer.codebook[others], before[others], rtol=0, atol=2e-4)  # smoothing of the counts
    assert (quantizer.codebook[chosen] != before[chosen]).any(1).all()


def test_a_run_that_starts_from_a_file_makes_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are copied from the file, and no other model takes memory."""
    path, built, build = written("sd", tmp_path), list[str](), VQGAN.__init__

    def build_and_count(model: VQGAN, config: VQGANConfig) -> None:
        build(model, config)
        built.append(next(model.parameters()).device.type)

    monkeypatch.setattr(VQGAN, "__init__", build_and_count)
    parser = train_vqgan.build_parser()
    args = parser.parse(["--init_from", str(path), "--image_folder", "demo:shapes:8"])
    adopt_architecture(parser, args)
    model = train_vqgan.build_model(args)
    assert built.count("cpu") == 1
    assert_same_bits(model, load_model(path))


SMALL: dict[str, Any] = {
    "image_size": 16, "body": "taming", "dim": 32, "ch_mult": [1, 1], "num_resnet_blocks": [1], "quantizer": "vq",
    "codebook_size": 16, "codebook_dim": 4, "attention_levels": [1],
}  # fmt: skip


OF_MUSE = {"body": "muse", "quantizer": "lfq", "num_layers": 2, "codebook_size": 256, "normalize_input": False}


@pytest.mark.parametrize(("to", "other", "complaint"), [
    ("muse", {**OF_MUSE, "quantizer": "fsq", "fsq_levels": [3, 3]}, "fsq"), ("muse", {**OF_MUSE, "dim": 8}, "16"),
    ("muse", {**OF_MUSE, "quantizer": "bsq"}, "bsq"),
    ("muse", {**OF_MUSE, "normalize_input": True}, "--no-normalize_input"),
    ("diffusers", {"quantizer": "fsq", "fsq_levels": [3, 3]}, "fsq"), ("diffusers", {"quantizer": "ibq"}, "ibq"),
    ("diffusers", {"vq_cosine": True}, "has no --vq_cosine"), ("taming", {"vq_cosine": True}, "has no --vq_cosine"),
    ("llamagen", {"quantizer": "kl"}, "kl"),
    ("llamagen", {"vq_cosine": True, "attention_levels": None}, "--attention_levels 1"),
    ("taming", {"norm_groups": 16}, "32 groups"), ("taming", {"quant_conv": False}, "quant_conv"),
    ("diffusers", {"body": "muse", "num_layers": 2}, "--body taming"),
    ("diffusers", {"quantizer": "kl", "latent_dim": 4, "z_channels": 8}, "z_channels"),
    ("diffusers", {"ch_mult": [2, 2]}, "--ch_mult of a model of diffusers begins with 1"),
])  # fmt: skip
def test_a_model_that_the_public_package_has_not_is_refused(
    to: str, other: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    assert complaint in refused(FORMATS[to].save, VQGAN.from_dict({**SMALL, **other}), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_ours_goes_to_every_package_that_has_it_and_comes_back(tmp_path: Path) -> None:
    for number, (to, other) in enumerate([
        ("diffusers", {}), ("taming", {}), ("taming", {"quantizer": "kl"}), ("taming", {"quantizer": "ibq"}),
        ("llamagen", {"vq_cosine": True}),
        ("diffusers", {"quantizer": "kl", "norm_groups": 8, "quant_conv": False, "shift_factor": -0.5,
                       "scaling_factor": 2.0}),
    ]):  # fmt: skip
        torch.manual_seed(number)
        model, path = VQGAN.from_dict({**SMALL, **other}).eval(), tmp_path / str(number)
        FORMATS[to].save(model, path)
        back = load_model(path)
        assert back.config["quantizer"] == model.config["quantizer"]
        assert torch.equal(back.encode(some_images()), model.encode(some_images()))
        with torch.no_grad():
            torch.testing.assert_close(back(some_images()).reconstruction, model(some_images()).reconstruction)
        scale = {name: model.config[name] for name in ("scaling_factor", "shift_factor")}
        if to == "diffusers":
            assert back.config.items() >= {**scale, "scaling_factor": scale["scaling_factor"] or 0.18215}.items()


STATE = state_of("taming")
THIN = {name: torch.zeros([each // 2 if each in (32, 64) else each for each in w.shape]) for name, w in STATE.items()}
LEVELS = {f"encoder.down.{level}.block.0.conv1.weight": torch.zeros(32, 32, 3, 3) for level in range(3, 20)}
# The file's weights with others, and what the message has to say.
MISTAKES: list[tuple[Any, str]] = [
    ({**STATE, "quantize.used": torch.ones(3)}, "it holds quantize.used"),
    ({**without(STATE, "quantize."), "quantize.embed.weight": torch.ones(50, 8)}, "it is of taming's GumbelVQ"),
    ({**STATE, "transformer.weight": torch.zeros(1)}, "it holds transformer.weight"),
    ({**STATE, "decoder.adaptive.0.gamma.weight": torch.zeros(1)}, "Open-MAGVIT2"),
    (without(STATE, "decoder.mid.attn_1.q.bias"), "it lacks decoder.mid.attn_1.q.bias"),
    (without(STATE, "decoder.up.2.attn.1"), "it lacks decoder.up.2.attn.1.norm.weight"),
    (without(STATE, "encoder.down."), "have [] channels"),
    ({**STATE, "encoder.down_blocks.0.resnets.0.conv1.weight": torch.zeros(1)}, "of diffusers: give its folder"),
    ({**STATE, "decoder.conv_out.bias": torch.full((3,), math.nan)}, "decoder.conv_out.bias is not finite"),
    (without(STATE, "post_quant_conv."), "it lacks post_quant_conv.weight"),
    ({**STATE, "encoder.down.1.block.0.conv1.weight": torch.zeros(33, 32, 3, 3)}, "multiples of 32"),
    ({**STATE, "encoder.conv_in.weight": torch.zeros(0, 3, 3, 3)}, "multiples of 0"),
    ({**STATE, "encoder.conv_in.weight": torch.zeros(5)}, "of 4 dimensions"),
    ({**STATE, "encoder.conv_in.weight": torch.zeros(32, 3, 5, 5)}, "encoder.conv_in.weight should have shape"),
    ({**STATE, "quantize.embedding.weight": torch.zeros(5)}, "of 2 dimensions"),
    ({**STATE, "quantize.embedding.weight": torch.zeros(50, 7)}, "should have shape"),
    ({**STATE, "decoder.conv_out.bias": torch.ones(3).long()}, "of the kind"),
    (THIN, "norm_groups 32"), ({**STATE, **LEVELS}, "2 to 12"), ([STATE], "a list, not a dict"),
]  # fmt: skip


@pytest.mark.parametrize(("state", "complaint"), MISTAKES, ids=[said for _, said in MISTAKES])
def test_another_file_is_refused_in_one_line(state: Any, complaint: str, tmp_path: Path) -> None:
    torch.save({"state_dict": state}, tmp_path / "model.ckpt")
    assert complaint in one_line_of(FORMATS["taming"].load, tmp_path / "model.ckpt")


CONFIGS: dict[str, tuple[Any, str]] = {
    "another model": ({"_class_name": "UNet2DConditionModel"}, "UNet2DConditionModel"),
    "cursor": ({"_class_name": "\x1b[2J" * 99}, "?[2J"), "list of a class": ({"_class_name": []}, "[]"),
    "relu": ({"act_fn": "relu"}, "act_fn"), "spatial": ({"norm_type": "spatial"}, "norm_type"),
    "middle": ({"mid_block_add_attention": False}, "mid_block_add_attention"),
    "mean": ({"latents_mean": [0.1] * 4}, "latents_mean"),
    **{f"deviations {said}": ({"latents_mean": [0.1] * 4, "latents_std": values}, said) for values, said in (
        ([1.0] * 3, "of one length"), ([1.0] * 3 + [0.0], "not above 0"), (["1"] * 4, "is no number"),
        ([math.nan] * 4, "is no number below"), ([[1.0]] * 4, "latents_std [1.0]"))},
    "two channels": ({"latents_mean": [0.1] * 2, "latents_std": [1.0] * 2}, "has 2 numbers"),
    "groups 0": ({"norm_num_groups": 0}, "norm_num_groups"),
    "groups": ({"norm_num_groups": "32"}, "norm_num_groups"), "many groups": ({"norm_num_groups": 10**30}, "norm_num"),
    "no divisor": ({"norm_num_groups": 3}, "norm_groups 3"), "yes": ({"norm_num_groups": True}, "norm_num_groups"),
    "scale": ({"scaling_factor": "0.2"}, "scaling_factor"), "scale 0": ({"scaling_factor": 0}, "scaling_factor"),
    "no scale": ({"scaling_factor": None}, "scaling_factor"), "shift": ({"shift_factor": [0]}, "shift_factor"),
    "scale NaN": ({"scaling_factor": math.nan}, "scaling_factor"),
    "scale of 400 digits": ({"scaling_factor": 10**400}, "scaling_factor"),
    "shift inf": ({"shift_factor": math.inf}, "shift_factor"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_of_diffusers_that_fits_no_model_of_ours_is_refused_in_one_line(
    name: str, tmp_path: Path
) -> None:
    changed, complaint = CONFIGS[name]
    folder = written("sd3", tmp_path)
    (folder / "config.json").write_text(json.dumps({**stored("sd3", "config"), **changed}))
    said = one_line_of(load_model, folder)
    assert complaint in said and said.isprintable() and len(said) < 600


def test_a_folder_of_diffusers_that_is_damaged_or_leads_elsewhere_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = written("sd3", tmp_path)
    weights = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(weights[: len(weights) // 2])
    assert "is cut off or damaged" in one_line_of(load_model, folder)
    (folder / WEIGHTS).unlink()
    assert "No such file" in one_line_of(load_model, folder)
    (tmp_path / "elsewhere").write_bytes(weights)
    (folder / WEIGHTS).symlink_to("../elsewhere")
    assert "is a link that leaves the folder" in one_line_of(load_model, folder)
