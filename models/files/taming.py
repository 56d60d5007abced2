"""Autoencoders of taming-transformers, latent diffusion, LlamaGen, IBQ and diffusers as a `VQGAN` with taming's body,
and back: the same weights by other names.

A file of all but diffusers says no arguments, which follow from names and shapes; but for the groups of its GroupNorms,
32 in all of these packages. IBQ's files have the names of taming's. They are known by their moving average, which IBQ's
configurations keep, and those of published vector quantizers do not.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tandem.files.reading import DAMAGES, check_inside, check_regular, one_line, read_json, read_json_or_empty

from ..taming_config import KL, TAMING
from ..vqgan import VQGAN
from .archive import mentions
from .building import build_on_meta, check_arguments
from .description import describe_weights
from .published import read_state_dict
from .writing import on_cpu, replacing

_GROUPS = 32  # as many in every GroupNorm of taming's and LlamaGen's code
_CODEBOOK, _USED = "quantize.embedding.weight", "quantize.codebook_used"
_USED_LENGTH = 65536  # of LlamaGen's memory of the codes that were used last
_LAYER = re.compile(r"(down|up|mid)(?:_(\d+))?_(block|attn|downsample|upsample)(?:_(\d+))?")

_OF_DIFFUSION = "first_stage_model."
# What stands beside an autoencoder in its own file and in one of a whole latent diffusion, and is not needed for it.
_OTHERS = (
    "loss.", "colorize", "model.", "model_ema.diffusion_model", "cond_stage_model.", "conditioner.", "text_encoders.",
)  # fmt: skip
_AVERAGE = "model_ema."
# Classes of which a trainer's checkpoint holds objects, beside its weights.
_IGNORED = frozenset((
    "pytorch_lightning.callbacks.model_checkpoint ModelCheckpoint", "pytorch_lightning.callbacks ModelCheckpoint",
    "argparse Namespace", "numpy.core.multiarray scalar", "numpy._core.multiarray scalar", "numpy dtype",
    "_codecs encode",
))  # fmt: skip

_CONFIG = "config.json"
_FILES = (
    "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.bin",
)  # fmt: skip
_CLASSES = {KL: "AutoencoderKL", "vq": "VQModel"}  # of diffusers
# Layers and parts of layers in diffusers; and what they were called before its version 0.15.
_PLACES = {"block": "resnets", "attn": "attentions", "downsample": "downsamplers", "upsample": "upsamplers"}
_PARTS = {
    "nin_shortcut": "conv_shortcut", "norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0",
}  # fmt: skip
_EARLIER = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
_EARLIER_NAME = re.compile(rf"(.+\.attentions\.\d+)\.({'|'.join(_EARLIER)})\.(weight|bias)")
# What a configuration of diffusers means that does not say it, and all that we have of these.
_CONSTANTS = {
    "act_fn": "silu", "norm_type": "group", "mid_block_add_attention": True, "latents_mean": None, "latents_std": None,
}  # fmt: skip
_USUAL_SCALE = 0.18215  # in diffusers, of a configuration that says none: that of Stable Diffusion 1 and 2
_MOST_GROUPS = 1 << 16


class Layout(NamedTuple):
    """How a package names the layers of taming's body."""

    package: str
    quantizers: tuple[str, ...]
    """Those that it has."""
    is_cosine: bool = False
    """Whether codes are chosen by their angle."""


LAYOUTS = {
    "taming": Layout("taming-transformers and latent diffusion", ("vq", "ibq", KL)),
    "llamagen": Layout("LlamaGen", ("vq",), is_cosine=True),
    "diffusers": Layout("diffusers", ("vq", KL)),
}


