"""convert.py config: training configurations of DALLE2-pytorch, and of autoencoders of taming-transformers and latent
diffusion."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import convert
from tandem.io.installed import command_of
from tandem.models import Decoder
from tests.data.conditions import write_rows, write_tars
from tests.scripts import DECODER, VQGAN, metrics, refusal

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
# As the example of the public package, but for what is refused: crops, measures of other features, uploads.
EXAMPLE: dict[str, Any] = {
    "decoder": {
        "unets": [
            {"dim": 128, "image_embed_dim": 768, "cond_dim": 64, "channels": 3, "dim_mults": [1, 2, 4, 8],
             "attn_dim_head": 32, "attn_heads": 16}
        ],
        "image_sizes": [64], "channels": 3, "timesteps": 1000, "loss_type": "l2", "beta_schedule": ["cosine"],
        "learned_variance": True,
    },
    "data": {
        "webdataset_base_url": "tars/{}.tar", "img_embeddings_url": "embeddings/", "num_workers": 4, "batch_size": 64,
        "start_shard": 0, "end_shard": 9999999, "shard_width": 6, "index_width": 4,
        "splits": {"train": 0.75, "val": 0.15, "test": 0.1}, "shuffle_train": True, "resample_train": False,
        "preprocessing": {"ToTensor": True},
    },
    "train": {
        "epochs": 20, "lr": 1e-4, "wd": 0.01, "max_grad_norm": 0.5, "save_every_n_samples": 100000,
        "n_sample_images": 6, "device": "cuda:0", "epoch_samples": None, "validation_samples": None, "use_ema": True,
        "ema_beta": 0.99, "amp": False, "save_all": False, "save_latest": True, "save_best": True,
        "unet_training_mask": [True],
    },
    "evaluate": {
        "n_evaluation_samples": 1000, "FID": {"feature": 2048}, "IS": {"splits": 1}, "KID": {"subset_size": 1000},
        "LPIPS": {"net_type": "vgg", "reduction": "mean"},
    },
    "tracker": {
        "overwrite_data_path": False, "data_path": "runs/example",
        "log": {"log_type": "console", "verbose": True}, "load": {"load_from": None},
        "save": [{"save_to": "local", "save_type": "checkpoint"}],
    },
    "seed": 3,
}  # fmt: skip
SMALL_UNET = {"dim": 8, "dim_mults": [1, 2], "resnet_groups": 4, "attn_heads": 2, "attn_dim_head": 8}


def inside(part: dict[str, Any], name: str) -> dict[str, Any]:
    """Where a key of a part stands, or will stand."""
    return part if name in part else part.get("params", part)


def changed(config: Mapping[str, Any], places: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with other values at places such as "model.lossconfig.disc_weight" or "decoder.unets.0.dim"."""
    config = copy.deepcopy(dict(config))
    for where, value in places.items():
        *parents, last = where.split(".")
        part: Any = config
        for name in parents:
            part = part[int(name)] if isinstance(part, list) else inside(part, name).setdefault(name, {})
        inside(part, last)[last] = value
    return config


def written(folder: Path, config: Any) -> str:
    """A file with a configuration: JSON of DALLE2-pytorch, YAML of the others."""
    is_decoder = "decoder" in config
    (folder / "old").write_text(json.dumps(config) if is_decoder else yaml.safe_dump(config, sort_keys=False))
    return str(folder / "old")


Translate = Callable[..., tuple[dict[str, Any], list[str]]]


@pytest.fixture
def translate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Translate:
    """A configuration and more words of the command -> the flags in the YAML, which the script takes, and what is
    said."""

    def flags_and_lines(config: Any, *more: str) -> tuple[dict[str, Any], list[str]]:
        new = tmp_path / "new.yaml"
        convert.main(["config", written(tmp_path, config), str(new), "--force", *more])
        flags = yaml.safe_load(new.read_text())
        data = [] if "image_folder" in flags else ["--image_folder", "photos/"]
        weights = ["--clip_weights", "FILE"] if "clip" in flags else []
        (DECODER if "decoder" in config else VQGAN).parsed("--config", str(new), *data, *weights)
        return flags, capsys.readouterr().out.splitlines()

    return flags_and_lines


