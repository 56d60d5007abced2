"""convert.py config: training configurations of DALLE2-pytorch."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import convert
from tandem.io.installed import command_of
from tandem.models import Decoder
from tests.data.conditions import write_rows, write_tars
from tests.scripts import DECODER, metrics, refusal

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


def changed(where: str, value: Any) -> dict[str, Any]:
    """The example with another value at a place such as "train.lr" or "decoder.unets.0.dim"."""
    config = copy.deepcopy(EXAMPLE)
    *parents, last = where.split(".")
    part: Any = config
    for name in parents:
        part = part[int(name)] if isinstance(part, list) else part.setdefault(name, {})
    part[last] = value
    return config


def written(folder: Path, config: Any) -> str:
    (folder / "old.json").write_text(json.dumps(config))
    return str(folder / "old.json")


def translated(folder: Path, config: Any, *more: str) -> dict[str, Any]:
    """The YAML that is made of a configuration."""
    convert.main(["config", written(folder, config), str(folder / "new.yaml"), "--force", *more])
    found: dict[str, Any] = yaml.safe_load((folder / "new.yaml").read_text())
    return found


def flags_of(folder: Path, config: Any, *more: str) -> dict[str, Any]:
    """What the YAML sets, as config.yaml would say it."""
    weights = ["--clip_weights", "FILE"] if "clip" in translated(folder, config, *more) else []
    parser = DECODER.module.build_parser()
    args = parser.parse(["--config", str(folder / "new.yaml"), *weights])
    return {name: value for name, value in parser.settings(args).items() if name in args.explicit}


def test_the_example_gives_these_flags(tmp_path: Path) -> None:
    flags = flags_of(tmp_path, EXAMPLE)
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


def test_what_is_not_said_is_what_the_public_package_does_then(tmp_path: Path) -> None:
    """Two unets: the last schedule is linear, and the first unet alone learns its variance."""
    upsampler = {"dim": 8, "dim_mults": [1, 2], "checkpoint_during_training": True}
    config: Any = {"decoder": {"unets": [SMALL_UNET, upsampler], "image_sizes": [8, 16]}, "data": {"splits": {}}}
    flags = flags_of(tmp_path, config)
    expected = {
        "noise_schedule": ["cosine", "linear"], "learned_variance": [1, 0], "objective": ["noise"] * 2,
        "lowres_condition": "blur", "batch_size": 64, "learning_rate": [1e-4] * 2, "weight_decay": [0.01] * 2,
        "epochs": 20, "ema_decay": 0.99989995, "valid_fraction": 0.15, "test_fraction": 0.1, "max_grad_norm": 0.5,
        "gradient_checkpointing": True, "sampler": "ddpm", "seed": 0,
    }  # fmt: skip
    assert {name: flags[name] for name in expected} == expected and "n_evaluation_samples" not in flags


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
], ids=str)  # fmt: skip
def test_every_key_is_used(where: str, value: Any, expected: dict[str, Any], tmp_path: Path) -> None:
    flags = flags_of(tmp_path, changed(where, value))
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
def test_there_is_a_line_for_each_key_without_a_counterpart(
    where: str, value: Any, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags_of(tmp_path, EXAMPLE)
    assert "left out" not in capsys.readouterr().out
    flags_of(tmp_path, changed(where, value))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    assert expected in line


@pytest.mark.parametrize(("where", "value", "expected"), [
    ("decoder.unets", [], "unets"),
    ("decoder", None, "no part about a decoder"),
    ("data.splits.train", 0.8, "1.05"),
    ("decoder.unets.0.dim", 4_000_000, " GB "),
    ("data.batch_size", "many", "data.batch_size"),
    ("data.num_workers", "many", "data.num_workers"),
    ("data", 3, "data 3"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_a_value_that_means_nothing_is_refused_by_name(where: str, value: Any, expected: str, tmp_path: Path) -> None:
    old, new = written(tmp_path, changed(where, value)), tmp_path / "new.yaml"
    assert expected in refusal(convert.main, "config", old, new) and not new.exists()


@pytest.mark.parametrize("content", [b"", b"{]", b"\xff", b"[]"], ids=str)
def test_a_file_that_is_no_configuration_is_named(content: bytes, tmp_path: Path) -> None:
    old, new = tmp_path / "c.json", tmp_path / "new.yaml"
    old.write_bytes(content)
    assert f"{old}: " in refusal(convert.main, "config", old, new) and not new.exists()


def test_the_batch_of_a_process_is_not_taken_for_that_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flags_of(tmp_path, EXAMPLE)["batch_size"] == 64
    assert "batch_size 64 is for one process; for several give --processes" in capsys.readouterr().out
    flags = flags_of(tmp_path, EXAMPLE, "--processes", "4")
    assert (flags["batch_size"], flags["save_every_n_steps"]) == (256, 391)
    assert "--processes" not in capsys.readouterr().out


def test_a_training_names_the_command_that_reads_such_a_configuration(tmp_path: Path) -> None:
    for config in (EXAMPLE, dict(reversed(EXAMPLE.items()))):
        for flag in ("--config", "--decoder_config"):
            line = DECODER.refused_alone(flag, written(tmp_path, config))
            assert f"`{shlex.join(command_of('convert.py'))} config OLD.json NEW.yaml`" in line


def test_a_configuration_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_tars(tmp_path / "tars", "txt", shards=6, each=8)
    write_rows(tmp_path / "embeddings", shards=6, each=8)
    config = changed("decoder.unets", [{**SMALL_UNET, "image_embed_dim": 6}])
    config["decoder"] |= {"image_sizes": [8], "sample_timesteps": 2}
    config["data"] |= {
        "webdataset_base_url": f"{tmp_path}/tars/{{}}.tar", "img_embeddings_url": f"{tmp_path}/embeddings",
        "batch_size": 4, "num_workers": 0, "shard_width": 5,
    }  # fmt: skip
    config["train"] |= {"epoch_samples": 8, "epochs": 2}
    config["evaluate"]["n_evaluation_samples"] = 3
    config["tracker"]["data_path"] = str(tmp_path / "run")
    translated(tmp_path, config)
    said = DECODER.main("--config", str(tmp_path / "new.yaml"), "--log_every_n_steps", "1")
    assert len(metrics(tmp_path / "run")) == 4
    assert "inception score (--fid_weights)" in said
    model = Decoder.from_pretrained(tmp_path / "run" / "model").config
    assert (model["objective"], model["learned_variance"], model["image_embed_dim"]) == (["noise"], [1], 6)