def public_name(name: str, layout: str, levels: int) -> str:
    """The name in a public package of a weight of a `VQGAN` with so many levels; ``name`` is one of those it has, too."""
    if name.startswith("quantizer."):
        return _CODEBOOK
    part, layer, rest = name.split(".", 2)
    if layer.endswith("quant_conv"):
        return f"{layer}.{rest}"
    found = _LAYER.fullmatch(layer)
    if found is None:
        return f"{part}.{'conv_norm_out' if layout == 'diffusers' and layer == 'norm_out' else layer}.{rest}"
    side, level, what, number = found.groups()
    if layout == "taming":
        place = f"mid.{what}_{number}" if side == "mid" else ".".join(filter(None, (side, level, what, number)))
        return f"{part}.{place}.{rest}"
    index = None if level is None else int(level) if side == "down" else levels - 1 - int(level)
    if layout == "llamagen":
        what = "res" if what == "block" else what
        order = {("res", "1"): 0, ("attn", "1"): 1, ("res", "2"): 2}
        place = f"mid.{order[what, number]}" if index is None else f"conv_blocks.{index}.{what}"
        return f"{part}.{place}.{rest}" if index is None or number is None else f"{part}.{place}.{number}.{rest}"
    first, _, last = rest.partition(".")
    place = f"mid_block.{_PLACES[what]}.{int(number) - 1}" if index is None else (
        f"{side}_blocks.{index}.{_PLACES[what]}.{number or 0}")  # fmt: skip
    return f"{part}.{place}.{_PARTS.get(first, first)}.{last}"


def is_public_autoencoder(path: Path) -> bool:
    """Whether a file names weights of taming's body. Raises ValueError, in one line, if it is no regular file."""
    return mentions(path, b"encoder.conv_in.weight")


def is_llamagen(path: Path) -> bool:
    """Whether a file names weights of LlamaGen's tokenizer. Errors: see `is_public_autoencoder`."""
    return mentions(path, b"encoder.conv_blocks.")


def diffusers_folder(path: Path) -> Path | None:
    """The folder of the autoencoder in a folder of diffusers: itself, or of a pipeline its vae or vqvae; None if it is
    no such folder."""
    parts = [path / name for name in ("vae", "vqvae")] if (path / "model_index.json").is_file() else []
    for folder in (path, *parts):
        config = read_json_or_empty(folder / _CONFIG)
        if "_class_name" in config and "model" not in config:
            return folder
    return None


def load_public_autoencoder(path: Path, layout: str, *, weights: str = "best") -> VQGAN:
    """The model in a public file, or in a folder of diffusers, in eval mode. Runs no code from it.

    Args:
        weights: Of a checkpoint that has both: their moving average ("ema" or "best"), or those as trained ("online").

    Raises:
        ValueError: one line, if the file is missing, damaged, hostile, of something else, or has what a `VQGAN` lacks.
    """
    return VQGAN.with_weights(path, *_read(path, layout, weights))


def describe_public_autoencoder(path: Path, layout: str) -> dict[str, Any]:
    """Facts about a public file or folder. Errors: see `load_public_autoencoder`."""
    arguments, weights = _read(path, layout, "best")
    kind = f"{LAYOUTS[layout].package} {'folder' if path.is_dir() else 'file'}"
    file = _weights_file(path) if path.is_dir() else path
    sizes = {file.name: file.stat().st_size}
    return {"kind": kind, "model": "VQGAN", "arguments": arguments, **describe_weights(weights), "bytes": sizes}


def save_public_autoencoder(model: VQGAN, path: Path, layout: str) -> str:
    """Write the state dict of a public package, which it loads strictly, or for diffusers the folder; each file appears
    whole or not at all.

    Returns:
        What makes the model there that loads the file.

    Raises:
        ValueError: one line, if the public package has no such model.
    """
    config = model.saved_config()
    _check_has_public_form(config, layout)
    state = {}
    for name, tensor in on_cpu(model.state_dict()).items():
        if not _is_ours_alone(name):
            public = public_name(name, layout, len(config["ch_mult"]))
            is_matrix = layout == "diffusers" and ".attentions." in public and tensor.ndim == 4
            state[public] = tensor[:, :, 0, 0].contiguous() if is_matrix else tensor
    if layout == "diffusers":
        return _save_folder(config, state, path)
    if layout == "llamagen":
        state[_USED] = torch.zeros(_USED_LENGTH)
    with replacing(path) as unfinished:
        torch.save({"model" if layout == "llamagen" else "state_dict": state}, unfinished)
    side, is_continuous = config["image_size"], config["quantizer"] == KL
    attended = [side >> level for level in config["attention_levels"] or ()]
    made = {
        "ch": config["dim"], "ch_mult": config["ch_mult"], "num_res_blocks": config["num_resnet_blocks"][0],
        "attn_resolutions": attended, "resolution": side, "z_channels": _channels(config)[1],
        "double_z": is_continuous, "embed_dim": _channels(config)[0],
    }  # fmt: skip
    made |= {} if is_continuous else {"n_embed": config["codebook_size"]}
    return "its arguments there: " + ", ".join(f"{name} {value}" for name, value in made.items())