def test_the_example_of_dalle2_gives_these_flags(translate: Translate) -> None:
    flags, _ = translate(EXAMPLE)
    assert flags == {
        "image_sizes": [64], "dim": [128], "dim_mults": ["1,2,4,8"], "cond_dim": [64], "attn_dim_head": [32],
        "attn_heads": [16], "cross_attn_heads": [8], "cross_attn_dim_head": [64], "num_resnet_blocks": ["2"],
        "self_attn": ["0"],
        "resnet_groups": [8], "switches": ["none"], "condition_on": "image", "image_embed_scale": 1.0,
        "max_text_len": 256, "timesteps": 1000, "noise_schedule": ["cosine"], "objective": ["noise"],
        "zero_terminal_snr": False, "learned_variance": [1], "vb_loss_weight": 0.001,
        "loss_weight": ["none"], "p2_loss_weight_k": 1.0, "lowres_condition": "none",
        "lowres_noise_level": 0.2, "blur_prob": 0.5, "blur_sigma": [0.6], "image_cond_drop_prob": 0.1,
        "text_cond_drop_prob": 0.5, "random_crop_sizes": [0], "sampler": "ddpm", "sample_timesteps": [1000],
        "ddim_eta": 0.0, "cond_scale": [1.0],
        "image_folder": "tars/{}.tar", "image_embeddings": "embeddings/", "start_shard": 0, "shard_width": 6,
        "index_width": 4, "num_workers": 4, "batch_size": 64, "valid_fraction": 0.15, "test_fraction": 0.1,
        "valid_samples": 0,  # all
        "split_by": "shard", "random_flip": False,
        "epochs": 20.0, "learning_rate": [1e-4], "weight_decay": [0.01], "max_grad_norm": 0.5,
        "num_images_save": 6, "ema_decay": 0.99899547,  # 0.99 ** 0.1: theirs averages at every tenth update
        # 100000 samples are 1562.5 updates of 64.
        "save_every_n_steps": 1562, "sample_every_n_steps": 1562, "validate_every_n_steps": 1562,
        "n_evaluation_samples": 1000, "output_dir": "runs/example", "report_to": "none", "seed": 3,
    }  # fmt: skip


def test_what_is_not_said_is_what_the_public_package_does_then(translate: Translate) -> None:
    """Two unets: the last schedule is linear, and the first unet alone learns its variance."""
    upsampler = {"dim": 8, "dim_mults": [1, 2], "checkpoint_during_training": True}
    config: Any = {"decoder": {"unets": [SMALL_UNET, upsampler], "image_sizes": [8, 16]}, "data": {"splits": {}}}
    flags, _ = translate(config)
    expected = {
        "noise_schedule": ["cosine", "linear"], "learned_variance": [1, 0], "objective": ["noise"] * 2,
        "lowres_condition": "blur", "batch_size": 64, "learning_rate": [1e-4], "weight_decay": [0.01],
        "epochs": 20, "ema_decay": 0.99989995, "valid_fraction": 0.15, "test_fraction": 0.1, "max_grad_norm": 0.5,
        "gradient_checkpointing": True, "sampler": "ddpm", "seed": 0,
    }  # fmt: skip
    assert {name: flags[name] for name in expected} == expected and "n_evaluation_samples" not in flags


