"""Video autoencoders of Wan 2.1 and 2.2, and of Qwen-Image, as `VideoTokenizer` with --body wan, and back: the same
weights by other names. diffusers has them in a folder with a configuration; Wan's own file, .pth, holds names and
tensors alone, from which the arguments are inferred."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from einops import rearrange
from torch import Tensor

from tandem.config.fields import check_whole
from tandem.config.models.autoencoders import WAN
from tandem.config.models.taming import KL
from tandem.io.published import part_with, read_state_dict, refuse_weights_flag, shape_of
from tandem.io.weights import on_cpu, save_pickled
from tandem.models.autoencoders.video_tokenizer import VideoTokenizer
from tandem.models.building import build_on_meta, check_arguments

from .taming import checked_statistics, quantizer_state

CLASSES = ("AutoencoderKLWan", "AutoencoderKLQwenImage")  # of diffusers
# Arguments of diffusers' classes: the name, its default there, and ours; see `read_config` for the others.
_NUMBERS = (
    ("base_dim", 96, "init_dim"), ("z_dim", 16, "latent_dim"), ("num_res_blocks", 2, "num_resnet_blocks"),
)  # fmt: skip
# Options of which `VideoTokenizer` has a single value. Wan's models have no other.
_CONSTANTS: dict[str, Any] = {"attn_scales": [], "dropout": 0.0}
_LATENTS_MEAN, _LATENTS_STD = "latents_mean", "latents_std"
# Of the latents of Wan 2.1, which its file lacks: the defaults of AutoencoderKLWan in diffusers 0.42, the same as in
# Wan's code (wan/modules/vae.py). Of those of Wan 2.2: wan/modules/vae2_2.py.
_MEAN_2_1 = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632, -0.1922,
    -0.9497, 0.2503, -0.2921,
)  # fmt: skip
_STD_2_1 = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253,
    2.8251, 1.9160,
)  # fmt: skip
_MEAN_2_2 = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891, 0.1570,
    -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502, -0.2055, -0.0322,
    0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520,
    0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)  # fmt: skip
_STD_2_2 = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165,
    0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659, 0.7069, 0.5338, 0.4889, 0.4917,
    0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600,
    0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)  # fmt: skip
# init_dim, latent_dim and residual_resampling of a published model -> its name, and the statistics of its latents.
_PUBLISHED = {
    (96, 16, False): ("Wan 2.1", (_MEAN_2_1, _STD_2_1)),
    (160, 48, True): ("Wan 2.2", (_MEAN_2_2, _STD_2_2)),
}
_SIDE = 256  # image_size of a model that is read: no file holds it, and it changes no weight
_TIME_LEVELS = 2  # halvings of the frames that diffusers and Wan's code can stream
# Patterns in the names of diffusers -> what Wan's file has in their place, besides the numbers of layers.
_ORIGINAL_PARTS = {
    r"(?<=\d)\.norm1(?=\.)": ".residual.0", r"(?<=\d)\.conv1(?=\.)": ".residual.2",
    r"(?<=\d)\.norm2(?=\.)": ".residual.3", r"(?<=\d)\.conv2(?=\.)": ".residual.6", r"\.conv_shortcut": ".shortcut",
    r"\.conv_in": ".conv1", r"\.norm_out": ".head.0", r"\.conv_out": ".head.2",
    r"mid_block\.resnets\.0": "middle.0", r"mid_block\.attentions\.0": "middle.1",
    r"mid_block\.resnets\.1": "middle.2", "^quant_conv": "conv1", "^post_quant_conv": "conv2",
}  # fmt: skip
_LEVEL = re.compile(r"(?:down|up)_blocks\.(\d+)(?:\.(resnets|upsamplers|downsampler|upsampler)(?:\.(\d+))?)?")
_FIRST_WEIGHT = "encoder.conv1.weight"
_ENCODER_LAYER = re.compile(
    r"encoder\.downsamples\.(\d{1,4})(\.downsamples\.(\d{1,4}))?\.(residual|resample|time_conv)\."
)


def read_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The arguments of a `VideoTokenizer`, and the means and standard deviations of the channels of its latents, from
    an untrusted configuration of diffusers. Raises ValueError, in one line, if no `VideoTokenizer` equals its model."""
    for name, value in _CONSTANTS.items():
        if config.get(name, value) != value:
            raise ValueError(f"its {name} is {str(config[name])[:80]}; only {value} is supported")
    flags = config.get("temperal_downsample", [False, True, True])  # spelled so
    is_list = isinstance(flags, list) and all(type(flag) is bool for flag in flags)
    if not is_list or flags.count(True) != _TIME_LEVELS:
        raise ValueError(f"its temperal_downsample is {str(flags)[:80]}; only lists with two true are supported")
    patch_size, multiples = config.get("patch_size") or 1, config.get("dim_mult", [1, 2, 4, 4])
    if not isinstance(multiples, list) or len(multiples) != len(flags) + 1:
        raise ValueError(f"its dim_mult is {str(multiples)[:80]}, with temperal_downsample {flags}")
    numbers = {name: config.get(name, default) for name, default, _ in _NUMBERS}
    numbers["decoder_base_dim"] = config.get("decoder_base_dim") or numbers["base_dim"]
    for name, value in (*numbers.items(), ("patch_size", patch_size), *(("dim_mult", value) for value in multiples)):
        check_whole(f"its {name}", value)
    if type(is_residual := config.get("is_residual", False)) is not bool:
        raise ValueError(f"its is_residual is {str(is_residual)[:80]}, neither true nor false")
    arguments = {
        **_fixed_arguments(patch_size), **{ours: numbers[name] for name, _, ours in _NUMBERS},
        "decoder_dim": config.get("decoder_base_dim"), "ch_mult": multiples,
        "time_levels": [level for level, flag in enumerate(flags) if flag], "residual_resampling": is_residual,
    }  # fmt: skip
    patch_channels = {  # of a patch of the frames; input_channels is Qwen-Image's name of in_channels
        name: config[name] for name in ("in_channels", "input_channels", "out_channels") if name in config
    }  # fmt: skip
    for name, value in patch_channels.items():
        check_whole(f"its {name}", value)
    counts = {*patch_channels.values()} or {3 * patch_size**2}
    arguments["channels"], remainder = divmod(max(counts), patch_size**2)
    if len(counts) > 1 or remainder:
        counts_text = ", ".join(f"{name} {value}" for name, value in patch_channels.items())[:80]
        raise ValueError(f"expected one number of channels, a multiple of patch_size {patch_size}^2: {counts_text}")
    mean, std = config.get(_LATENTS_MEAN, [*_MEAN_2_1]), config.get(_LATENTS_STD, [*_STD_2_1])
    return arguments, [*checked_statistics(mean, std)]