def _channels(config: Mapping[str, Any]) -> tuple[int, int]:
    """Of a code or a latent, and between the encoder and quant_conv."""
    code = config["latent_dim" if config["quantizer"] == KL else "codebook_dim"]
    return code, config["z_channels"] or code


def _save_folder(config: Mapping[str, Any], state: Mapping[str, Tensor], folder: Path) -> str:
    levels, attended = range(len(config["ch_mult"])), config["attention_levels"] or ()
    attention = ["Attn" if level in attended else "" for level in levels]
    scale, (code, z_channels) = config["scaling_factor"], _channels(config)
    said: dict[str, Any] = {
        "_class_name": _CLASSES[config["quantizer"]], "act_fn": "silu",
        "block_out_channels": [config["dim"] * times for times in config["ch_mult"]],
        "down_block_types": [f"{attn}DownEncoderBlock2D" for attn in attention],
        "up_block_types": [f"{attn}UpDecoderBlock2D" for attn in reversed(attention)],
        "in_channels": config["channels"], "out_channels": config["channels"], "latent_channels": z_channels,
        "layers_per_block": config["num_resnet_blocks"][0], "norm_num_groups": config["norm_groups"],
        "sample_size": config["image_size"], "scaling_factor": scale or _USUAL_SCALE,
    }  # fmt: skip
    if config["quantizer"] == KL:
        said |= {"shift_factor": config["shift_factor"]}
        said |= dict.fromkeys(("use_quant_conv", "use_post_quant_conv"), config["quant_conv"])
    else:
        said |= {"num_vq_embeddings": config["codebook_size"], "vq_embed_dim": code}
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / _FILES[0]) as unfinished:
        save_file(dict(state), unfinished, metadata={"format": "pt"})
    with replacing(folder / _CONFIG) as unfinished:
        unfinished.write_text(json.dumps(said, indent=2) + "\n")
    unknown = (
        "" if scale else f"; its scaling factor is not known: {_USUAL_SCALE}, that of Stable Diffusion, is written"
    )
    return f"load it by {said['_class_name']}.from_pretrained{unknown}"


def _check_has_public_form(config: Mapping[str, Any], layout: str) -> None:
    package, quantizers, is_cosine = LAYOUTS[layout]
    name = config["quantizer"]
    if config["body"] != TAMING:
        raise ValueError(
            f"{package} has taming's body, and this model has {config['body']}'s: train with --body taming"
        )
    if name not in quantizers:
        raise ValueError(f"{package} has the quantizers {', '.join(quantizers)}, and this model has {name}")
    if name == "vq" and config["vq_cosine"] != is_cosine:
        raise ValueError(f"{package} has vq {'with' if is_cosine else 'without'} --vq_cosine alone")
    if layout != "diffusers" and config["norm_groups"] != _GROUPS:
        raise ValueError(f"{package} has {_GROUPS} groups in a GroupNorm, and this model {config['norm_groups']}")
    if name == "vq" and not config["quant_conv"]:
        raise ValueError(f"{package} has a quant_conv beside its codebook, and this model has none")
    last = len(config["ch_mult"]) - 1
    if layout == "llamagen" and list(config["attention_levels"] or ()) != [last]:
        raise ValueError(f"{package} has attention at the last level alone: --attention_levels {last}")


def _is_ours_alone(name: str) -> bool:
    """Whether a weight of ours is state of a quantizer that no public file has."""
    return name.startswith("quantizer.") and not name.startswith("quantizer.codebook")


