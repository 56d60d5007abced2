"""The keys of DALLE2-pytorch's training configurations, version 1.15.6, and the flags of train_decoder.py that they
become (`convert.py config`). Other keys are unknown there too, although most of the package ignores them.

Where a configuration says nothing, its own defaults hold, not those of the flags.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from tandem.converters import nearest

from .dalle2_config import FIXED, UNET_KEYS, decoder_part, for_each


class Flag(NamedTuple):
    """A key whose value is that of a flag; `usual` if it is absent, None: the flag's own default. `convert` makes the
    flag's value of it."""

    name: str
    usual: Any = None
    convert: Callable[[Any], Any] | None = None


class Only(NamedTuple):
    """A key without a flag: the values that are what happens here anyway, and what to do instead of others."""

    values: tuple[Any, ...]
    instead: str


PART = True  # a key that holds keys, or a list of such
READ = None  # a key that the code below reads
_EITHER = Only((True, False), "give true or false")  # without effect on what is trained
_OUT = "it has no counterpart: "
_IN_THE_FOLDER = Only((), f"{_OUT}--output_dir holds checkpoints/, best/ and model/; convert.py export writes a file")
_LPIPS = Only(("vgg",), "LPIPS is that of vgg, whose weights --lpips_weights takes")
_LOADED = Only(("",), f"{_OUT}make a model/ folder of the file by convert.py export, and give --init_from")

_ONE_VALUE = {  # of keys without a flag: what happens here anyway
    "decoder.loss_type": "l2", "decoder.channels": 3, "decoder.blur_kernel_size": 3,
    "decoder.lowres_downsample_first": True, "decoder.learned_variance_constrain_frac": False,
    "decoder.auto_normalize_img": True, "decoder.clip_denoised": True, "data.shuffle_train": True,
    "data.resample_train": False, "train.save_immediately": False, "evaluate.FID.feature": 2048,
    "evaluate.IS.feature": "logits_unbiased", "evaluate.IS.splits": 1, "evaluate.KID.feature": 2048,
    "evaluate.KID.subsets": 100, "evaluate.KID.subset_size": 1000, "evaluate.LPIPS.reduction": "mean",
    **{f"decoder.unets.{name}": value for name, value in FIXED.items()},
}  # fmt: skip