def public_config(model: VideoTokenizer) -> dict[str, Any]:
    """The configuration of diffusers for a model. Raises ValueError, in one line, if diffusers has no such model."""
    config = model.config
    time_levels, halvings = config["time_levels"], len(config["ch_mult"]) - 1
    channels = model.channels * config["patch_size"] ** 2
    has_statistics = model.latents_mean is not None
    return {
        "_class_name": CLASSES[0], **{name: config[ours] for name, _, ours in _NUMBERS}, **_CONSTANTS,
        "decoder_base_dim": config["decoder_dim"], "dim_mult": config["ch_mult"],
        "temperal_downsample": [level in time_levels for level in range(halvings)],
        "is_residual": config["residual_resampling"], "in_channels": channels, "out_channels": channels,
        "patch_size": None if config["patch_size"] == 1 else config["patch_size"],
        "scale_factor_temporal": model.frames_per_code, "scale_factor_spatial": model.pixels_per_code,
        _LATENTS_MEAN: model.latents_mean if has_statistics else [0.0] * config["latent_dim"],
        _LATENTS_STD: model.latents_std if has_statistics else [1.0] * config["latent_dim"],
    }  # fmt: skip


def public_state(model: VideoTokenizer) -> dict[str, Tensor]:
    """The state dict by the names of diffusers, on the CPU. Raises ValueError, in one line, if diffusers and Wan's code
    have no such model."""
    config = model.config
    if config["body"] != WAN or config["quantizer"] != KL:
        actual = f"--body {config['body']} and --quantizer {config['quantizer']}"
        raise ValueError(f"an {CLASSES[0]} needs --body wan and --quantizer kl, and this model has {actual}")
    if len(config["time_levels"]) != _TIME_LEVELS:
        raise ValueError(f"an {CLASSES[0]} halves the frames twice; this model has time_levels {config['time_levels']}")
    if config["patch_size"] > 1 and config["patch"] != "pixels":
        raise ValueError(f"an {CLASSES[0]} has --patch pixels, and this model has --patch {config['patch']}")
    weights = {name: weight for name, weight in on_cpu(model.state_dict()).items() if not _is_statistics(name)}
    patches = _reorder_patches(weights, config["patch_size"], "(q r c)", "(c r q)")
    return {_diffusers_name(name): weight.contiguous() for name, weight in patches.items()}