def test_the_configuration_of_imagenet_becomes_the_recipe_that_was_made_of_it_by_hand(
    tmp_path: Path, translate: Translate
) -> None:
    _, (*lost, of_rate, command) = translate(TAMING, "--processes", "8")
    assert command.endswith(f"train_vqgan.py --config {tmp_path / 'new.yaml'} --image_folder photos/")
    new = vars(VQGAN.parsed("--config", str(tmp_path / "new.yaml"), "--image_folder", "photos/"))
    recipe = vars(VQGAN.parsed("--config", str(VQGAN.configs / "taming_f16.yaml"), "--image_folder", "photos/"))
    said_by_one = {"epochs", "seed", "valid_fraction", "validate_every_n_steps", "sample_every_n_steps", "config",
                   "save_every_n_steps", "log_every_n_steps", "explicit", "aliases", "config_note"}  # fmt: skip
    assert {k: new[k] for k in new.keys() - said_by_one} == {k: recipe[k] for k in recipe.keys() - said_by_one}
    assert {line.split()[2] for line in lost} == {"data.train.target", "data.validation"}  # here, data are files
    assert all(line.startswith("left out: ") for line in lost)
    assert of_rate.startswith("learning_rate 0.000432 is base_learning_rate 4.5e-06 x batch_size 96, as in taming")
    assert (new["epochs"], new["seed"]) == (1000, 23)


def test_weights_of_a_kl_autoencoder_are_those_of_means_over_images_from_0_to_1(translate: Translate) -> None:
    """There the errors of 3 x 256^2 colours in [-1, 1] are summed, and 1e4 x disc_weight is the largest weight."""
    flags, said = translate(KL)
    assert flags["gan_weight"] == pytest.approx(0.5 * 1e4 / (2 * 3 * 256**2), rel=1e-2)
    assert flags.items() >= {
        "quantizer": "kl", "latent_dim": 4, "kl_loss_weight": 5e-7, "gan_weight_scale": 1.0, "discr_start_step": 50001,
        "perceptual_loss_weight": 0.5, "learning_rate": 1.8e-05, "batch_size": 4, "crop": "center", "image_size": 256,
    }.items() and "attention_levels" not in flags  # fmt: skip
    assert any("data.train.size 384" in line for line in said)
    assert any("disc_weight 0.5" in line and "0.0127" in line for line in said)
    assert said[-2] == "batch_size 4 is for one process; for several give --processes"


TRAINER = "lightning.trainer"


