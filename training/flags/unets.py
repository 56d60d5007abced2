"""What the flags of `decoder` say of each Unet. Standard library only."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .decoder import UNET_SWITCHES
from .parser import ArgumentParser

PER_UNET = (
    "dim", "dim_mults", "cond_dim", "num_resnet_blocks", "attn_heads", "attn_dim_head", "cross_attn_heads",
    "cross_attn_dim_head", "resnet_groups", "switches", "noise_schedule", "objective", "loss_weight",
    "learned_variance", "random_crop_sizes", "learning_rate", "weight_decay", "lr_warmup_steps", "cond_scale",
    "sample_timesteps",
)  # fmt: skip

_OF_UNET = (
    "dim", "dim_mults", "cond_dim", "num_resnet_blocks", "attn_heads", "attn_dim_head", "cross_attn_heads",
    "cross_attn_dim_head", "resnet_groups",
)  # fmt: skip


def stages_of(args: argparse.Namespace, widths: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Arguments of `models.Decoder` for each Unet. The first one has the conditions of --condition_on.

    Args:
        widths: {"image_embed": d, "text_encodings": (L, d)} of the data; None for what is not used, or not known.

    Raises:
        ValueError: one line, if texts have more tokens than --max_text_len.
    """
    is_given = {kind: kind in args.condition_on for kind in ("image", "text")}
    image_width, text_shape = widths["image_embed"], widths["text_encodings"]
    if is_given["text"] and (text_shape[0] or 0) > args.max_text_len:
        raise ValueError(
            f"texts of {text_shape[0]} tokens are longer than --max_text_len {args.max_text_len}: raise it"
        )
    stages = []
    for index, size in enumerate(args.image_sizes):
        unet = {name: of_unet(args, name, index) for name in _OF_UNET}
        switches = of_unet(args, "switches", index)
        unet |= {name: name in switches for name in UNET_SWITCHES}
        levels, blocks = len(unet["dim_mults"]), unet["num_resnet_blocks"]
        is_first = index == 0
        has_image, has_text = is_first and is_given["image"], is_first and is_given["text"]
        stages.append({
            "image_size": size, "noise_schedule": of_unet(args, "noise_schedule", index),
            "objective": of_unet(args, "objective", index),
            "learned_variance": bool(of_unet(args, "learned_variance", index)),
            "unet": {
                **unet, "dim_mults": list(unet["dim_mults"]),
                "num_resnet_blocks": list(blocks) * (levels if len(blocks) == 1 else 1),
                "lowres_cond": not is_first, "lowres_noise_cond": not is_first and args.lowres_condition == "noise",
                "pixel_shuffle_upsample": "nearest_upsampling" not in switches,
                "init_cross_embed": "plain_init_conv" not in switches,
                "resnet_weight_standardization": "weight_standardization" in switches,
                "add_image_embeds_to_time": "no_embeds_in_time" not in switches,
                "cond_on_image_embeds": has_image, "cond_on_text_encodings": has_text,
                "image_embed_dim": image_width if has_image else None,
                "text_embed_dim": text_shape[1] if has_text else None,
                "image_embed_scale": args.image_embed_scale or math.sqrt(image_width or 1),
                "max_text_len": args.max_text_len, "channels_out": 6 if of_unet(args, "learned_variance", index) else 3,
                "gradient_checkpointing": args.gradient_checkpointing,
            },
        })  # fmt: skip
    return stages