def _read(path: Path, layout: str, weights: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Constructor arguments of a `VQGAN`, and its weights."""
    with _errors_of(path):
        if layout == "diffusers":
            said = _said_by(read_json(check_inside(path / _CONFIG, path)))
            if weights != "best":
                raise ValueError(f"--weights {weights}: it holds one set of weights; leave it out")
            state = read_state_dict(check_regular(check_inside(_weights_file(path), path)))
            return _translated({_later(name): tensor for name, tensor in state.items()}, layout, said)
        state, said = _state_of(path, weights)
        return _translated(state, layout, said)


def _weights_file(folder: Path) -> Path:
    return next((folder / name for name in _FILES if (folder / name).exists()), folder / _FILES[0])


def _later(name: str) -> str:
    found = _EARLIER_NAME.fullmatch(name)
    return f"{found[1]}.{_EARLIER[found[2]]}.{found[3]}" if found else name


def _said_by(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a stranger's configuration of diffusers says that does not follow from the weights."""
    if config.get("_class_name") not in _CLASSES.values():
        raise ValueError(
            f"it holds a {str(config.get('_class_name'))[:80]}, and {', '.join(_CLASSES.values())} are taken"
        )
    for name, value in _CONSTANTS.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name} {str(config[name])[:80]}: a VQGAN has {value} alone")
    groups, scale = config.get("norm_num_groups", _GROUPS), config.get("scaling_factor", _USUAL_SCALE)
    if type(groups) is not int or not 1 <= groups <= _MOST_GROUPS:
        raise ValueError(f"norm_num_groups {str(groups)[:80]}: give 1 to {_MOST_GROUPS}")
    return {"norm_groups": groups, **_scale(scale, config.get("shift_factor"))}


def _scale(scale: Any, shift: Any = None) -> dict[str, Any]:
    for name, number in (("scaling_factor", scale), ("shift_factor", 0.0 if shift is None else shift)):
        if type(number) not in (int, float) or not abs(number) < math.inf:
            raise ValueError(f"{name} {str(number)[:80]}: give a number")
    if scale <= 0:
        raise ValueError(f"scaling_factor {scale}: give a number above 0")
    return {"scaling_factor": float(scale), "shift_factor": None if shift is None else float(shift)}


class _Wanted:
    """Holds the names of weights that an autoencoder may have."""

    def __contains__(self, name: object) -> bool:
        return not str(name).startswith(_OTHERS)


