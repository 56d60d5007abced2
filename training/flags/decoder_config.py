"""Training configurations of DALLE2-pytorch 1.15.6 as flags of train_decoder.py: every key is used, or refused by name.

Where a configuration says nothing, its own defaults hold, not those of the flags.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from tandem.files.reading import LONGEST_JSON_BYTES, parse_json, read_bytes, read_yaml

from .converters import nearest
from .decoder_keys import (
    CLIP,
    DATA,
    DECODER,
    EVALUATE,
    LOAD,
    LOG,
    MEASURES,
    OF_A_UNET,
    PREPROCESSING,
    SAVE,
    SPLITS,
    TOP,
    TRACKER,
    TRAIN,
    Flag,
    Only,
    Rules,
)

Section = Mapping[str, Any]
Flags = dict[str, tuple[str, Any]]  # flag -> key that it comes from, and value


_LAST_SHARD = 9999999
_SMALL = 1e-6  # fractions of two or three decimals add up to 1 within some 1e-16


def flags_of_config(
    path: str,
    said: argparse.Namespace,
    processes: int,
    configured: Callable[[Section], tuple[Any, Mapping[str, Any]]],
    made: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    unet_keys: Sequence[str],
) -> Flags:
    """Flags by name, each with the key that it comes from.

    Args:
        path: The configuration, YAML or JSON.
        said: What is given beside it, and wins.
        processes: How many train together.
        configured: `models.files.public_decoder.configured_decoder`.
        made: Constructor arguments of a decoder -> the flags that make it (`unets.flags_that_make`).
        unet_keys: Names of a unet's arguments there.

    Raises:
        ValueError: one line, without the path, if it cannot be read, or has a key that is unknown or has no flag.
    """
    config = _read(path)
    flags: Flags = {}
    _take("", config, TOP, flags)
    decoder, clip = _section(config, "decoder"), _section(config, "decoder", "clip")
    data, train = _section(config, "data"), _section(config, "train")
    parts: dict[str, tuple[Section, Rules]] = {
        "decoder": (decoder, DECODER), "decoder.clip": (clip, CLIP), "data": (data, DATA),
        "data.splits": (_section(config, "data", "splits"), SPLITS),
        "data.preprocessing": (_section(config, "data", "preprocessing"), PREPROCESSING), "train": (train, TRAIN),
        "evaluate": (_section(config, "evaluate"), EVALUATE), "tracker": (_section(config, "tracker"), TRACKER),
        "tracker.log": (_section(config, "tracker", "log"), LOG),
        "tracker.load": (_section(config, "tracker", "load"), LOAD),
        **{f"evaluate.{name}": (_section(config, "evaluate", name), rules) for name, rules in MEASURES.items()},
    }  # fmt: skip
    for name, (section, rules) in parts.items():
        _take(f"{name}.", section, rules, flags)
    save = parts["tracker"][0].get("save") or []
    for number, each in enumerate(save if isinstance(save, list) else [save]):
        _take(f"tracker.save[{number}].", _checked(each, f"tracker.save[{number}]"), SAVE, flags)
    model, around = configured({"decoder": decoder})
    flags |= {name: ("decoder", value) for name, value in made(model.config).items()}
    for index, unet in enumerate(decoder["unets"]):
        _take(f"decoder.unets[{index}].", unet, {**dict.fromkeys(unet_keys), **OF_A_UNET}, flags)
    _take_decoder(decoder, around, clip, flags)
    batch_size = _batch_size(data, said, processes)
    _take_data(data, parts["data.splits"][0], parts["data.preprocessing"][0], flags)
    _take_train(train, batch_size, flags)
    _take_evaluation(parts["evaluate"][0], "evaluate_every_n_steps", flags)
    _take_log(parts["tracker.log"][0], flags)
    return flags


def _take_decoder(decoder: Section, around: Mapping[str, Any], clip: Section, flags: Flags) -> None:
    if len([name for name in ("image_size", "image_sizes") if decoder.get(name) is not None]) != 1:
        raise ValueError("decoder: give image_sizes, a size for each unet, or image_size for one")
    if any(unet.get("checkpoint_during_training") for unet in decoder["unets"]):
        flags["gradient_checkpointing"] = ("decoder.unets", True)
    upsampling = [set(around[name][1:]) for name in ("use_noise_for_lowres_cond", "use_blur_for_lowres_cond")]
    if any(len(each) > 1 for each in upsampling) or upsampling == [{True}, {True}]:
        raise ValueError(
            "decoder.use_noise_for_lowres_cond and use_blur_for_lowres_cond: set one of the two to false; the "
            "other one is for all upsampling Unets"
        )
    flags["random_crop_sizes"] = ("decoder.random_crop_sizes", [size or 0 for size in around["random_crop_sizes"]])
    timesteps = around["timesteps"]
    steps = [None if n is None or n >= timesteps else n for n in around["sample_timesteps"]]
    if None in steps and any(steps):
        raise ValueError("decoder.sample_timesteps: give fewer steps than timesteps for all unets, or for none")
    flags["sampler"] = ("decoder.sample_timesteps", "ddim" if any(steps) else "ddpm")
    flags["sample_timesteps"] = ("decoder.sample_timesteps", [n or timesteps for n in steps])
    gammas = [_number(gamma, "decoder.p2_loss_weight_gamma") for gamma in around["p2_loss_weight_gamma"]]
    if len({gamma for gamma in gammas if gamma}) > 1:
        raise ValueError("decoder.p2_loss_weight_gamma: give one gamma, or 0, for each unet")
    flags["loss_weight"] = ("decoder.p2_loss_weight_gamma", ["p2" if gamma else "none" for gamma in gammas])
    flags["p2_loss_weight_gamma"] = ("decoder.p2_loss_weight_gamma", max(gammas) or None)
    if decoder.get("use_dynamic_thres"):
        quantile = decoder.get("dynamic_thres_percentile", 0.95)
        flags["dynamic_thresholding"] = ("decoder.dynamic_thres_percentile", quantile)
    if decoder.get("clip") is not None:
        made_by = clip.get("make", "openai")
        if made_by not in ("openai", "open_clip"):
            raise ValueError(f"decoder.clip.make {made_by}: give openai or open_clip, whose models --clip reads")
        name = clip.get("model", "ViT-L/14")
        # OpenAI's weights were trained with another activation than open_clip's models of the same names.
        openai = str(name).replace("/", "-") + "-quickgelu"
        flags["clip"] = ("decoder.clip.model", openai if made_by == "openai" else name)


def _batch_size(data: Section, said: argparse.Namespace, processes: int) -> int:
    """Samples per update over all processes."""
    ours = getattr(said, "batch_size", None)
    theirs = data.get("batch_size", 64)
    if ours is not None or not isinstance(theirs, int):
        return ours or 1  # what is no number is refused where it becomes a flag
    if processes > 1:
        raise ValueError(
            f"data.batch_size {theirs} is for each of the {processes} processes, and here it is for all together: give "
            f"--batch_size {theirs * processes}"
        )
    return theirs


def _take_data(data: Section, splits: Section, preprocessing: Section, flags: Flags) -> None:
    last = data.get("end_shard", _LAST_SHARD)
    flags["end_shard"] = ("data.end_shard", None if last == _LAST_SHARD else last)
    fractions = {"train": 0.75, "val": 0.15, "test": 0.1} | dict(splits)
    total = sum(_number(value, f"data.splits.{name}") for name, value in fractions.items())
    if abs(total - 1) > _SMALL:
        raise ValueError(f"data.splits: train, val and test add up to {total:g}, not to 1")
    for name, flag in (("val", "valid_fraction"), ("test", "test_fraction")):
        flags[flag] = (f"data.splits.{name}", fractions[name])
    flags["split_by"] = ("data.splits", "shard")
    flip = preprocessing.get("RandomHorizontalFlip", False)
    flags["random_flip"] = ("data.preprocessing.RandomHorizontalFlip", flip is not False)


def _take_train(train: Section, batch_size: int, flags: Flags) -> None:
    epoch = train.get("epoch_samples")
    # Their epochs validate at their end; without epoch_samples that is not known before the data are.
    every, key = train.get("save_every_n_samples", 100000), "train.save_every_n_samples"
    saves = max(round(_number(every, key) / batch_size), 1)
    flags |= dict.fromkeys(("save_every_n_steps", "sample_every_n_steps", "validate_every_n_steps"), (key, saves))
    if epoch is not None:
        updates = math.ceil(_number(epoch, "train.epoch_samples") / batch_size)
        epochs = _number(train.get("epochs", 20), "train.epochs")
        flags["max_steps"] = ("train.epoch_samples", math.ceil(epochs * updates))
        flags |= dict.fromkeys(("validate_every_n_steps", "evaluate_every_n_steps"), ("train.epoch_samples", updates))
    # ema-pytorch averages every 10 updates.
    beta = _number(train.get("ema_beta", 0.999), "train.ema_beta") ** 0.1
    flags["ema_decay"] = ("train.ema_beta", round(beta, 8) if train.get("use_ema", True) else 0.0)
    norm = train.get("max_grad_norm", 0.5)
    if isinstance(norm, list) and len(set(map(str, norm))) == 1:
        norm = norm[0]
    flags["max_grad_norm"] = ("train.max_grad_norm", 0.0 if norm is None else norm)
    mask = train.get("unet_training_mask")
    if mask is not None:
        count = len(flags["image_sizes"][1])
        if not isinstance(mask, list) or len(mask) != count or not all(isinstance(each, bool) for each in mask):
            raise ValueError(f"train.unet_training_mask: give true or false for each of {count} unets")
        if not any(mask):
            raise ValueError("train.unet_training_mask trains no unet: set one to true")
        numbers = [number for number, is_trained in enumerate(mask, start=1) if is_trained]
        flags["train_unets"] = ("train.unet_training_mask", None if all(mask) else numbers)


def _take_evaluation(evaluate: Section, every: str, flags: Flags) -> None:
    wanted = [name for name in MEASURES if evaluate.get(name) is not None]
    if evaluate.get("LPIPS") is not None and "net_type" not in evaluate["LPIPS"]:
        raise ValueError(
            "evaluate.LPIPS.net_type is alex if nothing is said: give vgg, whose weights --lpips_weights takes"
        )
    if wanted:
        number = evaluate.get("n_evaluation_samples", 1000)
        flags["n_evaluation_samples"] = ("evaluate.n_evaluation_samples", number)
    else:
        flags.pop(every, None)


def _take_log(log: Section, flags: Flags) -> None:
    kind = log.get("log_type", "console")
    if kind not in ("console", "wandb"):
        raise ValueError(f"tracker.log.log_type {kind}: give console or wandb")
    flags["report_to"] = ("tracker.log.log_type", "wandb" if kind == "wandb" else "none")
    for key, name in (("wandb_entity",) * 2, ("wandb_project",) * 2, ("wandb_run_name", "wandb_name")):
        if log.get(key) and kind == "wandb":
            flags[name] = (f"tracker.log.{key}", log[key])


def _take(where: str, section: Section, rules: Rules, flags: Flags) -> None:
    """Add the flags of the keys in a section; refuse those that have no flag and another value than here."""
    for key, value in section.items():
        name = f"{where}{key}"
        if key not in rules:
            raise ValueError(f"{name}: unknown key{nearest(str(key), [*map(str, rules)])}")
        rule = rules[key]
        if isinstance(rule, Only) and value is not None and value not in rule.values:
            raise ValueError(f"{name} {_short(value)}: {rule.instead}")
    for key, rule in rules.items():
        if isinstance(rule, Flag):
            flags[rule.name] = (f"{where}{key}", rule.usual if section.get(key) is None else section[key])


def _section(config: Section, *names: str) -> Section:
    """A part of the configuration, {} if it is absent or null."""
    found: Any = config
    for depth, name in enumerate(names):
        found = _checked(found.get(name), ".".join(names[: depth + 1]))
    return found


def _checked(value: Any, name: str) -> Section:
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} {_short(value)}: give a mapping of keys to values")
    return value or {}


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} {_short(value)}: expected a number, 0 or more")
    return value


def _short(value: Any) -> str:
    return " ".join(str(value).split())[:60]


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number, as it is in JSON."""


_Loader.yaml_implicit_resolvers = {
    **yaml.SafeLoader.yaml_implicit_resolvers,
    **{sign: [*yaml.SafeLoader.yaml_implicit_resolvers.get(sign, []),
              ("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"))]
       for sign in "-+0123456789"},
}  # fmt: skip


def _read(path: str) -> Section:
    try:
        text = read_bytes(path, LONGEST_JSON_BYTES)
        found = parse_json(text) if text.lstrip().startswith(b"{") else read_yaml(path, _Loader)
    except OSError as error:
        raise ValueError(f"cannot read the configuration: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"is neither YAML nor JSON: {_short(error)}") from None
    if not isinstance(found, dict) or not isinstance(found.get("decoder"), dict):
        raise ValueError("is no training configuration of DALLE2-pytorch: it has no part called decoder")
    return found