def flags_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flags with which train_decoder.py builds a decoder of these constructor arguments, as a config file has them.
    What no flag can say is left out."""
    stages = config["stages"]
    unets = [stage["unet"] for stage in stages]
    flags: dict[str, Any] = {
        name: config[name]
        for name in ("timesteps", "zero_terminal_snr", "noise_shift", "lowres_condition", "lowres_noise_level")
    }
    flags |= {"image_sizes": [stage["image_size"] for stage in stages]}
    flags |= {name: [stage[name] for stage in stages] for name in ("noise_schedule", "objective")}
    flags["learned_variance"] = [int(stage["learned_variance"]) for stage in stages]
    for name in _OF_UNET:
        flags[name] = [unet[name] for unet in unets]
    flags["resnet_groups"] = [groups[0] for groups in flags["resnet_groups"]]
    for name in ("dim_mults", "num_resnet_blocks"):
        flags[name] = [",".join(map(str, values)) for values in flags[name]]
    flags["switches"] = [_switches_of(unet) for unet in unets]
    first = unets[0]
    conditions = {"image": first["cond_on_image_embeds"], "text": first["cond_on_text_encodings"]}
    flags["condition_on"] = ",".join(kind for kind, is_taken in conditions.items() if is_taken) or "none"
    return {**flags, "image_embed_scale": first["image_embed_scale"], "max_text_len": first["max_text_len"]}


def flags_that_make(
    config: Mapping[str, Any],
    parser: ArgumentParser,
    make: Callable[[argparse.Namespace, Mapping[str, Any]], Mapping[str, Any]],
) -> dict[str, Any]:
    """`flags_of`, after a look at whether they make this decoder; `make` as for `unmade`.

    Raises:
        ValueError: one line that names the argument of a Unet that no flag gives.
    """
    for number, name, value in unmade(config, parser, make):
        raise ValueError(f"train_decoder.py has no flag that makes Unet {number} with {name} {value}")
    return flags_of(config)


def unmade(
    config: Mapping[str, Any],
    parser: ArgumentParser,
    make: Callable[[argparse.Namespace, Mapping[str, Any]], Mapping[str, Any]],
) -> Iterator[tuple[int, str, Any]]:
    """Arguments of Unets that no flag gives: the number of the Unet, from 1, the argument's name and its value.

    Args:
        make: (arguments, widths as for `stages_of`) -> constructor arguments of the decoder that the script makes.
    """
    import torch

    flags, first = flags_of(config), config["stages"][0]["unet"]
    widths = {"image_embed": first["image_embed_dim"], "text_encodings": (None, first["text_embed_dim"])}
    with torch.device("meta"):
        built = make(parser.with_values(flags), widths)["stages"]
    for number, (ours, theirs) in enumerate(zip(built, config["stages"], strict=True), start=1):
        for name in sorted(theirs["unet"].keys() - {"gradient_checkpointing"}):
            if ours["unet"][name] != theirs["unet"][name]:
                yield number, name, theirs["unet"][name]


def _switches_of(unet: Mapping[str, Any]) -> str:
    """The value of --switches for a Unet of these arguments."""
    on = {name: unet[name] for name in UNET_SWITCHES} | {"self_attn": all(unet["self_attn"])}
    on |= {
        "nearest_upsampling": not unet["pixel_shuffle_upsample"], "plain_init_conv": not unet["init_cross_embed"],
        "weight_standardization": unet["resnet_weight_standardization"],
        "no_embeds_in_time": not unet["add_image_embeds_to_time"],
    }  # fmt: skip
    return ",".join(name for name, is_on in on.items() if is_on) or "none"


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `models.decoder.Sampling`."""
    return {
        "sampler": args.sampler, "steps": args.sample_timesteps, "cond_scale": args.cond_scale,
        "interval": args.guidance_interval, "rescale": args.cfg_rescale, "eta": args.ddim_eta,
        "quantile": args.dynamic_thresholding, "spacing": args.spacing,
    }  # fmt: skip


def of_unet(args: argparse.Namespace, name: str, index: int) -> Any:
    """The value that a flag of `PER_UNET` has for a Unet, from 0; one crop size is that of the upsampling Unets."""
    values: Sequence[Any] | None = getattr(args, name)
    if name == "random_crop_sizes" and len(args.image_sizes) > len(args.random_crop_sizes) and not index:
        return 0
    return None if values is None else values[index if len(values) > 1 else 0]


