"""Reads the folder of an AutoencoderKL, an AutoencoderKLFlux2 or a VQModel of diffusers as a `VQGAN` with --body
taming, or that of an AutoencoderKLWan as a `VideoTokenizer` with --body wan (wan.py), and writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from tandem.config.models.taming import KL, SCALE_IS_MEASURED, check_number
from tandem.io.published import read_state_dict, refuse_weights_flag
from tandem.io.reading import check_inside, read_json, read_json_or_empty
from tandem.io.weights import replacing_model_file, strip_wrappers
from tandem.models.autoencoders.video_tokenizer import VideoTokenizer
from tandem.models.autoencoders.vqgan import VQGAN
from tandem.models.base import read_weight_index

from . import flux2, wan
from .taming import (
    CHANNEL_STATISTICS,
    GROUPS,
    Layout,
    checked_statistics,
    code_channels,
    public_state,
    read_autoencoder,
)

# Older names of the parts of an attention, as in the published autoencoders of Stable Diffusion.
_OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
_OLD_NAME = re.compile(rf"(?<=\.)({'|'.join(_OLD_NAMES)})(?=\.(weight|bias)$)")
_CONFIG = "config.json"
_FILES = (
    "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.bin",
)  # fmt: skip
# The indices of weights in several files.
_INDICES = (
    "diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.fp16.json",
    "diffusion_pytorch_model.bin.index.json",
)  # fmt: skip
_CLASSES = {KL: "AutoencoderKL", "vq": "VQModel"}
# Options of which `VQGAN` has a single value, which is also their default in diffusers.
_CONSTANTS = {
    "act_fn": "silu", "norm_type": "group", "mid_block_add_attention": True, "decoder_block_out_channels": None,
}  # fmt: skip
_DEFAULT_SCALE = 0.18215  # the default of diffusers: that of Stable Diffusion 1 and 2
_MAX_GROUPS, _MAX_SIDE = 1 << 16, 1 << 13


def diffusers_folder(path: Path) -> Path | None:
    """The folder of a model of diffusers: the path itself, or the autoencoder's folder in a pipeline or in any folder
    without a configuration; None for other folders. Only configurations are read."""
    is_pipeline = (path / "model_index.json").is_file() or not (path / _CONFIG).is_file()
    names = ("vae", "vqvae") if is_pipeline else ()
    for folder in (path, *(path / name for name in names)):
        config = read_json_or_empty(folder / _CONFIG)
        if "_class_name" in config and "model" not in config:  # our own config.json has the key "model"
            return folder
    return None


def save_folder(model: VQGAN | VideoTokenizer, folder: Path) -> str:
    """Write weights and configuration for ``from_pretrained`` of diffusers; each file appears whole or not at all.
    Returns a sentence about how to load it. Raises ValueError, in one line, if diffusers has no such model."""
    if isinstance(model, VideoTokenizer):
        state, config = wan.public_state(model), wan.public_config(model)
        note = "" if model.latents_mean else "; its latents_mean and latents_std are unknown, and 0 and 1 are written"
    else:
        state, config, note = _public_image_model(model)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing_model_file(folder / _FILES[0]) as temporary:
        save_file(state, temporary, metadata={"format": "pt"})
    with replacing_model_file(folder / _CONFIG) as temporary:
        temporary.write_text(json.dumps(config, indent=2) + "\n")
    return f"load it by {config['_class_name']}.from_pretrained{note}"


def _public_image_model(model: VQGAN) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """Weights and configuration of diffusers for a `VQGAN`, and a note about them. Raises what `save_folder` raises.

    Some pipelines give their generator (latent - shift_factor) x scaling_factor; others, if there are latents_mean and
    latents_std, (latent - latents_mean) x scaling_factor / latents_std. So that the second, too, has a deviation of 1,
    the latents_std that is written is the deviation of a channel x scaling_factor. Beside a scale that was given, only
    lists that were given with it are written: a pipeline whose generator was trained with a published scale alone would
    normalise by measured ones."""
    state, config = public_state(model, DIFFUSERS), model.config
    attention_levels, levels = config["attention_levels"] or (), range(len(config["ch_mult"]))
    attention = ["Attn" if level in attention_levels else "" for level in levels]
    attention_up = attention if config["decoder_attention"] else [""] * len(attention)
    code_dim, z_channels = code_channels(config)
    if not model.num_codes and z_channels != code_dim:
        raise ValueError(
            f"an AutoencoderKL has as many z_channels as latent_dim; this model has {z_channels} and {code_dim}"
        )
    if config["ch_mult"][0] != 1:
        raise ValueError(f"--ch_mult of a model of diffusers begins with 1, not as here {config['ch_mult']}")
    public_config: dict[str, Any] = {
        "_class_name": _CLASSES[config["quantizer"]], "act_fn": "silu",
        "block_out_channels": [config["dim"] * multiple for multiple in config["ch_mult"]],
        "down_block_types": [f"{attn}DownEncoderBlock2D" for attn in attention],
        "up_block_types": [f"{attn}UpDecoderBlock2D" for attn in reversed(attention_up)],
        "in_channels": config["channels"], "out_channels": config["channels"], "latent_channels": z_channels,
        "layers_per_block": config["num_resnet_blocks"][0], "norm_num_groups": config["norm_groups"],
        "sample_size": config["image_size"],
    }  # fmt: skip
    if not model.num_codes:
        public_config |= dict.fromkeys(("use_quant_conv", "use_post_quant_conv"), config["quant_conv"])
    if config["latent_patch"] > 1 and not model.num_codes:
        options, statistics = flux2.public_statistics(model)
        note = "" if model.latents_std else "; its statistics are unknown, and 0 and 1 are written"
        return {**state, **statistics}, {**public_config, **options}, note
    public_config["scaling_factor"] = config["scaling_factor"] or _DEFAULT_SCALE
    public_config["force_upcast"] = config["force_upcast"]
    if model.num_codes:
        public_config |= {"num_vq_embeddings": model.num_codes, "vq_embed_dim": code_dim}
    else:
        public_config |= {"shift_factor": config["shift_factor"]}
        is_measured = SCALE_IS_MEASURED in model.saved_config()
        if model.latents_std is not None and (is_measured or model.has_given_channels):
            std = [value * public_config["scaling_factor"] for value in model.latents_std]
            public_config |= {"latents_mean": model.latents_mean, "latents_std": std}
    note = f"; its scaling_factor is unknown, and {_DEFAULT_SCALE}, that of Stable Diffusion 1, is written"
    is_known = bool(model.num_codes or config["scaling_factor"])
    return state, public_config, "" if is_known else note


def read_folder(folder: Path, weights: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments, with the class as "model", and weights of the model in a folder. Raises what `read_autoencoder`
    raises."""
    config = read_json(check_inside(folder / _CONFIG, folder))
    if config.get("_class_name") in wan.CLASSES:
        arguments, statistics = wan.read_config(config)
        arguments, state = wan.our_contents(_read_weights(folder, weights), arguments, statistics, "diffusers")
        return {**arguments, "model": "VideoTokenizer"}, state
    arguments, state = read_autoencoder(DIFFUSERS, folder, weights)
    return {**arguments, "model": "VQGAN"}, state