KEYS: Mapping[str, Flag | Only | bool | None] = {
    **dict.fromkeys(
        ("decoder", "decoder.unets", "decoder.clip", "data", "data.splits", "data.preprocessing", "train", "evaluate",
         "evaluate.FID", "evaluate.IS", "evaluate.KID", "evaluate.LPIPS", "tracker", "tracker.log", "tracker.load",
         "tracker.save"), PART,
    ),
    **{name: Only((value,), f"here it is {value}") for name, value in _ONE_VALUE.items()},
    "seed": Flag("seed", 0),
    **{f"decoder.{name}": READ for name in (
        "image_size", "image_sizes", "timesteps", "beta_schedule", "learned_variance", "predict_x_start", "predict_v",
        "use_noise_for_lowres_cond", "use_blur_for_lowres_cond", "lowres_noise_sample_level", "random_crop_sizes",
        "sample_timesteps", "unconditional", "p2_loss_weight_gamma", "use_dynamic_thres", "dynamic_thres_percentile",
    )},
    "decoder.image_cond_drop_prob": Flag("image_cond_drop_prob", 0.1),
    "decoder.text_cond_drop_prob": Flag("text_cond_drop_prob", 0.5),
    "decoder.blur_prob": Flag("blur_prob", 0.5), "decoder.blur_sigma": Flag("blur_sigma", 0.6),
    "decoder.p2_loss_weight_k": Flag("p2_loss_weight_k", 1),
    "decoder.vb_loss_weight": Flag("vb_loss_weight", 0.001), "decoder.ddim_sampling_eta": Flag("ddim_eta", 0.0),
    "decoder.clip_x_start": _EITHER, "decoder.vae": Only((), "Unets are trained on pixels, not on latents"),
    "decoder.clip.make": Only(("openai", "open_clip"), "give openai or open_clip, whose models --clip reads"),
    "decoder.clip.model": READ,
    "decoder.clip.base_model_kwargs": Only((), "name the path of an open_clip_config.json as the model"),
    **{f"decoder.unets.{name}": READ for name in (*UNET_KEYS, "checkpoint_during_training")},
    **{f"decoder.unets.{name}": Only((), "its place among the unets decides it") for name in (
        "lowres_cond", "lowres_noise_cond", "cond_on_image_embeds", "channels_out"
    )},
    "decoder.unets.out_dim": Only((), "it has no effect"),
    "data.webdataset_base_url": Flag("image_folder"), "data.img_embeddings_url": Flag("image_embeddings"),
    "data.text_embeddings_url": Flag("text_embeddings"), "data.num_workers": Flag("num_workers", 4),
    "data.batch_size": READ, "data.start_shard": Flag("start_shard", 0),
    "data.end_shard": Flag("end_shard", None, lambda last: None if last == 9999999 else last),
    "data.shard_width": Flag("shard_width", 6), "data.index_width": Flag("index_width", 4),
    "data.splits.train": READ, "data.splits.val": Flag("valid_fraction", 0.15),
    "data.splits.test": Flag("test_fraction", 0.1),
    "data.preprocessing.ToTensor": _EITHER,
    "data.preprocessing.RandomHorizontalFlip": Flag("random_flip", False, lambda flip: flip is not False),
    "data.preprocessing.RandomResizedCrop": Only(
        (False,), "the square in the middle of each image is taken, as an embedding is of the whole image"
    ),
    "train.epochs": Flag("epochs", 20), "train.lr": Flag("learning_rate", 1e-4),
    "train.wd": Flag("weight_decay", 0.01), "train.warmup_steps": Flag("lr_warmup_steps", 0),
    "train.max_grad_norm": Flag("max_grad_norm", 0.5, lambda norm: _one_of(norm) or 0.0),
    "train.n_sample_images": Flag("num_images_save", 6), "train.cond_scale": Flag("cond_scale", 1.0),
    "train.validation_samples": Flag("valid_samples", 0),
    **{f"train.{name}": READ for name in (
        "save_every_n_samples", "epoch_samples", "use_ema", "ema_beta", "unet_training_mask"
    )},
    **{f"train.{name}": _EITHER for name in (
        "find_unused_parameters", "static_graph", "save_all", "save_latest", "save_best"
    )},
    "train.device": Only(("cuda:0", "cuda"), "each process takes its own device"),
    "train.amp": Only((False,), "give --precision bf16"),
    "evaluate.n_evaluation_samples": READ,
    "evaluate.LPIPS.net_type": _LPIPS,
    "tracker.data_path": Flag("output_dir"), "tracker.overwrite_data_path": _EITHER,  # a run that is there is resumed
    "tracker.log.log_type": Flag("report_to", "console", lambda kind: "none" if kind == "console" else kind),
    "tracker.log.wandb_entity": Flag("wandb_entity"), "tracker.log.wandb_project": Flag("wandb_project"),
    "tracker.log.wandb_run_name": Flag("wandb_name"),
    **{f"tracker.log.{name}": _EITHER for name in ("resume", "auto_resume", "verbose")},  # an id is kept in the folder
    "tracker.log.wandb_run_id": Only(("",), "the id is kept in --output_dir, where the run is resumed"),
    "tracker.load.only_auto_resume": _EITHER,
    **{f"tracker.load.{name}": _LOADED for name in (
        "load_from", "file_path", "url", "wandb_run_path", "wandb_file_path"
    )},
    "tracker.save.save_to": Only(("local",), "nothing is uploaded; upload the model/ folder after the run"),
    **{f"tracker.save.{name}": _EITHER for name in ("save_all", "save_latest", "save_best")},
    **{f"tracker.save.{name}": _IN_THE_FOLDER for name in ("save_latest_to", "save_best_to", "save_meta_to")},
    "tracker.save.save_type": Only(("checkpoint", "model"), "both are written"),
    **dict.fromkeys(("tracker.save.huggingface_repo", "tracker.save.token_path"), Only((), "nothing is uploaded")),
}  # fmt: skip
_MEASURES = ("FID", "IS", "KID", "LPIPS")
_SMALL = 1e-6  # fractions of two or three decimals add up to 1 within some 1e-16

