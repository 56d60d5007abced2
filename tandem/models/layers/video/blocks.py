"""The layers of a video tokenizer: their text in the configuration, the sizes of videos that fit, and their modules."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from tandem.config.models.autoencoders import WAN, VideoTokenizerConfig, check_choices
from tandem.models.layers.convolutional import check_multiple
from tandem.sides import height_and_width

from .attention import AdaptiveNorm, AttentionBlock, GateLoop, MemoryAttention, TaylorAttention
from .causal import CausalConv3d, ResidualUnit, SpaceUp, TimeUp

LAYERS: dict[str, str | None] = {
    "residual": None,
    "residual_space": None,
    "consecutive_residual": "how many",
    "compress_space": "channels",
    "compress_time": "channels",
    "attend_space": None,
    "attend_time": None,
    "linear_attend_space": None,
    "gateloop_time": None,
    "adaptive": None,
}
"""Names of layers, and the meaning of the number after their colon; None if they take none.

``residual`` is a residual unit with a causal convolution, ``residual_space`` one whose convolution sees a frame alone,
``consecutive_residual:n`` stands for n layers ``residual``. ``compress_space[:channels]`` halves height and width,
``compress_time[:channels]`` turns 1 + 2 n frames into 1 + n. ``attend_space``, ``attend_time`` and
``linear_attend_space`` are attention with a feed-forward, ``gateloop_time`` is a gated recurrence. ``adaptive``, which
the decoder alone has, is a norm that is modulated by the quantized latents.
"""

_HEADS, _DIM_HEAD = 8, 32
_LINEAR_HEADS, _LINEAR_DIM_HEAD = 16, 8  # of linear_attend_space
_MAX_LAYERS, _MAX_HALVINGS = 1000, 40
_MAX_LEVELS = 12  # of body wan


class Layer(NamedTuple):
    name: str
    number: int | None = None


def parse_layers(text: str) -> list[Layer]:
    """``residual,compress_space:64,consecutive_residual:2`` -> the layers, from the pixels to the codes.

    Raises:
        ValueError: one line, if a name is unknown or a number missing, superfluous or not positive.
    """
    layers = []
    for part in text.split(","):
        name, colon, number = (piece.strip() for piece in part.strip().partition(":"))
        if name not in LAYERS:
            raise ValueError(f"layers: {name!r} is unknown; use some of {', '.join(LAYERS)}")
        meaning = LAYERS[name]
        if colon and meaning is None:
            raise ValueError(f"layers: {part.strip()!r}: {name} takes no number")
        if (colon or name == "consecutive_residual") and not (number.isascii() and number.isdigit() and int(number)):
            raise ValueError(f"layers: {part.strip()!r}: give {name}:N with a whole number N of at least 1 ({meaning})")
        layers.append(Layer(name, int(number) if colon else None))
    if len(layers) > _MAX_LAYERS or sum(layer.name.startswith("compress") for layer in layers) > _MAX_HALVINGS:
        raise ValueError(
            f"layers: there are {len(layers)}; give at most {_MAX_LAYERS}, of which {_MAX_HALVINGS} may compress"
        )
    return layers


def frames_per_code(config: VideoTokenizerConfig) -> int:
    """S_t: 1 + S_t x n frames become 1 + n frames of codes."""
    return 1 << (len(config.time_levels) if config.body == WAN else _count(config, "compress_time"))


def pixels_per_code(config: VideoTokenizerConfig) -> int:
    """S_s: height and width in pixels that a code stands for."""
    halvings = len(config.ch_mult) - 1 if config.body == WAN else _count(config, "compress_space")
    return config.patch_size << halvings


def _count(config: VideoTokenizerConfig, name: str) -> int:
    return sum(layer.name == name for layer in parse_layers(config.layers))


def check_frames(frames: int, per_code: int, name: str = "num_frames") -> None:
    """Raise a ValueError of one line, which calls them `name`, unless ``frames`` is 1 + ``per_code`` x n."""
    if frames < 1 or (frames - 1) % per_code:
        smaller = max(frames - 1, 0) // per_code * per_code + 1
        hint = f"use {smaller} or {smaller + per_code}"
        raise ValueError(f"{name}: {frames} frames must be 1 + {per_code} n, as {per_code} frames share a code; {hint}")


def check_side(name: str, pixels: int, per_code: int) -> None:
    """Raise a ValueError of one line unless ``pixels``, a height or width, is a multiple of ``per_code``."""
    check_multiple(name, pixels, per_code, f"{per_code}, the side of a code in pixels")


def check_options(config: VideoTokenizerConfig) -> None:
    """Raise a ValueError of one line if an argument of `VideoTokenizer` is out of range by itself."""
    check_choices(config)
    if config.body == WAN:
        _check_wan(config)
    for name in ("input_kernel", "output_kernel", "residual_kernel"):
        if (kernel := getattr(config, name)) < 1 or kernel % 2 == 0:
            raise ValueError(f"{name} {kernel} must be odd, so that a convolution keeps the size of a frame")
    size = config.patch_size
    if size < 1 or size & (size - 1):
        raise ValueError(f"patch_size {size} must be a power of two: 1, 2, 4, ...")
    side = min(height_and_width(config.image_size)) // size
    for name in ("input_kernel", "output_kernel"):
        if config.pad_mode == "reflect" and (kernel := getattr(config, name)) // 2 >= side:
            setting = f"pad_mode reflect at {side} x {side}"
            raise ValueError(f"{name} {kernel} is too large for {setting}; lower it, or use pad_mode constant")
    for name, value, minimum in (
        ("init_dim", config.init_dim, 1), ("max_dim", config.max_dim, 1), ("time_window", config.time_window, 0),
    ):  # fmt: skip
        if value is not None and value < minimum:
            raise ValueError(f"{name} {value}: give a number of at least {minimum}")


def _check_wan(config: VideoTokenizerConfig) -> None:
    """Raise ValueError, in one line, if the numbers fit no such body."""
    levels, time_levels = len(config.ch_mult), set(config.time_levels)
    if not 2 <= levels <= _MAX_LEVELS or min(config.ch_mult) < 1:
        raise ValueError(f"ch_mult {list(config.ch_mult)}: give 2 to {_MAX_LEVELS} numbers of at least 1")
    if not time_levels <= set(range(levels - 1)) or len(time_levels) < len(config.time_levels):
        raise ValueError(f"time_levels {list(config.time_levels)}: give some of 0 to {levels - 2}, each once")
    if config.num_resnet_blocks < 1:
        raise ValueError(f"num_resnet_blocks {config.num_resnet_blocks}: give at least 1")
    for name, dim in (("init_dim", config.init_dim), ("decoder_dim", config.decoder_dim)):
        if dim is not None and dim % 2:
            raise ValueError(f"{name} {dim}: body wan halves the channels, so give an even number")


def check_videos(videos: Tensor, channels: int, multiple: int) -> None:
    """Raise a ValueError of one line unless videos (b, c, f, h, w) or images (b, c, h, w) are floating-point numbers,
    have c = ``channels``, and their height and width are multiples of ``multiple``."""
    if videos.shape[1] != channels or not videos.is_floating_point():
        actual = f"{videos.dtype} videos of shape {tuple(videos.shape)}"
        raise ValueError(f"{actual}: give floating-point numbers (b, {channels}, frames, height, width)")
    for name, side in zip(("height", "width"), videos.shape[-2:], strict=True):
        check_side(name, side, multiple)


def make_layers(config: VideoTokenizerConfig, dim_latent: int) -> tuple[list[nn.Module], list[nn.Module], int]:
    """Modules of the encoder and of the decoder, each in the order of calls, and the channels between the two. A layer
    that compresses doubles the channels unless its text has a number."""
    encoder: list[nn.Module] = []
    decoder: list[nn.Module] = []
    layers, dim = parse_layers(config.layers), config.init_dim
    names = [layer.name for layer in layers]
    for index, (name, number) in enumerate(layers):
        if name.startswith("compress_"):
            dim_out = min(number or 2 * dim, config.max_dim or number or 2 * dim)
            kernel, stride = ((1, 3, 3), (1, 2, 2)) if name == "compress_space" else ((3, 1, 1), (2, 1, 1))
            encoder.append(CausalConv3d(dim, dim_out, kernel, stride=stride))
            decoder.append(SpaceUp(dim_out, dim) if name == "compress_space" else TimeUp(dim_out, dim))
            dim = dim_out
        elif name == "adaptive":  # in the decoder alone
            frames, pixels = (2 ** names[index:].count(f"compress_{axis}") for axis in ("time", "space"))
            decoder.append(AdaptiveNorm(dim, dim_latent, frames, pixels))
        else:
            encoder += [_make_layer(name, dim, config) for _ in range(number or 1)]
            decoder += [_make_layer(name, dim, config) for _ in range(number or 1)]
    return encoder, decoder[::-1], dim


def _make_layer(name: str, dim: int, config: VideoTokenizerConfig) -> nn.Module:
    """A layer that keeps the size of its input."""
    if "residual" in name:
        side = config.residual_kernel
        return ResidualUnit(dim, (1 if name == "residual_space" else side, side, side), config.norm)
    if name == "attend_space":
        return AttentionBlock(dim, MemoryAttention(dim, _HEADS, _DIM_HEAD), "space")
    if name == "attend_time":
        window = config.time_window or None
        return AttentionBlock(dim, MemoryAttention(dim, _HEADS, _DIM_HEAD, is_causal=True, window=window), "time")
    if name == "linear_attend_space":
        return AttentionBlock(dim, TaylorAttention(dim, _LINEAR_HEADS, _LINEAR_DIM_HEAD), "space")
    return GateLoop(dim)