def our_contents(
    state: Mapping[str, Tensor], arguments: dict[str, Any], statistics: Sequence[Sequence[float]] | None, package: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments and weights of the `VideoTokenizer` with these weights by the names of ``package``: "diffusers", or
    "Wan", its own. Raises ValueError, in one line, if names are missing or superfluous."""
    names = {public: name for name, public in _names(arguments, package).items()}
    if unknown := next((name for name in state if name not in names), None):
        raise ValueError(f"it holds {unknown[:80]}, which is no weight of such a model of {package}")
    if missing := next((name for name in names if name not in state), None):
        raise ValueError(f"it lacks {missing}, a weight of such a model of {package}")
    weights = {name: state[public] for public, name in names.items()}
    weights = _reorder_patches(weights, arguments["patch_size"], "(c r q)", "(q r c)")
    return arguments, weights | quantizer_state(arguments, weights, statistics)


def read_file(path: Path, weights: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments and weights of the `VideoTokenizer` in Wan's own file. Raises what `read_autoencoder` raises."""
    refuse_weights_flag(path, weights)
    _, state = part_with(read_state_dict(path, None, "model_state"), _FIRST_WEIGHT)
    arguments = _infer_arguments(state)
    _, statistics = _published(arguments)
    return our_contents(state, arguments, statistics, "Wan")


def save_file(model: VideoTokenizer, path: Path) -> str:
    """Write Wan's own file, which holds no arguments; it appears whole or not at all. Returns a note about them. Raises
    ValueError, in one line, if Wan's code has no such model."""
    state, config = public_state(model), model.config
    if model.channels != 3:
        raise ValueError(f"Wan's code has frames of 3 channels, and this model has {model.channels}: --to diffusers")
    originals = _names(config, "Wan")
    save_pickled({originals[_our_name(name)]: weight for name, weight in state.items()}, path)
    name, statistics = _published(config)
    warning = f", and whoever reads it takes those of {name}" if statistics else ""
    return (
        f"load it into Wan's model of dim {config['init_dim']}, z_dim {config['latent_dim']}, dim_mult "
        f"{config['ch_mult']}; the file holds no mean and deviation of latents{warning}: --to diffusers writes them"
    )


def assumptions(config: Mapping[str, Any]) -> str:
    """A text about the values that Wan's file lacks."""
    name, statistics = _published(config)
    if statistics:
        return f"latents_mean and latents_std are those of {name}, because the model has its sizes"
    return "latents_mean and latents_std are unknown; a folder of diffusers holds them"


def _published(config: Mapping[str, Any]) -> tuple[str, tuple[Sequence[float], Sequence[float]] | None]:
    """Name, and means and standard deviations of the latents, of the published model of these sizes; ("", None) if
    there is none."""
    return _PUBLISHED.get((config["init_dim"], config["latent_dim"], config["residual_resampling"]), ("", None))


def _fixed_arguments(patch_size: Any) -> dict[str, Any]:
    """The arguments that all of these models share."""
    return {"body": WAN, "quantizer": KL, "image_size": _SIDE, "patch_size": patch_size, "patch": "pixels"}


def _is_statistics(name: str) -> bool:
    return name.startswith("quantizer.")


def _diffusers_name(name: str) -> str:
    return re.sub(r"^(encoder|decoder)\.(?=(post_)?quant_conv\.)", "", name)


def _our_name(public: str) -> str:
    prefix = {"quant_conv": "encoder.", "post_quant_conv": "decoder."}
    return prefix.get(public.partition(".")[0], "") + public


def _names(arguments: Mapping[str, Any], package: str) -> dict[str, str]:
    """Our name -> the package's, of every weight of a model. Raises ValueError, in one line, if there is no such
    model."""
    arguments = dict(arguments)
    check_arguments(arguments)
    names = build_on_meta(lambda: VideoTokenizer.from_dict(arguments)).state_dict()
    rename = _diffusers_name if package == "diffusers" else _original_name(arguments)
    return {name: rename(name) for name in names if not _is_statistics(name)}


def _original_name(arguments: Mapping[str, Any]) -> Callable[[str], str]:
    """The function from our names to those in Wan's file."""
    count, is_nested = arguments["num_resnet_blocks"], arguments["residual_resampling"]

    def level_name(match: re.Match[str]) -> str:
        """Wan 2.1 counts the layers of all levels in a row; 2.2 counts those of each level."""
        side = "downsamples" if match[0].startswith("down") else "upsamples"
        level, part, number = int(match[1]), match[2], int(match[3] or 0)
        if part is None:
            return f"{side}.{level}"
        blocks = count if side == "downsamples" else count + 1
        layer = number if part == "resnets" else blocks
        return f"{side}.{level}.{side}.{layer}" if is_nested else f"{side}.{level * (blocks + 1) + layer}"

    def rename(name: str) -> str:
        original = _LEVEL.sub(level_name, _diffusers_name(name))
        for pattern, part in _ORIGINAL_PARTS.items():
            original = re.sub(pattern, part, original)
        return original

    return rename


def _reorder_patches(weights: Mapping[str, Tensor], patch_size: int, old: str, new: str) -> dict[str, Tensor]:
    """The weights, with the channels of a patch, of column r, line q and colour c, in another order."""
    weights = dict(weights)
    sides = {"r": patch_size, "q": patch_size}
    first = "encoder.conv_in.weight"
    weights[first] = rearrange(weights[first], f"o {old} f h w -> o {new} f h w", **sides)
    for name in ("decoder.conv_out.weight", "decoder.conv_out.bias"):
        weights[name] = rearrange(weights[name], f"{old} ... -> {new} ...", **sides)
    return weights


def _infer_arguments(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Constructor arguments from names and shapes in Wan's file."""
    dim, channels = shape_of(state, _FIRST_WEIGHT, 5)[:2]
    patch_size = math.isqrt(channels // 3)
    layers: dict[tuple[int, int], set[str]] = {}  # the numbers of an encoder's layer -> its parts
    for name in state:
        if match := _ENCODER_LAYER.match(name):
            layers.setdefault((int(match[1]), int(match[3] or 0)), set()).add(match[4])
    is_nested = any(match[2] for match in map(_ENCODER_LAYER.match, state) if match)
    width, blocks = dim, 0
    widths: list[int] = []
    block_counts: list[int] = []
    time_levels: list[int] = []
    for (level, layer), parts in sorted(layers.items()):
        if "residual" in parts:
            path = f"{level}.downsamples.{layer}" if is_nested else f"{level}"
            width, blocks = shape_of(state, f"encoder.downsamples.{path}.residual.6.weight", 5)[0], blocks + 1
        else:  # the end of a level
            time_levels += [len(widths)] if "time_conv" in parts else []
            widths, block_counts, blocks = [*widths, width], [*block_counts, blocks], 0
    widths.append(width)
    if not block_counts or dim < 1 or any(width % dim for width in widths):
        raise ValueError(f"its levels have {widths[:12]} channels, and those of such a body are multiples of {dim}")
    decoder_dim = shape_of(state, "decoder.head.0.gamma", 4)[0] * dim // max(widths[0], 1)
    return {
        **_fixed_arguments(patch_size), "init_dim": dim, "decoder_dim": None if decoder_dim == dim else decoder_dim,
        "ch_mult": [width // dim for width in widths], "num_resnet_blocks": block_counts[0],
        "time_levels": time_levels, "latent_dim": shape_of(state, "conv2.weight", 5)[0],
        "residual_resampling": is_nested,
    }  # fmt: skip