Section = Mapping[str, Any]
Flags = dict[str, tuple[str, Any]]  # flag -> key that it comes from, and value


def without_counterpart(config: Section) -> Iterator[str]:
    """A line for each key that is unknown, or has a value to which nothing here corresponds.

    Raises:
        ValueError: one line that names a key whose value should hold keys, and does not.
    """

    def look(section: Section, above: str, shown: str) -> Iterator[str]:
        for key, value in section.items():
            name, place = f"{above}{key}", f"{shown}{key}"
            rule = KEYS.get(name)
            if name not in KEYS:
                known = [each.removeprefix(above) for each in KEYS if each.startswith(above)]
                yield f"{place}: unknown key{nearest(str(key), known)}"
            elif isinstance(rule, Only) and value is not None and value not in rule.values:
                yield f"{place} {_short(value)}: {rule.instead}"
            elif rule is PART and isinstance(value, list):
                for number, each in enumerate(value):
                    yield from look(_checked(each, place), f"{name}.", f"{place}[{number}].")
            elif rule is PART:
                yield from look(_checked(value, place), f"{name}.", f"{place}.")

    yield from look(config, "", "")
    if (lpips := _part(config, "evaluate").get("LPIPS")) is not None and "net_type" not in lpips:
        yield f"evaluate.LPIPS.net_type is alex if nothing is said: {_LPIPS.instead}"


def flags_of_config(config: Section, made: Section, processes: int) -> Flags:
    """Flags by name, each with the key that it comes from and its value; None: the flag's own default.

    Args:
        config: As `without_counterpart` has looked at it.
        made: The flags that make the decoder.
        processes: How many will train together.

    Raises:
        ValueError: one line that names the key whose value cannot be used.
    """
    flags: Flags = {}
    for key, rule in KEYS.items():
        *above, name = key.split(".")
        if isinstance(rule, Flag):
            value = _part(config, *above).get(name, rule.usual)
            value = rule.convert(value) if rule.convert else rule.usual if value is None else value
            flags[rule.name] = (key, value)
    flags |= {name: ("decoder", value) for name, value in made.items()}
    flags["split_by"] = ("data.splits", "shard")
    fractions = {"train": 0.75, "val": 0.15, "test": 0.1, **_part(config, "data", "splits")}
    total = sum(_number(value, f"data.splits.{name}") for name, value in fractions.items())
    if abs(total - 1) > _SMALL:
        raise ValueError(f"data.splits: train, val and test add up to {total:g}, not to 1")
    batch_size = _number(_part(config, "data").get("batch_size", 64), "data.batch_size") * processes
    flags["batch_size"] = ("data.batch_size", batch_size)
    if flags["report_to"][1] == "none":
        flags |= {name: (name, None) for name in ("wandb_entity", "wandb_project", "wandb_name")}
    flags |= _of_decoder(decoder_part(config), made["timesteps"])
    return {**flags, **_of_training(_part(config, "train"), _part(config, "evaluate"), batch_size, len(made["dim"]))}