def _state_of(path: Path, weights: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state dict of an autoencoder's file, or of the first stage in that of a whole latent diffusion, whose scale of
    the latents is an argument that it says; and whether there is a moving average."""
    parts = {"best": ("ema", "model", "state_dict"), "ema": ("ema", "state_dict")}.get(weights, ("model", "state_dict"))
    found = read_state_dict(check_regular(path), _Wanted(), parts, ignored=_IGNORED)
    prefix = _OF_DIFFUSION if any(name.startswith(_OF_DIFFUSION) for name in found) else ""
    state = {
        name.removeprefix(prefix): tensor
        for name, tensor in found.items()
        if name.startswith(prefix) and not name.removeprefix(prefix).startswith((_AVERAGE, *_OTHERS))
    }
    scale = found.get("scale_factor") if prefix else None
    said = {} if scale is None or scale.numel() != 1 else _scale(scale.item())
    averages = {
        name: found[f"{_AVERAGE}{short}"] for name in state if f"{_AVERAGE}{(short := name.replace('.', ''))}" in found
    }
    if averages and _CODEBOOK in averages:
        said["quantizer"] = "ibq"
    if weights == "ema" and not averages and "ema" not in parts:
        raise ValueError("it holds no moving average of the weights")
    state.pop(_USED, None)
    return state if weights == "online" else {**state, **averages}, said


def _translated(
    state: Mapping[str, Tensor], layout: str, said: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if any(name.startswith("decoder.adaptive.") for name in state):
        raise ValueError("it is of Open-MAGVIT2, whose body is not taming's: adaptive GroupNorms, and no attention")
    arguments = {**_arguments(state, layout), **said}
    check_arguments(arguments, state)
    expected = build_on_meta(lambda: VQGAN.made(arguments)).state_dict()
    names = {
        public_name(name, layout, len(arguments["ch_mult"])): name for name in expected if not _is_ours_alone(name)
    }
    package = LAYOUTS[layout].package
    for name in state:
        if name not in names:
            raise ValueError(f"it holds {name[:80]}, which is no weight of such an autoencoder of {package}")
    weights = {}
    for public, name in names.items():
        if public not in state:
            raise ValueError(f"it lacks {public}, a weight of an autoencoder of {package}")
        is_matrix = state[public].ndim == 2 and expected[name].ndim == 4
        weights[name] = state[public][:, :, None, None] if is_matrix else state[public]
    return arguments, weights | _state_of_quantizer(arguments, weights)


def _state_of_quantizer(arguments: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a quantizer of ours has beside the weights of a file: training goes on from these entries, of which each
    counts as if one vector had chosen it."""
    if arguments["quantizer"] == KL:
        return {"quantizer.moments": torch.zeros(3)}
    if arguments["quantizer"] != "vq":
        return {}
    entries = weights["quantizer.codebook"].float()
    entries = F.normalize(entries, dim=-1) if arguments["vq_cosine"] else entries
    counts = torch.ones(len(entries))
    return {
        "quantizer.codebook": entries, "quantizer.code_sums": entries, "quantizer.code_counts": counts,
        "quantizer.initialized": torch.tensor(True),
    }  # fmt: skip


def _arguments(state: Mapping[str, Tensor], layout: str) -> dict[str, Any]:
    """Constructor arguments as names and shapes have them; the encoder's names are the same for any number of levels."""

    def shape(name: str) -> tuple[int, ...]:
        if name not in state or state[name].ndim != 4:
            raise ValueError(f"it lacks {name}, the weights of a convolution")
        return tuple(state[name].shape)

    def there(layer: str) -> Iterator[str]:
        """Public names of the encoder's layers with the numbers 0, 1, ..., as long as there are some."""
        number = 0
        while (name := public_name(f"encoder.{layer.format(number)}", layout, 0)) in state:
            yield name
            number += 1

    dim, channels = shape("encoder.conv_in.weight")[:2]
    widths = [shape(name)[0] for name in there("down_{}_block_0.conv1.weight")]
    blocks = len(list(there("down_0_block_{}.conv1.weight")))
    if not widths or dim < 1 or any(width % dim for width in widths):
        raise ValueError(f"its levels have {widths[:12]} channels, and those of such a body are multiples of {dim}")
    attention = [public_name(f"encoder.down_{level}_attn_0.q.weight", layout, 0) for level in range(len(widths))]
    attended = [level for level, name in enumerate(attention) if name in state]
    z_channels, has_conv = shape("decoder.conv_in.weight")[1], "quant_conv.weight" in state
    code = shape("post_quant_conv.weight")[1] if has_conv else z_channels
    arguments: dict[str, Any] = {
        "image_size": max(256, 2 ** (len(widths) - 1)),  # any will do: no file says it
        "body": TAMING, "centred": True, "dim": dim, "channels": channels, "ch_mult": [width // dim for width in widths],
        "num_resnet_blocks": [blocks], "attention_levels": attended or None, "z_channels": z_channels,
        "quant_conv": has_conv, "norm_groups": _GROUPS,
    }  # fmt: skip
    if _CODEBOOK not in state:
        return {**arguments, "quantizer": KL, "latent_dim": code}
    if state[_CODEBOOK].ndim != 2:
        raise ValueError(f"its {_CODEBOOK} is no table of entries")
    size, dim = state[_CODEBOOK].shape
    of_codes = {"codebook_size": size, "codebook_dim": dim, "vq_cosine": LAYOUTS[layout].is_cosine}
    return {**arguments, "quantizer": "vq", **of_codes}


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Turn every error of reading a public file into a ValueError of one line that names it."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot read {error.filename or path}: {error.strerror or error}") from None
    except (*DAMAGES, RuntimeError) as error:
        said = one_line(error)
        raise ValueError(said if str(path) in said else f"{path}: {said}") from None
