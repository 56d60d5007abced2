"""Autoencoders of taming-transformers, latent diffusion, LlamaGen and IBQ as `VQGAN` with taming's body, and back: the
same weights by other names.

The files hold no arguments. These are inferred from names and shapes, except for the groups of GroupNorms, 32 in all of
these packages. IBQ's files have taming's names; they are recognised by their moving average of the codebook, which the
files of published vector quantizers lack.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.config.models.taming import KL, TAMING, check_number
from tandem.io.published import part_with, read_state_dict, shape_of
from tandem.io.weights import on_cpu, save_pickled
from tandem.models.autoencoders.vqgan import VQGAN
from tandem.models.building import build_on_meta, check_arguments
from tandem.sides import height_and_width

from . import flux2

GROUPS = 32
CHANNEL_STATISTICS = "channel_statistics"
_CODEBOOK = "quantize.embedding.weight"
# If all entries of a codebook are longer than this, LlamaGen's codebook_l2_norm was set: entries then start with length
# 1, and no gradient makes them shorter. Else their channels start below 1 / codebook_size, and entries that are never
# chosen stay there.
_MIN_ENTRY_NORM = 0.5
_LLAMAGEN_BODY = "ch 128, num_res_blocks 2"  # constants in LlamaGen's code, not arguments
_LAYER = re.compile(r"(down|up|mid)(?:_(\d+))?_(block|attn|downsample|upsample)(?:_(\d+))?")
_DIFFUSION_PREFIX, _EMA_PREFIX = "first_stage_model.", "model_ema."
_FIRST_WEIGHT = "encoder.conv_in.weight"
# Weights that the autoencoder does not need, in its own file (VA-VAE's hold networks that align its latents) or in that
# of a whole latent diffusion.
_OTHER_PREFIXES = (
    "loss.", "colorize", "linear_proj.", "foundation_model.", "model.diffusion_model.", "model_ema.diffusion_model",
    "cond_stage_model.", "conditioner.", "text_encoders.",
)  # fmt: skip


class Layout(NamedTuple):
    """A package with taming's body, and its names of the layers."""

    package: str
    read: Callable[[Path, str], tuple[dict[str, Tensor], dict[str, Any]]]
    """(path, "best", "ema" or "online") -> the state dict of an autoencoder, and the arguments that cannot be inferred
    from it; `CHANNEL_STATISTICS` among them, if the means and the standard deviations of the channels of its latents
    are known."""
    quantizers: tuple[str, ...]
    """Names of the quantizers that it has."""
    level: str
    """Template of the name of a layer of a level; `index` counts levels in the order in which pictures pass them."""
    middle: str
    """Template of the name of a layer between the levels; `order` counts all of them, `before` those of its kind."""
    layer_names: Mapping[str, str] = MappingProxyType({})
    """taming's name of a layer or of a part of a layer -> the package's, where they differ."""
    vq_cosine: tuple[bool, ...] = (False,)
    """The values of vq_cosine (codes are chosen by their angle) that its models may have."""
    has_matrices: bool = False
    """Whether the projections of an attention are matrices instead of convolutions."""
    key: str = "state_dict"
    """Key of the weights in a file."""
    unused: Mapping[str, int] = MappingProxyType({})
    """Name -> length of the tensors in a file that have no effect."""


def public_name(name: str, layout: Layout, levels: int) -> str:
    """The name in a public package of a weight of a `VQGAN` with this number of levels."""
    if name.startswith("quantizer."):
        return _CODEBOOK
    part, layer, suffix = name.split(".", 2)
    if layer.endswith("quant_conv"):
        return f"{layer}.{suffix}"
    names, match = layout.layer_names, _LAYER.fullmatch(layer)
    if match is None:
        return f"{part}.{names.get(layer, layer)}.{suffix}"
    side, level, kind, number = match[1], int(match[2] or 0), match[3], match[4]
    before = int(number or 1) - 1
    public_layer = (layout.middle if side == "mid" else layout.level).format(
        side=side, level=level, index=level if side == "down" else levels - 1 - level, kind=names.get(kind, kind),
        number=number, before=before, order=2 * before + (kind == "attn"),
    )  # fmt: skip
    public_layer += f".{number}" if number and side != "mid" else ""
    first, _, last = suffix.partition(".")
    return f"{part}.{public_layer}.{names.get(first, first)}.{last}"


