"""Training configurations of DALLE2-pytorch 1.15.6 as flags of train_decoder.py (`convert.py config`).

public_names.yaml lists each key with its default in DALLE2-pytorch and its flag; `dalle2_config` has the keys of unets.
The value of an absent key is the default of DALLE2-pytorch, not that of the flag.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .config_keys import Flags, Section, SupportedValues, get_section, read_default, require_number, supported_values
from .dalle2_config import FIXED, UNET_KEYS, decoder_part, values_per_unet

if TYPE_CHECKING:
    from tandem.config.public_names import Row

_UNETS = "decoder.unets."
# Key -> all values with a counterpart here, where these are not just the default in DALLE2-pytorch.
_EQUIVALENTS = {"decoder.clip.make": ("openai", "open_clip"), "evaluate.LPIPS.net_type": ("vgg",)}
_METRICS = ("FID", "IS", "KID", "LPIPS")
_LAST_SHARD = 9999999  # the default in DALLE2-pytorch, which means all shards
_SUM_TOLERANCE = 1e-6  # far more than the rounding of fractions that add up to 1


def supported_keys(rows: Sequence[Row]) -> SupportedValues:
    """The supported values for `config_keys.without_counterpart`, from the rows about the decoder."""
    return {
        **supported_values(rows, _EQUIVALENTS),
        **dict.fromkeys((f"{_UNETS}{name}" for name in (*UNET_KEYS, "checkpoint_during_training")), (None, "")),
        **{f"{_UNETS}{name}": ((value,), f"here it is {value}") for name, value in FIXED.items()},
    }


def default_lines(config: Section, supported: SupportedValues) -> Iterator[str]:
    """A line for each absent key whose default has no counterpart."""
    if (lpips := get_section(config, "evaluate").get("LPIPS")) is not None and "net_type" not in lpips:
        yield f"evaluate.LPIPS.net_type is alex by default: {supported['evaluate.LPIPS.net_type'][1]}"


def flags_from_config(config: Section, rows: Sequence[Row], architecture_flags: Section, processes: int) -> Flags:
    """Flags by name, each with the key that it comes from and its value; None: the flag's own default.

    Args:
        config: Checked by `config_keys.without_counterpart`.
        rows: The rows of public_names.yaml about the decoder.
        architecture_flags: The flags of the decoder's architecture.
        processes: The number of processes of the training.

    Raises:
        ValueError: one line that names the key whose value cannot be used.
    """
    flags: Flags = {}
    for row in rows:
        *sections, name = row.key.split(".")
        if row.flag and sections:
            value = get_section(config, *sections).get(name)
            flags[row.flag] = (row.key, read_default(row) if value is None else value)
    flags |= {name: ("decoder", value) for name, value in architecture_flags.items()}
    flags |= _data_flags(get_section(config, "data"), processes)
    flags["seed"] = ("seed", config.get("seed", 0))
    flags["output_dir"] = ("tracker.data_path", get_section(config, "tracker").get("data_path"))
    if (tracker := get_section(config, "tracker", "log").get("log_type", "console")) == "console":
        flags |= {name: (name, None) for name in ("wandb_entity", "wandb_project", "wandb_name")}
    flags["report_to"] = ("tracker.log.log_type", "none" if tracker == "console" else tracker)
    flags |= _sampling_and_loss_flags(decoder_part(config), architecture_flags["timesteps"])
    train, evaluate = get_section(config, "train"), get_section(config, "evaluate")
    flags |= _training_flags(train, evaluate, flags["batch_size"][1], len(architecture_flags["dim"]))
    return flags


def _data_flags(data: Section, processes: int) -> Flags:
    fractions = {"train": 0.75, "val": 0.15, "test": 0.1, **get_section(data, "splits")}
    total = sum(require_number(value, f"data.splits.{name}") for name, value in fractions.items())
    if abs(total - 1) > _SUM_TOLERANCE:
        raise ValueError(f"data.splits: train, val and test add up to {total:g}, not to 1")
    last = data.get("end_shard", _LAST_SHARD)
    is_flipped = get_section(data, "preprocessing").get("RandomHorizontalFlip", False) is not False
    return {
        "split_by": ("data.splits", "shard"),
        "valid_fraction": ("data.splits.val", fractions["val"]),
        "test_fraction": ("data.splits.test", fractions["test"]),
        "batch_size": ("data.batch_size", require_number(data.get("batch_size", 64), "data.batch_size") * processes),
        "end_shard": ("data.end_shard", None if last == _LAST_SHARD else last),
        "random_flip": ("data.preprocessing.RandomHorizontalFlip", is_flipped),
    }  # fmt: skip


def _sampling_and_loss_flags(decoder: Section, timesteps: int) -> Flags:
    if (decoder.get("image_size") is None) == (decoder.get("image_sizes") is None):
        raise ValueError("decoder: give image_sizes, a size for each unet, or image_size for one")
    noisy, blurred = decoder.get("use_noise_for_lowres_cond", False), decoder.get("use_blur_for_lowres_cond", True)
    if len(decoder["unets"]) > 1 and _common_value(noisy) is not False and _common_value(blurred) is not False:
        raise ValueError(
            "decoder.use_noise_for_lowres_cond and use_blur_for_lowres_cond: set one of the two to false; the "
            "other then holds for all upsampling Unets"
        )
    steps = [
        None if n is None or require_number(n, "decoder.sample_timesteps") >= timesteps else n
        for n in values_per_unet(decoder, "sample_timesteps", None)
    ]
    if None in steps and any(steps):
        raise ValueError("decoder.sample_timesteps: give fewer steps than timesteps for all unets, or for none")
    gammas = [
        require_number(gamma, "decoder.p2_loss_weight_gamma")
        for gamma in values_per_unet(decoder, "p2_loss_weight_gamma", 0.0)
    ]
    if len({gamma for gamma in gammas if gamma}) > 1:
        raise ValueError("decoder.p2_loss_weight_gamma: give the same gamma for all unets, or 0 for those without it")
    clip = get_section(decoder, "clip")
    # OpenAI's weights were trained with another activation than open_clip's models of the same names.
    model, openai = clip.get("model", "ViT-L/14"), clip.get("make", "openai") == "openai"
    return {
        "gradient_checkpointing": (
            "decoder.unets", any(unet.get("checkpoint_during_training") for unet in decoder["unets"]) or None
        ),
        "random_crop_sizes": (
            "decoder.random_crop_sizes", [side or 0 for side in values_per_unet(decoder, "random_crop_sizes", None)]
        ),
        "sampler": ("decoder.sample_timesteps", "ddim" if any(steps) else "ddpm"),
        "sample_timesteps": ("decoder.sample_timesteps", [n or timesteps for n in steps]),
        "loss_weight": ("decoder.p2_loss_weight_gamma", ["p2" if gamma else "none" for gamma in gammas]),
        "p2_loss_weight_gamma": ("decoder.p2_loss_weight_gamma", max(gammas) or None),
        "dynamic_thresholding": (
            "decoder.dynamic_thres_percentile",
            decoder.get("dynamic_thres_percentile", 0.95) if decoder.get("use_dynamic_thres") else None,
        ),
        "clip": ("decoder.clip.model", None if decoder.get("clip") is None
                 else str(model).replace("/", "-") + "-quickgelu" if openai else model),
    }  # fmt: skip


def _training_flags(train: Section, evaluate: Section, batch_size: float, count: int) -> Flags:
    # DALLE2-pytorch validates at the end of an epoch. Without epoch_samples its length depends on the data.
    key, epoch_samples = "train.save_every_n_samples", train.get("epoch_samples")
    interval = max(round(require_number(train.get("save_every_n_samples", 100000), key) / max(batch_size, 1)), 1)
    names = ("save_every_n_steps", "sample_every_n_steps", "validate_every_n_steps")
    flags: Flags = dict.fromkeys(names, (key, interval))
    flags["valid_samples"] = ("train.validation_samples", train.get("validation_samples") or 0)
    flags["max_grad_norm"] = ("train.max_grad_norm", _common_value(train.get("max_grad_norm", 0.5)) or 0.0)
    if not (is_evaluated := any(evaluate.get(name) is not None for name in _METRICS)):
        flags["n_evaluation_samples"] = ("evaluate", None)
    if epoch_samples is not None:
        updates = math.ceil(require_number(epoch_samples, "train.epoch_samples") / max(batch_size, 1))
        epochs = require_number(train.get("epochs", 20), "train.epochs")
        flags["max_steps"] = ("train.epoch_samples", math.ceil(epochs * updates))
        flags["validate_every_n_steps"] = ("train.epoch_samples", updates)
        if is_evaluated:
            flags["evaluate_every_n_steps"] = ("train.epoch_samples", updates)
    # ema-pytorch averages every 10 updates.
    beta = require_number(train.get("ema_beta", 0.999), "train.ema_beta") ** 0.1
    flags["ema_decay"] = ("train.ema_beta", round(beta, 8) if train.get("use_ema", True) else 0.0)
    if (mask := train.get("unet_training_mask")) is not None:
        if not isinstance(mask, list) or len(mask) != count or not all(isinstance(element, bool) for element in mask):
            raise ValueError(f"train.unet_training_mask: give true or false for each of {count} unets")
        if not any(mask):
            raise ValueError("train.unet_training_mask trains no unet: set one to true")
        numbers = [index + 1 for index, is_trained in enumerate(mask) if is_trained]
        flags["train_unets"] = ("train.unet_training_mask", None if all(mask) else numbers)
    return flags


def _common_value(value: Any) -> Any:
    """The value of a list of equal values; anything else unchanged."""
    return value[0] if isinstance(value, list) and len(set(map(str, value))) == 1 else value