def spread(said: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run, with a value for each Unet in every flag of `PER_UNET`: what a resumed run is compared by."""
    count = len(said["image_sizes"])
    lists = {name: value for name in PER_UNET if isinstance(value := said.get(name), list) and len(value) == 1}
    return {**said, **{name: value * count for name, value in lists.items()}}


def check_unet_flags(parser: ArgumentParser, args: argparse.Namespace) -> None:
    """End with an error if lists do not fit the number of Unets."""
    count, sizes = len(args.image_sizes), " ".join(map(str, args.image_sizes))
    needed = f"1 or {count}" if count > 1 else "1"
    for name in PER_UNET:
        n = len(getattr(args, name) or [])
        if n > 1 and n != count:
            parser.error(f"--{name} has {n} values for {count} Unets (--image_sizes {sizes}): give {needed}")
    if len(args.random_crop_sizes) == count and args.random_crop_sizes[0]:
        crops = " ".join(map(str, args.random_crop_sizes))
        parser.error(f"--random_crop_sizes {crops}: Unet 1 is trained on whole pictures; give 0 for it")
    for number in args.train_unets or []:
        if number > count:
            parser.error(f"--train_unets {number}: there are {count} Unets (--image_sizes {sizes})")
    if any(larger <= size for size, larger in itertools.pairwise(args.image_sizes)):
        parser.error(f"--image_sizes {sizes}: give them ascending, the smallest first")


def refuse_idle_decoder_flags(parser: ArgumentParser, args: argparse.Namespace) -> None:
    """End with an error if a flag on the command line has no effect beside the others."""
    refuse_idle_sampling_flags(parser, args)
    of_weight = {"min_snr_gamma": "min_snr", "sigmoid_bias": "sigmoid"}
    of_weight |= {"p2_loss_weight_gamma": "p2", "p2_loss_weight_k": "p2"}
    for flag, weight in of_weight.items():
        parser.refuse_idle(args, [flag], "loss_weight", weight, weight in args.loss_weight)
    is_normal = args.time_sampling == "logit_normal"
    parser.refuse_idle(args, ["logit_normal"], "time_sampling", "logit_normal", is_normal)
    parser.refuse_idle(args, ["vb_loss_weight"], "learned_variance", "1", 1 in args.learned_variance)
    of_blur = ["blur_prob", "blur_sigma"]
    parser.refuse_idle(args, of_blur, "lowres_condition", "blur", args.lowres_condition == "blur")
    parser.refuse_idle(args, ["lowres_noise_level"], "lowres_condition", "noise", args.lowres_condition == "noise")
    several = ["lowres_condition", "blur_prob", "blur_sigma"]
    parser.refuse_idle(args, several, "image_sizes", "of several Unets", len(args.image_sizes) > 1)
    of_judging = ["fid_weights", "lpips_weights", "evaluate_every_n_steps"]
    parser.refuse_idle(args, of_judging, "n_evaluation_samples", "above 0", args.n_evaluation_samples > 0)
    for kind, flags in {"image": ["image_embed_scale"], "text": ["max_text_len"]}.items():
        flags = [f"{kind}_cond_drop_prob", *flags]
        with_it = ",".join(sorted({*args.condition_on, kind}))
        parser.refuse_idle(args, flags, "condition_on", with_it, kind in args.condition_on)
    of_guidance = ["cond_scale", "guidance_interval", "cfg_rescale"]
    parser.refuse_idle(args, of_guidance, "condition_on", "image or text", bool(args.condition_on))
    is_clip_used = bool(args.condition_on) or args.n_evaluation_samples > 0
    parser.refuse_idle(args, ["clip"], "condition_on", "image or text, or give --n_evaluation_samples", is_clip_used)
    dropped = {"image": args.image_cond_drop_prob, "text": args.text_cond_drop_prob}
    never = [kind for kind in args.condition_on if not dropped[kind]]
    if args.cond_scale[0] != 1 and never:
        parser.error(
            f"--cond_scale {args.cond_scale[0]:g} guides away from what the model draws without a condition, which it "
            f"never learns with --{never[0]}_cond_drop_prob 0: give 0.1, for example"
        )
    if args.logit_normal[1] <= 0:
        parser.error("--logit_normal: the standard deviation has to be above 0")
    if len(args.blur_sigma) > 2 or args.blur_sigma[0] > args.blur_sigma[-1]:
        parser.error("--blur_sigma: give one width, or the least and the greatest")


def refuse_idle_sampling_flags(parser: ArgumentParser, args: argparse.Namespace, *others: str) -> None:
    """End with an error if the guidance interval is empty, or if a flag of sampling stands on the command line and has
    no effect beside the other ones; `others` are further flags that need guidance."""
    if args.guidance_interval and args.guidance_interval[0] >= args.guidance_interval[1]:
        parser.error("--guidance_interval: the first number has to be the smaller one")
    parser.refuse_idle(args, ["ddim_eta"], "sampler", "ddim", args.sampler == "ddim")
    is_guided = any(scale != 1 for scale in args.cond_scale)
    of_guidance = ["guidance_interval", "cfg_rescale", *others]
    parser.refuse_idle(args, of_guidance, "cond_scale", "other than 1, such as 3", is_guided)