@pytest.mark.parametrize(("where", "value", "expected"), [
    ("train.epoch_samples", 1000, {"max_steps": 320, "validate_every_n_steps": 16, "evaluate_every_n_steps": 16}),
    ("train.use_ema", False, {"ema_decay": 0.0}),
    ("train.max_grad_norm", None, {"max_grad_norm": 0.0}),
    ("data.preprocessing.RandomHorizontalFlip", True, {"random_flip": True}),
    ("decoder.sample_timesteps", 250, {"sampler": "ddim", "sample_timesteps": [250]}),
    ("decoder.predict_v", True, {"objective": ["v"]}),
    ("decoder.lowres_noise_sample_level", 0.4, {"lowres_noise_level": 0.4}),
    ("decoder.p2_loss_weight_gamma", 0.5, {"loss_weight": ["p2"], "p2_loss_weight_gamma": 0.5}),
    ("decoder.unconditional", True, {"condition_on": "none"}),
    ("decoder.unets.0.self_attn", [False, True, True, True], {"self_attn": ["0,1,1,1"]}),
    ("decoder.unets.0.sparse_attn", True, {"switches": ["sparse_attn"]}),
    ("decoder.clip", {"make": "openai"}, {"clip": "ViT-L-14-quickgelu"}),
    ("tracker.log", {"log_type": "wandb", "wandb_project": "mine", "wandb_entity": "us", "wandb_run_name": "first"},
     {"report_to": "wandb", "wandb_project": "mine", "wandb_entity": "us", "wandb_name": "first"}),
    ("evaluate", {}, {"n_evaluation_samples": None}),
    (TRAINER, {"accumulate_grad_batches": 2}, {"batch_size": 24, "grad_accum_steps": 2, "learning_rate": 1.08e-4}),
    (TRAINER, {"gpus": "0,1,"}, {"batch_size": 24, "learning_rate": 1.08e-4}),
    (TRAINER, {"gpus": 4}, {"batch_size": 48}), (TRAINER, {"devices": 8, "num_nodes": 4}, {"batch_size": 384}),
    (TRAINER, {"max_steps": 500}, {"max_steps": 500, "epochs": 10**9}),
    (TRAINER, {"max_epochs": 7, "precision": 16}, {"epochs": 7, "precision": "fp16"}),
    (TRAINER, {"gradient_clip_val": 1.0}, {"max_grad_norm": 0.5, "discr_max_grad_norm": 2.0}),
    ("model.lossconfig.pixel_loss", "l2", {"l2_recon_loss": True, "perceptual_loss_weight": 0.25}),
    ("model.lossconfig.disc_factor", 0.5, {"gan_weight_scale": 0.4}),
    ("model.lossconfig.perceptual_weight", 0.0, {"perceptual": "none"}),
    ("model.lr_g_factor", 2.0, {"learning_rate": 1.08e-4, "discr_learning_rate": 5.4e-5}),
    ("model.use_ema", True, {"ema_decay": 0.9999}), ("model.ckpt_path", "last.ckpt", {"init_from": "last.ckpt"}),
    ("model.ddconfig.resolution", 512, {"attention_levels": None}),
    ("model.lossconfig.disc_ndf", 32, {"discr_dim": 32}),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_every_key_is_used(where: str, value: Any, expected: dict[str, Any], translate: Translate) -> None:
    usual = TAMING if where.startswith(("model", "lightning")) else EXAMPLE
    flags, _ = translate(changed(usual, {where: value}))
    assert {name: flags.get(name) for name in expected} == expected


@pytest.mark.parametrize(("where", "value", "expected"), [
    ("decoder.unets.0.init_dim", 32, "decoder.unets[0].init_dim 32"),
    ("decoder.loss_tipe", "l1", "loss_type?"), ("decoder.loss_type", "huber", "decoder.loss_type huber"),
    ("decoder.unets.0.lowres_cond", True, "decoder.unets[0].lowres_cond True"),
    ("decoder.unets.0.cosine_sim_self_attn", True, "decoder.unets[0].cosine_sim_self_attn True"),
    ("decoder.clip", {"make": "x-clip"}, "decoder.clip.make x-clip"),
    ("data.preprocessing.RandomResizedCrop", {"size": [64, 64]}, "data.preprocessing.RandomResizedCrop"),
    ("train.amp", True, "--precision bf16"),
    ("evaluate.FID", {"feature": 64}, "evaluate.FID.feature 64"),
    ("evaluate.LPIPS", {}, "evaluate.LPIPS.net_type"),
    ("tracker.save", {"save_to": "huggingface"}, "tracker.save.save_to huggingface"),
    ("tracker.save", [{}, {"save_to": "huggingface"}], "tracker.save[1].save_to huggingface"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_there_is_a_line_for_each_key_of_dalle2_without_a_counterpart(
    where: str, value: Any, expected: str, translate: Translate
) -> None:
    assert not any("left out" in line for line in translate(EXAMPLE)[1])
    (line,) = [line for line in translate(changed(EXAMPLE, {where: value}))[1] if line.startswith("left out: ")]
    assert expected in line


@pytest.mark.parametrize(("where", "value", "expected"), [
    ("model.ddconfig.in_channels", 1, "model.ddconfig.in_channels 1: images have 3 channels"),
    ("model.ddconfig.attn_type", "none", "model.ddconfig.attn_type none"),
    ("model.lossconfig.use_actnorm", True, "model.lossconfig.use_actnorm True"),
    ("model.lossconfig.disc_loss", "vanilla", "disc_loss vanilla: written as bce"),
    ("model.lossconfig.logvar_init", 1.0, "logvar_init 1.0"), ("model.monitor", "val/rec_loss", "model.monitor"),
    ("model.lossconfig.dsc_start", 5, "model.lossconfig.dsc_start: unknown key; did you mean disc_start?"),
    ("model.target", "taming.models.vqgan.GumbelVQ", "GumbelVQ: there is no Gumbel quantizer"),
    ("model.ddconfig.attn_resolutions", [12], "[12]: no level has this side"),
    ("data.train.degradation", "pil_nearest", "data.train.degradation pil_nearest"),
    ("data.train.training_images_list_file", "some/training.txt", "a list becomes a .csv for --image_folder"),
    ("lightning.callbacks", {"image_logger": {"params": {"clamp": False}}}, "image_logger.clamp: unknown key"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_a_value_without_a_flag_is_named_in_a_line(where: str, value: Any, expected: str, translate: Translate) -> None:
    usual, said = translate(TAMING)[1], translate(changed(TAMING, {where: value}))[1]
    assert any(expected in line for line in said) and not any(expected in line for line in usual), said


def test_of_a_whole_latent_diffusion_the_autoencoder_is_taken(translate: Translate) -> None:
    stage = copy.deepcopy(TAMING["model"])
    stage["target"] = "ldm.models.autoencoder.VQModelInterface"
    stage["params"]["lossconfig"] = {"target": "torch.nn.Identity"}
    del stage["base_learning_rate"]
    whole = {"target": "ldm.models.diffusion.ddpm.LatentDiffusion", "base_learning_rate": 1e-6,
             "params": {"timesteps": 1000, "first_stage_config": stage}}  # fmt: skip
    flags, said = translate({**TAMING, "model": whole})
    assert flags["codebook_size"] == 1024 and not {"learning_rate", "batch_size", "gan_weight"} & flags.keys()
    words = ("LatentDiffusion: its first_stage_config is read", "give --batch_size and", "it has no losses")
    assert all(any(word in line for line in said) for word in words)


@pytest.mark.parametrize(("config", "expected"), [
    (changed(EXAMPLE, {"decoder.unets": []}), "unets"),
    (changed(EXAMPLE, {"decoder": None}), "no part about a decoder"),
    (changed(EXAMPLE, {"data.splits.train": 0.8}), "1.05"),
    (changed(EXAMPLE, {"decoder.unets.0.dim": 4_000_000}), " GB "),
    (changed(EXAMPLE, {"data.batch_size": "many"}), "data.batch_size"),
    (changed(EXAMPLE, {"data.num_workers": "many"}), "data.num_workers"),
    (changed(EXAMPLE, {"data": 3}), "data 3"), (changed(EXAMPLE, {"data": [{}]}), "data [{}]: give a mapping"),
    (changed(EXAMPLE, {"decoder.timesteps": None}), "its timesteps None is not a whole number"),
    (changed(EXAMPLE, {"decoder.sample_timesteps": "5"}), "decoder.sample_timesteps 5: expected a number"),
    (changed(TAMING, {"data.train.config.size": [32]}), "data.train.size or crop_size [32]: expected a number"),
    (changed(TAMING, {"model.target": "taming.vqgan.VQSegmentationModel"}), "VQSegmentationModel: it is none of"),
    (changed(TAMING, {"model.target": "VQModell"}), "did you mean VQModel?"),
    (changed(TAMING, {"model.ddconfig.ch": None}), "model.ddconfig.ch is missing"),
    (changed(TAMING, {"model.ddconfig.ch": "wide"}), "model.ddconfig.ch: expected a whole number"),
    (changed(TAMING, {"model.ddconfig": [1]}), "model.ddconfig 1: give a mapping"),
    (changed(TAMING, {"model.embed_dim": "${model.params.n_embed}"}), "stands for another value"),
    (changed(TAMING, {"data.batch_size": "many"}), "data.batch_size many: expected a number"),
    (changed(TAMING, {"model.n_embed": None}), "model.n_embed"), ({"model": {"class_path": "x.IBQ"}}, "it is none of"),
    ({"trainer": {}}, "no part about a decoder"), ([1], "holds no keys"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_what_is_no_such_configuration_is_refused_by_name(config: Any, expected: str, tmp_path: Path) -> None:
    line = refusal(convert.main, "config", written(tmp_path, config), tmp_path / "new.yaml")
    assert expected in line and not (tmp_path / "new.yaml").exists()


@pytest.mark.parametrize("content", [b"", b"{]", b"\xff", b"[]"], ids=str)
def test_a_file_that_is_no_configuration_is_named(content: bytes, tmp_path: Path) -> None:
    old, new = tmp_path / "c.json", tmp_path / "new.yaml"
    old.write_bytes(content)
    assert f"{old}: " in refusal(convert.main, "config", old, new) and not new.exists()


def test_the_batch_of_a_process_is_not_taken_for_that_of_all(translate: Translate) -> None:
    assert "batch_size 64 is for one process; for several give --processes" in translate(EXAMPLE)[1]
    flags, said = translate(EXAMPLE, "--processes", "4")
    assert not any("--processes" in line for line in said)
    assert (flags["batch_size"], flags["save_every_n_steps"]) == (256, 391)


def test_such_a_file_given_to_a_script_leads_to_the_command(tmp_path: Path) -> None:
    for config in (EXAMPLE, dict(reversed(EXAMPLE.items()))):
        for flag in ("--config", "--decoder_config"):
            line = DECODER.refused_alone(flag, written(tmp_path, config))
            assert f"`{shlex.join(command_of('convert.py'))} config OLD.json NEW.yaml`" in line
    line = VQGAN.refused_alone("--config", written(tmp_path, TAMING))
    assert "'model': its value is a mapping" in line and "convert.py config OLD NEW.yaml" in line


def test_a_configuration_of_a_decoder_trains(
    translate: Translate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_tars(tmp_path / "tars", "txt", shards=6, each=8)
    write_rows(tmp_path / "embeddings", shards=6, each=8)
    config = changed(EXAMPLE, {"decoder.unets": [{**SMALL_UNET, "image_embed_dim": 6}]})
    config["decoder"] |= {"image_sizes": [8], "sample_timesteps": 2}
    config["data"] |= {
        "webdataset_base_url": f"{tmp_path}/tars/{{}}.tar", "img_embeddings_url": f"{tmp_path}/embeddings",
        "batch_size": 4, "num_workers": 0, "shard_width": 5,
    }  # fmt: skip
    config["train"] |= {"epoch_samples": 8, "epochs": 2}
    config["evaluate"]["n_evaluation_samples"] = 3
    config["tracker"]["data_path"] = str(tmp_path / "run")
    translate(config)
    said = DECODER.main("--config", str(tmp_path / "new.yaml"), "--log_every_n_steps", "1")
    assert len(metrics(tmp_path / "run")) == 4
    assert "inception score (--fid_weights)" in said
    model = Decoder.from_pretrained(tmp_path / "run" / "model").config
    assert (model["objective"], model["learned_variance"], model["image_embed_dim"]) == (["noise"], [1], 6)


def test_a_configuration_of_an_autoencoder_trains(translate: Translate, tmp_path: Path) -> None:
    sizes = {"ch": 32, "ch_mult": [1, 1], "z_channels": 4, "resolution": 32, "num_res_blocks": 1}
    translate(changed(TAMING, {
        "model.ddconfig": {**LAYERS, **sizes, "attn_resolutions": [16]}, "model.embed_dim": 4, "model.n_embed": 16,
        "model.lossconfig.disc_start": 0, "model.lossconfig.disc_num_layers": 1, "data.batch_size": 2,
        "data.train": {"params": {"size": 32}}, "data.num_workers": 0,
    }))  # fmt: skip
    flags = "--image_folder demo:shapes:16 --perceptual none --max_steps 2 --discr_dim 8 --log_every_n_steps 1"
    VQGAN.main("--config", str(tmp_path / "new.yaml"), *flags.split(), "--output_dir", str(tmp_path / "run"))
    assert [line["loss"] > 0 for line in metrics(tmp_path / "run") if "loss" in line] == [True, True]