def save_autoencoder(layout: Layout, model: VQGAN, path: Path) -> str:
    """Write a state dict that the public package loads strictly; the file appears whole or not at all.

    Returns:
        The arguments of the public model that loads the file, which does not hold them.

    Raises:
        ValueError: one line, if the public package has no such model.
    """
    state, config = public_state(model, layout), model.config
    if config["norm_groups"] != GROUPS:
        raise ValueError(f"{layout.package} has {GROUPS} groups in a GroupNorm; this model has {config['norm_groups']}")
    levels, last = list(config["attention_levels"] or ()), len(config["ch_mult"]) - 1
    side = max(height_and_width(config["image_size"]))
    is_of_mar = bool(levels) and not config["decoder_attention"]
    if layout is LLAMAGEN and (levels != [last] or is_of_mar):
        raise ValueError(f"{layout.package} has attention only at the last level: train with --attention_levels {last}")
    if config["quantizer"] == "ibq":  # so that the file is recognised
        state |= {_EMA_PREFIX + name.replace(".", ""): tensor.clone() for name, tensor in state.items()}
    save_pickled({"model" if is_of_mar else layout.key: state}, path)
    (code_dim, z_channels), sides = code_channels(config), [side >> level for level in levels]
    body = f"ch {config['dim']}, num_res_blocks {config['num_resnet_blocks'][0]}"
    if layout is LLAMAGEN:
        text = f"encoder_ch_mult and decoder_ch_mult {config['ch_mult']}, z_channels {z_channels}, codebook_size "
        text += f"{model.num_codes}, codebook_embed_dim {code_dim}, codebook_l2_norm {config['vq_cosine']}"
        text += "" if body == _LLAMAGEN_BODY else f"; change its code to {body}"
        return f"load it into {layout.package}'s model of {text}"
    text = f"{body}, ch_mult {config['ch_mult']}, attn_resolutions {sides} of {side}"
    text += " in the encoder alone, as in MAR" if is_of_mar else ""
    text += f", z_channels {z_channels}, embed_dim {code_dim}, "
    text += f"n_embed {model.num_codes}" if model.num_codes else "double_z True"
    return f"load it into a model of {text}"


def llamagen_assumptions(config: Mapping[str, Any]) -> str:
    """A text about the argument that a file of LlamaGen lacks: its value in the loaded model, and the reason."""
    reason = "no entry is" if config["vq_cosine"] else "entries are"
    return f"codebook_l2_norm {config['vq_cosine']}, because {reason} shorter than {_MIN_ENTRY_NORM:g}"


def code_channels(config: Mapping[str, Any]) -> tuple[int, int]:
    """From a `VQGAN.config`, the channels of a code or a latent, and those between the encoder and quant_conv."""
    code_dim = config["latent_dim" if config["quantizer"] == KL else "codebook_dim"]
    return code_dim, config["z_channels"] or code_dim


def public_state(model: VQGAN, layout: Layout) -> dict[str, Tensor]:
    """The state dict of a public package, on the CPU. Raises ValueError, in one line, if it has no such model."""
    config, package = model.config, layout.package
    if config["body"] != TAMING:
        raise ValueError(
            f"a model for {package} has to be trained with --body taming, and this one has --body {config['body']}"
        )
    if config["quantizer"] not in layout.quantizers:
        raise ValueError(f"{package} has only {' and '.join(layout.quantizers)}; this model has {config['quantizer']}")
    if config["quantizer"] == "vq" and config["vq_cosine"] not in layout.vq_cosine:
        raise ValueError(f"{package} has no --vq_cosine, and this model was trained with it")
    if model.num_codes and not config["quant_conv"]:
        raise ValueError(f"{package} has a quant_conv beside its codebook, and this model has none")
    state = {name: torch.zeros(length) for name, length in layout.unused.items()}
    for name, tensor in on_cpu(model.state_dict()).items():
        if not _is_quantizer_state(name):
            is_matrix = layout.has_matrices and "_attn_" in name and tensor.ndim == 4
            public = public_name(name, layout, len(config["ch_mult"]))
            state[public] = tensor[:, :, 0, 0].contiguous() if is_matrix else tensor
    return state


