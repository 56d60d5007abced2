"""convert.py config: training configurations of autoencoders of taming-transformers and latent diffusion."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

import convert
from tests.scripts import VQGAN, metrics, refusal

# As configs/imagenet_vqgan.yaml of taming-transformers, and first_stage_models/kl-f8/config.yaml of latent diffusion.
LAYERS = {"double_z": False, "z_channels": 256, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
          "ch_mult": [1, 1, 2, 2, 4], "num_res_blocks": 2, "attn_resolutions": [16], "dropout": 0.0}  # fmt: skip
TAMING: dict[str, Any] = {
    "model": {
        "base_learning_rate": 4.5e-6, "target": "taming.models.vqgan.VQModel",
        "params": {
            "embed_dim": 256, "n_embed": 1024, "ddconfig": LAYERS,
            "lossconfig": {
                "target": "taming.modules.losses.vqperceptual.VQLPIPSWithDiscriminator",
                "params": {"disc_conditional": False, "disc_in_channels": 3, "disc_start": 250001, "disc_weight": 0.8,
                           "codebook_weight": 1.0},
            },
        },
    },
    "data": {
        "target": "main.DataModuleFromConfig",
        "params": {
            "batch_size": 12, "num_workers": 8,
            "train": {"target": "taming.data.imagenet.ImageNetTrain", "params": {"config": {"size": 256}}},
            "validation": {"target": "taming.data.imagenet.ImageNetValidation", "params": {"config": {"size": 256}}},
        },
    },
}  # fmt: skip
KL: dict[str, Any] = {
    "model": {
        "base_learning_rate": 4.5e-6, "target": "ldm.models.autoencoder.AutoencoderKL",
        "params": {
            "embed_dim": 4,
            "ddconfig": {**LAYERS, "double_z": True, "z_channels": 4, "ch_mult": [1, 2, 4, 4], "attn_resolutions": []},
            "lossconfig": {
                "target": "ldm.modules.losses.LPIPSWithDiscriminator",
                "params": {"disc_start": 50001, "kl_weight": "1e-6", "disc_weight": 0.5},  # as YAML 1.1 reads 1e-6
            },
        },
    },
    "data": {
        "target": "main.DataModuleFromConfig",
        "params": {
            "batch_size": 4, "wrap": True,
            "train": {"target": "ldm.data.openimages.FullOpenImagesTrain", "params": {"size": 384, "crop_size": 256}},
        },
    },
}  # fmt: skip
LINES = {"data.train.target", "data.validation"}  # in every file: here, data are files


def inside(part: dict[str, Any], name: str) -> dict[str, Any]:
    """Where a key of a part stands, or will stand."""
    return part if name in part else part.get("params", part)


def changed(config: dict[str, Any], **places: Any) -> dict[str, Any]:
    """The configuration with other values at places such as "model__lossconfig__disc_weight"."""
    config = copy.deepcopy(config)
    for where, value in places.items():
        *parents, last = where.split("__")
        part = config
        for name in parents:
            part = inside(part, name).setdefault(name, {})
        inside(part, last)[last] = value
    return config


def translated(
    config: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[dict[str, Any], list[str]]:
    """The flags, and the lines about what has none."""
    old, new = folder / "old.yaml", folder / "new.yaml"
    old.write_text(yaml.safe_dump(config))
    convert.main(["config", str(old), str(new), "--force", *more])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith(f"train_vqgan.py --config {new} --image_folder photos/")
    VQGAN.parsed("--config", str(new), "--image_folder", "photos/")
    return yaml.safe_load(new.read_text()), lines[:-1]


def test_the_configuration_of_imagenet_becomes_the_recipe_that_was_made_of_it_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, lines = translated(TAMING, tmp_path, capsys, "--processes", "8")
    new = vars(VQGAN.parsed("--config", str(tmp_path / "new.yaml"), "--image_folder", "photos/"))
    recipe = vars(VQGAN.parsed("--config", str(VQGAN.configs / "taming_f16.yaml"), "--image_folder", "photos/"))
    said_by_one = {"epochs", "seed", "valid_fraction", "validate_every_n_steps", "sample_every_n_steps", "config",
                   "save_every_n_steps", "log_every_n_steps", "explicit", "aliases_used", "config_note"}  # fmt: skip
    assert {k: new[k] for k in new.keys() - said_by_one} == {k: recipe[k] for k in recipe.keys() - said_by_one}
    *lost, of_rate = lines
    assert {line.split()[2] for line in lost} == LINES and all(line.startswith("left out: ") for line in lost)
    assert of_rate.startswith("learning_rate 0.000432 is base_learning_rate 4.5e-06 x batch_size 96, as in main.py")
    assert (flags["epochs"], flags["seed"]) == (1000, 23)


def test_weights_of_a_kl_autoencoder_are_those_of_means_over_images_from_0_to_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There the errors of 3 x 256^2 colours in [-1, 1] are summed, and 1e4 x disc_weight is the largest weight."""
    flags, lines = translated(KL, tmp_path, capsys)
    assert flags["gan_weight"] == pytest.approx(0.5 * 1e4 / (2 * 3 * 256**2), rel=1e-2)
    assert flags.items() >= {
        "quantizer": "kl", "latent_dim": 4, "kl_loss_weight": 5e-7, "gan_weight_scale": 1.0, "discr_start_step": 50001,
        "perceptual_loss_weight": 0.5, "learning_rate": 1.8e-05, "batch_size": 4, "crop": "center", "image_size": 256,
    }.items() and "attention_levels" not in flags  # fmt: skip
    assert any("data.train.size 384" in line for line in lines)
    assert any("disc_weight 0.5" in line and "0.0127" in line for line in lines)
    assert lines[-1] == "batch_size 4 is for one process; for several give --processes"