def _of_decoder(decoder: Section, timesteps: int) -> Flags:
    if len([name for name in ("image_size", "image_sizes") if decoder.get(name) is not None]) != 1:
        raise ValueError("decoder: give image_sizes, a size for each unet, or image_size for one")
    noisy, blurred = (decoder.get(f"use_{kind}_for_lowres_cond", kind == "blur") for kind in ("noise", "blur"))
    if len(decoder["unets"]) > 1 and _one_of(noisy) is not False and _one_of(blurred) is not False:
        raise ValueError(
            "decoder.use_noise_for_lowres_cond and use_blur_for_lowres_cond: set one of the two to false; the "
            "other one is for all upsampling Unets"
        )
    steps = [n if n is None or n < timesteps else None for n in for_each(decoder, "sample_timesteps", None)]
    if None in steps and any(steps):
        raise ValueError("decoder.sample_timesteps: give fewer steps than timesteps for all unets, or for none")
    gammas = [_number(each, "decoder.p2_loss_weight_gamma") for each in for_each(decoder, "p2_loss_weight_gamma", 0.0)]
    if len({gamma for gamma in gammas if gamma}) > 1:
        raise ValueError("decoder.p2_loss_weight_gamma: give one gamma, or 0, for each unet")
    clip = _part(decoder, "clip")
    # OpenAI's weights were trained with another activation than open_clip's models of the same names.
    model, openai = clip.get("model", "ViT-L/14"), clip.get("make", "openai") == "openai"
    return {
        "gradient_checkpointing": (
            "decoder.unets", any(unet.get("checkpoint_during_training") for unet in decoder["unets"]) or None
        ),
        "random_crop_sizes": (
            "decoder.random_crop_sizes", [side or 0 for side in for_each(decoder, "random_crop_sizes", None)]
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


def _of_training(train: Section, evaluate: Section, batch_size: float, count: int) -> Flags:
    # Their epochs validate at their end; without epoch_samples that is not known before the data are.
    every, epoch = "train.save_every_n_samples", train.get("epoch_samples")
    saves = max(round(_number(train.get("save_every_n_samples", 100000), every) / max(batch_size, 1)), 1)
    names = ("save_every_n_steps", "sample_every_n_steps", "validate_every_n_steps")
    flags: Flags = dict.fromkeys(names, (every, saves))
    is_judged = any(evaluate.get(name) is not None for name in _MEASURES)
    if is_judged:
        samples = evaluate.get("n_evaluation_samples", 1000)
        flags["n_evaluation_samples"] = ("evaluate.n_evaluation_samples", samples)
    if epoch is not None:
        updates = math.ceil(_number(epoch, "train.epoch_samples") / max(batch_size, 1))
        epochs = _number(train.get("epochs", 20), "train.epochs")
        flags["max_steps"] = ("train.epoch_samples", math.ceil(epochs * updates))
        flags["validate_every_n_steps"] = ("train.epoch_samples", updates)
        if is_judged:
            flags["evaluate_every_n_steps"] = ("train.epoch_samples", updates)
    # ema-pytorch averages every 10 updates.
    beta = _number(train.get("ema_beta", 0.999), "train.ema_beta") ** 0.1
    flags["ema_decay"] = ("train.ema_beta", round(beta, 8) if train.get("use_ema", True) else 0.0)
    if (mask := train.get("unet_training_mask")) is not None:
        if not isinstance(mask, list) or len(mask) != count or not all(isinstance(each, bool) for each in mask):
            raise ValueError(f"train.unet_training_mask: give true or false for each of {count} unets")
        if not any(mask):
            raise ValueError("train.unet_training_mask trains no unet: set one to true")
        numbers = [number for number, is_trained in enumerate(mask, start=1) if is_trained]
        flags["train_unets"] = ("train.unet_training_mask", None if all(mask) else numbers)
    return flags


def _one_of(value: Any) -> Any:
    """Of a list of equal values one; others as they are."""
    return value[0] if isinstance(value, list) and len(set(map(str, value))) == 1 else value


def _part(config: Section, *names: str) -> Section:
    """A part of the configuration, {} if it is absent or null."""
    for name in names:
        config = config.get(name) or {}
    return config


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