def read_autoencoder(layout: Layout, path: Path, weights: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments and weights of the `VQGAN` in a public file or folder.

    Args:
        weights: Of a checkpoint with both: the moving average ("ema" or "best"), or the weights as trained ("online").

    Raises:
        OSError, ValueError, RuntimeError: the file is missing, damaged, hostile, or of a model that no `VQGAN` equals.
    """
    state, extra_arguments = layout.read(path, weights)
    statistics = extra_arguments.pop(CHANNEL_STATISTICS, None)
    if any(name.startswith("encoder.down_blocks.") for name in state) and layout is TAMING_LAYOUT:
        raise ValueError("it is of diffusers: give its folder, in which config.json is")
    if any(name.startswith("decoder.adaptive.") for name in state):
        raise ValueError("it is of Open-MAGVIT2, whose body is not taming's: it has adaptive GroupNorms, no attention")
    if "quantize.embed.weight" in state:
        raise ValueError("it is of taming's GumbelVQ, and no VQGAN has a Gumbel quantizer")
    arguments = {**_infer_arguments(state, layout), **extra_arguments}
    check_arguments(arguments, state)
    expected, levels = build_on_meta(lambda: VQGAN.from_dict(arguments)).state_dict(), len(arguments["ch_mult"])
    names = {public_name(name, layout, levels): name for name in expected if not _is_quantizer_state(name)}
    if unknown := next((name for name in state if name not in names and name not in layout.unused), None):
        raise ValueError(f"it holds {unknown[:80]}, which is no weight of such an autoencoder of {layout.package}")
    if missing := next((name for name in names if name not in state), None):
        raise ValueError(f"it lacks {missing}, a weight of such an autoencoder of {layout.package}")
    our_state = {
        name: state[public][..., None, None] if state[public].ndim == 2 < expected[name].ndim else state[public]
        for public, name in names.items()
    }
    return arguments, our_state | quantizer_state(arguments, our_state, statistics)


def _is_quantizer_state(name: str) -> bool:
    """Whether our quantizer has this tensor, and public files lack it."""
    return name.startswith("quantizer.") and not name.startswith("quantizer.codebook")


def checked_statistics(mean: Any, std: Any) -> tuple[list[float], list[float]]:
    """The latents_mean and latents_std of an untrusted configuration. Raises ValueError, in one line, unless they are
    two lists of numbers, of one length, and the deviations above 0."""
    if not (isinstance(mean, list) and isinstance(std, list) and len(mean) == len(std)):
        raise ValueError("its latents_mean and latents_std are not two lists of one length")
    for name, values in (("latents_mean", mean), ("latents_std", std)):
        for value in values:
            check_number(name, value)
            if value <= 0 and name == "latents_std":
                raise ValueError(f"its latents_std is {value}, not above 0")
    return mean, std


def quantizer_state(
    arguments: Mapping[str, Any], weights: Mapping[str, Tensor], statistics: Sequence[Sequence[float]] | None
) -> dict[str, Tensor]:
    """The state of our quantizer. Of continuous latents: statistics, as if latents of these means and deviations had
    been measured. Of vectors: the file's codebook, and statistics that it lacks, with which training goes on as if one
    vector had been assigned to each entry."""
    if arguments["quantizer"] == KL:
        dim = arguments["latent_dim"] * arguments.get("latent_patch", 1) ** 2
        stats = torch.zeros(3, dim)
        if statistics:
            mean, std = torch.tensor(statistics, dtype=torch.float64)
            if len(mean) != dim:
                raise ValueError(f"its latents_mean has {len(mean)} numbers, and its latents have {dim} channels")
            # The weight 1 says that they were given, see `Autoencoder.has_given_channels`.
            stats = torch.stack([torch.ones_like(mean), mean, std.square() + mean.square()])
        return {"quantizer.latent_stats": stats.mean(1).float(), "quantizer.channel_stats": stats.float()}
    if arguments["quantizer"] != "vq":
        return {}
    entries = weights["quantizer.codebook"].float()
    entries = F.normalize(entries, dim=-1) if arguments["vq_cosine"] else entries
    return {
        "quantizer.codebook": entries, "quantizer.code_sums": entries,
        "quantizer.code_counts": torch.ones(len(entries)), "quantizer.initialized": torch.tensor(True),
    }  # fmt: skip


class _AutoencoderNames:
    """A container of the names of weights that an autoencoder may have."""

    def __contains__(self, name: object) -> bool:
        return not str(name).startswith(_OTHER_PREFIXES)


def _read_taming(path: Path, weights: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """See `Layout.read`. The autoencoder may also be the first stage of a whole latent diffusion, whose file holds the
    scale of latents."""
    content = read_state_dict(path, _AutoencoderNames())
    prefix, tensors = part_with(content, _FIRST_WEIGHT, (_DIFFUSION_PREFIX,))
    tensors = {flux2.outer_name(name): tensor for name, tensor in tensors.items()}
    state = {name: tensor for name, tensor in tensors.items() if not name.startswith((_EMA_PREFIX, *_OTHER_PREFIXES))}
    average_names = {name: _EMA_PREFIX + name.replace(".", "") for name in state}
    averages = {name: tensors[average_names[name]] for name in state if average_names[name] in tensors}
    if weights == "ema" and not averages:
        raise ValueError("the file holds no moving average: leave out --weights ema")
    arguments: dict[str, Any] = {"quantizer": "ibq"} if _CODEBOOK in averages else {}
    if prefix == _DIFFUSION_PREFIX and "scale_factor" in content:
        arguments["scaling_factor"] = content["scale_factor"].tolist()
    if flux2.MEAN in state:
        arguments |= {"latent_patch": flux2.PATCH, CHANNEL_STATISTICS: flux2.pop_statistics(state)}
    return state if weights == "online" else {**state, **averages}, arguments


def _read_llamagen(path: Path, weights: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """See `Layout.read`."""
    part = {"ema": "ema", "online": "model"}.get(weights, "ema model")  # best: ema if it exists, else model
    return part_with(read_state_dict(path, None, part), _FIRST_WEIGHT)[1], {}


def _infer_arguments(state: Mapping[str, Tensor], layout: Layout) -> dict[str, Any]:
    """Constructor arguments from names and shapes. MAR's decoder has attention in the middle alone."""

    def public_layer(layer: str, part: str = "encoder", levels: int = 0) -> str:
        return public_name(f"{part}.{layer}", layout, levels)  # the encoder's do not depend on the number of levels

    def numbered_layers(layer: str) -> list[str]:
        """Public names of the layers with the numbers 0, 1, ..., up to the first one that the file lacks."""
        names = (public_layer(layer.format(number)) for number in itertools.count())
        return list(itertools.takewhile(lambda name: name in state, names))

    dim, channels = shape_of(state, "encoder.conv_in.weight", 4)[:2]
    widths = [shape_of(state, name, 4)[0] for name in numbered_layers("down_{}_block_0.conv1.weight")]
    if not widths or dim < 1 or any(width % dim for width in widths):
        raise ValueError(f"its levels have {widths[:12]} channels, and those of such a body are multiples of {dim}")
    levels = [level for level in range(len(widths)) if public_layer(f"down_{level}_attn_0.q.weight") in state]
    attended = [public_layer(f"up_{level}_attn_0.q.weight", "decoder", len(widths)) in state for level in levels]
    z_channels, has_conv = shape_of(state, "decoder.conv_in.weight", 4)[1], "quant_conv.weight" in state
    arguments: dict[str, Any] = {
        "image_size": max(256, 2 ** (len(widths) - 1)),  # arbitrary: no file holds it, and it changes no weight
        "body": TAMING, "normalize_input": True, "dim": dim, "channels": channels,
        "ch_mult": [width // dim for width in widths], "attention_levels": levels or None, "z_channels": z_channels,
        "decoder_attention": any(attended) or not levels,
        "num_resnet_blocks": [len(numbered_layers("down_0_block_{}.conv1.weight"))], "quant_conv": has_conv,
        "norm_groups": GROUPS,
    }  # fmt: skip
    if _CODEBOOK not in state:
        code_dim = shape_of(state, "post_quant_conv.weight", 4)[1] if has_conv else z_channels
        return {**arguments, "quantizer": KL, "latent_dim": code_dim}
    size, code_dim = shape_of(state, _CODEBOOK, 2)
    is_cosine = True in layout.vq_cosine and bool((state[_CODEBOOK].float().norm(dim=1) > _MIN_ENTRY_NORM).all())
    codebook = {"codebook_size": size, "codebook_dim": code_dim, "vq_cosine": is_cosine}
    return {**arguments, "quantizer": "vq", **codebook}


TAMING_LAYOUT = Layout(
    "taming-transformers and latent diffusion", _read_taming, ("vq", "ibq", KL), "{side}.{level}.{kind}",
    "mid.{kind}_{number}",
)  # fmt: skip
LLAMAGEN = Layout(
    "LlamaGen", _read_llamagen, ("vq",), "conv_blocks.{index}.{kind}", "mid.{order}", {"block": "res"},
    vq_cosine=(True, False), key="model", unused={"quantize.codebook_used": 65536},
)  # fmt: skip