def _read_weights(folder: Path, weights: str) -> dict[str, Tensor]:
    refuse_weights_flag(folder, weights)
    state: dict[str, Tensor] = {}
    for path, names in weight_files(folder).items():
        state |= read_state_dict(check_inside(path, folder), strip_wrappers(names) or None)
    return state


def _read_image_model(folder: Path, weights: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """See `Layout.read`."""
    arguments, state = read_folder_config(folder), _read_weights(folder, weights)
    if (epsilon := arguments.pop(flux2.EPSILON, None)) is not None:
        arguments[CHANNEL_STATISTICS] = flux2.pop_statistics(state, epsilon)
    return {_OLD_NAME.sub(lambda match: _OLD_NAMES[match[0]], name): state[name] for name in state}, arguments


def weight_files(folder: Path) -> dict[Path, list[str]]:
    """The files of a folder's weights, which may not exist, each with the names of its tensors; an empty list means
    all. Raises OSError or ValueError, in one line, if an index of them is damaged."""
    path = next((folder / name for name in _FILES if (folder / name).exists()), None)
    index = next((folder / name for name in _INDICES if (folder / name).exists()), None)
    return read_weight_index(index) if index and not path else {path or folder / _FILES[0]: []}


def read_folder_config(folder: Path) -> dict[str, Any]:
    """The arguments in an untrusted configuration that do not follow from the weights.

    Raises:
        OSError, ValueError: one line, if there is no configuration, or no model of ours equals its model.
    """
    config = read_json(check_inside(folder / _CONFIG, folder))
    if config.get("_class_name") in wan.CLASSES:
        return wan.read_config(config)[0]
    class_name, groups = config.get("_class_name"), config.get("norm_num_groups", GROUPS)
    if class_name not in (*_CLASSES.values(), flux2.CLASS):
        readable = ", ".join((*_CLASSES.values(), flux2.CLASS, *wan.CLASSES))
        raise ValueError(f"it holds a {str(class_name)[:80]} of diffusers; only {readable} can be read")
    for name, value in _CONSTANTS.items():
        if config.get(name, value) != value:
            raise ValueError(f"its {name} is {str(config[name])[:80]}; only {value} is supported")
    if type(groups) is not int or not 1 <= groups <= _MAX_GROUPS:
        raise ValueError(f"its norm_num_groups is {str(groups)[:80]}, not a whole number from 1 to {_MAX_GROUPS}")
    is_kl = class_name == _CLASSES[KL]
    upcast = config.get("force_upcast", class_name != _CLASSES["vq"])  # the default of diffusers
    if type(upcast) is not bool:
        raise ValueError(f"its force_upcast is {str(upcast)[:80]}, neither true nor false")
    sides = config.get("sample_size", 256)
    for side in sides if isinstance(sides, list) and len(sides) == 2 else [sides]:
        if type(side) is not int or not 1 <= side <= _MAX_SIDE:
            raise ValueError(f"its sample_size is {str(sides)[:80]}, not a whole number from 1 to {_MAX_SIDE}, or two")
    if class_name == flux2.CLASS:
        return {"norm_groups": groups, "image_size": sides, "force_upcast": upcast, **flux2.read_config(config)}
    if (scaling := config.get("scaling_factor", _DEFAULT_SCALE)) is None:
        raise ValueError("its scaling_factor is null")
    return {
        "norm_groups": groups, "scaling_factor": scaling, "shift_factor": config.get("shift_factor"),
        "image_size": sides, "force_upcast": upcast,
        CHANNEL_STATISTICS: _channel_statistics(config, scaling) if is_kl else None,
    }  # fmt: skip


def _channel_statistics(config: Mapping[str, Any], scaling: Any) -> tuple[list[float], list[float]] | None:
    """Mean and standard deviation of each channel in an untrusted configuration: latents_mean, and, as `save_folder`
    says, latents_std / scaling_factor; None if it lacks them. Raises ValueError, in one line, if they are no such
    numbers."""
    mean, std = config.get("latents_mean"), config.get("latents_std")
    if mean is None and std is None:
        return None
    mean, std = checked_statistics(mean, std)
    check_number("scaling_factor", scaling)
    if scaling <= 0:
        raise ValueError(f"its scaling_factor is {scaling}, not above 0")
    return mean, [value / scaling for value in std]


DIFFUSERS = Layout(
    "diffusers", _read_image_model, ("vq", KL), "{side}_blocks.{index}.{kind}", "mid_block.{kind}.{before}",
    {"block": "resnets", "attn": "attentions", "downsample": "downsamplers.0", "upsample": "upsamplers.0",
     "nin_shortcut": "conv_shortcut", "norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v",
     "proj_out": "to_out.0", "norm_out": "conv_norm_out"},
    has_matrices=True,
)  # fmt: skip