@pytest.mark.parametrize(("trainer", "expected"), [
    ({"accumulate_grad_batches": 2}, {"batch_size": 24, "grad_accum_steps": 2, "learning_rate": 1.08e-4}),
    ({"gpus": "0,1,"}, {"batch_size": 24, "learning_rate": 1.08e-4}), ({"gpus": 4}, {"batch_size": 48}),
    ({"devices": 8, "num_nodes": 4}, {"batch_size": 384}), ({"max_steps": 500}, {"max_steps": 500, "epochs": 10**9}),
    ({"max_epochs": 7, "precision": 16}, {"epochs": 7, "precision": "fp16"}),
    ({"gradient_clip_val": 1.0}, {"max_grad_norm": 0.5, "discr_max_grad_norm": 2.0}),
])  # fmt: skip
def test_options_of_the_trainer_are_flags(
    trainer: dict[str, Any], expected: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, _ = translated({**TAMING, "lightning": {"trainer": trainer}}, tmp_path, capsys)
    assert {name: flags[name] for name in expected} == expected


@pytest.mark.parametrize(("place", "value", "expected"), [
    ("model__lossconfig__pixel_loss", "l2", {"l2_recon_loss": True, "perceptual_loss_weight": 0.25}),
    ("model__lossconfig__disc_factor", 0.5, {"gan_weight_scale": 0.4}),
    ("model__lossconfig__perceptual_weight", 0.0, {"perceptual": "none"}),
    ("model__lr_g_factor", 2.0, {"learning_rate": 1.08e-4, "discr_learning_rate": 5.4e-5}),
    ("model__use_ema", True, {"ema_decay": 0.9999}), ("model__ckpt_path", "last.ckpt", {"init_from": "last.ckpt"}),
    ("model__ddconfig__resolution", 512, {"attention_levels": None}),
    ("model__lossconfig__disc_ndf", 32, {"discr_dim": 32}),
])  # fmt: skip
def test_what_weighs_and_shapes_otherwise_is_a_flag(
    place: str, value: Any, expected: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, _ = translated(changed(TAMING, **{place: value}), tmp_path, capsys)
    assert {name: flags.get(name) for name in expected} == expected


@pytest.mark.parametrize(("place", "value", "line"), [
    ("model__ddconfig__in_channels", 1, "model.ddconfig.in_channels 1: images have 3 channels"),
    ("model__ddconfig__attn_type", "none", "model.ddconfig.attn_type none"),
    ("model__lossconfig__use_actnorm", True, "model.lossconfig.use_actnorm True"),
    ("model__lossconfig__disc_loss", "vanilla", "disc_loss vanilla: written as bce"),
    ("model__lossconfig__logvar_init", 1.0, "logvar_init 1.0"), ("model__monitor", "val/rec_loss", "model.monitor"),
    ("model__lossconfig__dsc_start", 5, "model.lossconfig.dsc_start: unknown key; did you mean disc_start?"),
    ("model__target", "taming.models.vqgan.GumbelVQ", "GumbelVQ: there is no Gumbel quantizer"),
    ("model__ddconfig__attn_resolutions", [12], "[12]: no level has this side"),
    ("data__train__degradation", "pil_nearest", "data.train.degradation pil_nearest"),
    ("data__train__training_images_list_file", "some/training.txt", "a list becomes a .csv for --image_folder"),
    ("lightning__callbacks", {"image_logger": {"params": {"clamp": False}}}, "image_logger.clamp: unknown key"),
])  # fmt: skip
def test_a_value_that_has_no_flag_is_named_in_a_line(
    place: str, value: Any, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, usual = translated(TAMING, tmp_path, capsys)
    _, lines = translated(changed(TAMING, **{place: value}), tmp_path, capsys)
    assert any(line in each for each in lines) and not any(line in each for each in usual), lines


def test_of_a_whole_latent_diffusion_the_autoencoder_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = copy.deepcopy(TAMING["model"])
    stage["target"], stage["params"]["lossconfig"] = (
        "ldm.models.autoencoder.VQModelInterface",
        {"target": "torch.nn.Identity"},
    )
    del stage["base_learning_rate"]
    whole = {"target": "ldm.models.diffusion.ddpm.LatentDiffusion", "base_learning_rate": 1e-6,
             "params": {"timesteps": 1000, "first_stage_config": stage}}  # fmt: skip
    flags, lines = translated({**TAMING, "model": whole}, tmp_path, capsys)
    assert flags["codebook_size"] == 1024 and not {"learning_rate", "batch_size", "gan_weight"} & flags.keys()
    words = ("LatentDiffusion: its first_stage_config is read", "give --batch_size and", "it says no losses")
    assert all(any(word in line for line in lines) for word in words)


@pytest.mark.parametrize(("config", "complaint"), [
    (changed(TAMING, model__target="taming.models.vqgan.VQSegmentationModel"), "VQSegmentationModel: it is none of"),
    (changed(TAMING, model__target="VQModell"), "did you mean VQModel?"),
    (changed(TAMING, model__ddconfig__ch=None), "model.ddconfig.ch is missing"),
    (changed(TAMING, model__ddconfig__ch="wide"), "model.ddconfig.ch: expected a whole number"),
    (changed(TAMING, model__ddconfig=[1]), "model.ddconfig 1: give a mapping"),
    (changed(TAMING, model__embed_dim="${model.params.n_embed}"), "stands for another value"),
    (changed(TAMING, data__batch_size="many"), "data.batch_size many: expected a number"),
    (changed(TAMING, model__n_embed=None), "model.n_embed"), ({"model": {"class_path": "x.IBQ"}}, "it is none of"),
    ({"trainer": {}}, "no part about a decoder"), ([1], "holds no keys"),
])  # fmt: skip
def test_what_is_no_such_configuration_is_refused_by_name(config: Any, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(config))
    line = refusal(convert.main, "config", str(tmp_path / "old.yaml"), str(tmp_path / "new.yaml"))
    assert complaint in line and not (tmp_path / "new.yaml").exists()


def test_what_is_written_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = changed(
        TAMING, model__ddconfig={**LAYERS, "ch": 32, "ch_mult": [1, 1], "z_channels": 4, "resolution": 32,
                                 "num_res_blocks": 1, "attn_resolutions": [16]},
        model__embed_dim=4, model__n_embed=16, model__lossconfig__disc_start=0, model__lossconfig__disc_num_layers=1,
        data__batch_size=2, data__train={"params": {"size": 32}}, data__num_workers=0,
    )  # fmt: skip
    translated(small, tmp_path, capsys)
    flags = "--image_folder demo:shapes:16 --perceptual none --max_steps 2 --discr_dim 8 --log_every_n_steps 1"
    VQGAN.main("--config", str(tmp_path / "new.yaml"), *flags.split(), "--output_dir", str(tmp_path / "run"))
    assert [line["loss"] > 0 for line in metrics(tmp_path / "run") if "loss" in line] == [True, True]


def test_such_a_file_given_to_a_script_leads_to_the_command(tmp_path: Path) -> None:
    (tmp_path / "taming.yaml").write_text(yaml.safe_dump(TAMING, sort_keys=False))
    line = VQGAN.refused_alone("--config", str(tmp_path / "taming.yaml"))
    assert "'model': it holds keys of its own" in line and "convert.py config OLD NEW.yaml" in line
