"""What the flags of `decoder` say of each Unet. Standard library only."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .decoder import UNET_SWITCHES
from .parser import ArgumentParser

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
        unet = {name: getattr(args, name)[index] for name in _OF_UNET}
        switches = args.switches[index]
        unet |= {name: name in switches for name in UNET_SWITCHES}
        levels, blocks = len(unet["dim_mults"]), unet["num_resnet_blocks"]
        is_first = index == 0
        has_image, has_text = is_first and is_given["image"], is_first and is_given["text"]
        stages.append({
            "image_size": size, "noise_schedule": args.noise_schedule[index],
            "objective": args.objective[index],
            "learned_variance": bool(args.learned_variance[index]),
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
                "max_text_len": args.max_text_len, "channels_out": 6 if args.learned_variance[index] else 3,
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
