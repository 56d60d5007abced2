"""The layers of a video tokenizer as text: their names, the sizes of videos that fit, and their modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from .attention import AdaptiveNorm, Attend, Attention, GateLoop, TaylorAttention
from .causal import PAD_MODES, CausalConv3d, SpaceUp, TimeUp
from .patches import PATCHES
from .residual import ModulatedConv3d, ResidualUnit, SqueezeExcite

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
    "cond_residual": None,
    "cond_attend_space": None,
    "cond_linear_attend_space": None,
    "cond_attend_time": None,
    "adaptive": None,
}
"""Names of layers, and what the number after their colon says; None if they take none.

``residual`` is a residual unit with a causal convolution, ``residual_space`` one whose convolution sees a frame alone,
``consecutive_residual:n`` n of the first. ``compress_space[:channels]`` halves height and width, ``compress_time``
turns 1 + 2 n frames into 1 + n. ``attend_space``, ``attend_time`` and ``linear_attend_space`` are attention with a
feed-forward, ``gateloop_time`` is a gated recurrence. ``cond_...`` are modulated by the condition. ``adaptive``, which
the decoder alone has, is a norm that is modulated by the quantized latents.
"""

NORMS = ("none", "rms")

_MOST_LAYERS, _MOST_HALVINGS = 1000, 40


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
            raise ValueError(f"layer {name!r} is unknown; use some of {', '.join(LAYERS)}")
        meaning = LAYERS[name]
        if colon and meaning is None:
            raise ValueError(f"layer {part.strip()!r}: {name} takes no number")
        if (colon or name == "consecutive_residual") and not (number.isascii() and number.isdigit() and int(number)):
            raise ValueError(f"layer {part.strip()!r}: give {name}:N with a whole number N of at least 1 ({meaning})")
        layers.append(Layer(name, int(number) if colon else None))
    if len(layers) > _MOST_LAYERS or sum(layer.name.startswith("compress") for layer in layers) > _MOST_HALVINGS:
        raise ValueError(f"{len(layers)} layers: give at most {_MOST_LAYERS}, and {_MOST_HALVINGS} that compress")
    return layers


def frames_per_code(layers: str) -> int:
    """S_t: 1 + S_t x n frames become 1 + n frames of codes."""
    return int(2 ** sum(layer.name == "compress_time" for layer in parse_layers(layers)))


def pixels_per_code(layers: str, patch_size: int = 1) -> int:
    """S_s: height and width in pixels that a code stands for."""
    return int(patch_size * 2 ** sum(layer.name == "compress_space" for layer in parse_layers(layers)))


def check_frames(frames: int, per_code: int) -> None:
    """Raise a ValueError of one line unless ``frames`` is 1 + ``per_code`` x n."""
    if frames < 1 or (frames - 1) % per_code:
        below = max(frames - 1, 0) // per_code * per_code + 1
        use = f"use {below} or {below + per_code}"
        raise ValueError(f"{frames} frames must be 1 + {per_code} n, as {per_code} frames share a code; {use}")


def check_side(name: str, pixels: int, per_code: int) -> None:
    """Raise a ValueError of one line unless ``pixels``, a height or width, is a multiple of ``per_code``."""
    if pixels < per_code or pixels % per_code:
        below = max(pixels // per_code, 1) * per_code
        use = f"use {below} or {below + per_code}"
        raise ValueError(f"{name} {pixels} must be a multiple of {per_code}, the side of a code in pixels; {use}")


def check_options(arguments: Mapping[str, Any]) -> None:
    """Raise a ValueError of one line if an argument of `VideoTokenizer` is out of range by itself."""
    for name, choices in (("pad_mode", PAD_MODES), ("norm", NORMS), ("patch", PATCHES)):
        if arguments[name] not in choices:
            raise ValueError(f"{name} {arguments[name]!r} is unknown; use {', '.join(choices)}")
    for name in ("input_kernel", "output_kernel", "residual_kernel"):
        if arguments[name] < 1 or arguments[name] % 2 == 0:
            raise ValueError(f"{name} {arguments[name]} must be odd, so that a convolution keeps the size of a frame")
    size = arguments["patch_size"]
    if size < 1 or size & (size - 1):
        raise ValueError(f"patch_size {size} must be a power of two: 1, 2, 4, ...")
    kernel, side = max(arguments["input_kernel"], arguments["output_kernel"]), arguments["image_size"] // size
    if arguments["pad_mode"] == "reflect" and kernel // 2 >= side:
        raise ValueError(f"a kernel of {kernel} is too large for pad_mode 'reflect' at {side} x {side}; use 'constant'")
    sizes = ("channels", "init_dim", "max_dim", "dim_cond", "heads", "dim_head", "linear_heads", "linear_dim_head")
    for name in sizes:
        if arguments[name] is not None and arguments[name] < 1:
            raise ValueError(f"{name} {arguments[name]}: give a number of at least 1")
    if arguments["time_window"] < 0:
        raise ValueError(f"time_window {arguments['time_window']}: give a number of frames, or 0 for all")


def check_videos(videos: Tensor, channels: int, multiple: int) -> None:
    """Raise a ValueError of one line unless videos (b, c, f, h, w) or images (b, c, h, w) are floating-point numbers of
    these channels, in sides that are multiples of this one."""
    if videos.shape[1] != channels or not videos.is_floating_point():
        found = f"{videos.dtype} videos of shape {tuple(videos.shape)}"
        raise ValueError(f"{found}: give floating-point numbers (b, {channels}, frames, height, width)")
    for name, side in zip(("height", "width"), videos.shape[-2:], strict=True):
        check_side(name, side, multiple)


def check_condition(cond: Tensor | None, is_conditional: bool) -> Tensor | None:
    """The condition of the layers ``cond_...``. Raises a ValueError of one line if it is missing or superfluous."""
    if (cond is not None) != is_conditional:
        raise ValueError(
            "layers cond_... need a condition (b, dim_cond): give cond" if is_conditional
            else "a condition was given, but no layer takes one: add layers cond_..., or leave cond out"
        )  # fmt: skip
    return cond


@dataclass(frozen=True)
class LayerOptions:
    """What layers need besides their channels."""

    kernel: int
    norm: str
    dim_cond: int | None  # of the condition that the layers see
    dim_latent: int
    heads: int
    dim_head: int
    linear_heads: int
    linear_dim_head: int
    time_window: int


def make_layers(
    layers: list[Layer], dim: int, max_dim: int | None, options: LayerOptions
) -> tuple[list[nn.Module], list[nn.Module], int]:
    """Modules of the encoder, modules of the decoder in its own order, and the channels between the two.

    Args:
        dim: Channels at the full resolution; a layer that compresses doubles them if it is given none.
        max_dim: The most channels.

    Raises:
        ValueError: a layer with a condition, but no ``dim_cond``.
    """
    encoder: list[nn.Module] = []
    decoder: list[nn.Module] = []
    names = [layer.name for layer in layers]
    for index, (name, number) in enumerate(layers):
        if name.startswith("cond_") and options.dim_cond is None:
            raise ValueError(f"layer {name!r} needs a condition, and there is none: leave it out, or give dim_cond")
        if name.startswith("compress_"):
            wide = min(number or 2 * dim, max_dim or number or 2 * dim)
            kernel, stride = ((1, 3, 3), (1, 2, 2)) if name == "compress_space" else ((3, 1, 1), (2, 1, 1))
            encoder.append(CausalConv3d(dim, wide, kernel, stride=stride))
            decoder.append(SpaceUp(wide, dim) if name == "compress_space" else TimeUp(wide, dim))
            dim = wide
        elif name == "adaptive":  # in the decoder alone
            frames, pixels = (2 ** names[index:].count(f"compress_{way}") for way in ("time", "space"))
            decoder.append(AdaptiveNorm(dim, options.dim_latent, frames, pixels))
        else:
            make = _maker(name, dim, options)
            encoder += [make() for _ in range(number or 1)]
            decoder += [make() for _ in range(number or 1)]
    return encoder, decoder[::-1], dim


def _maker(name: str, dim: int, options: LayerOptions) -> Callable[[], nn.Module]:
    """A function that makes a layer which keeps the size of its input."""
    dim_cond = options.dim_cond if name.startswith("cond_") else None
    kernel = (1 if name == "residual_space" else options.kernel, options.kernel, options.kernel)

    def residual() -> nn.Module:
        if dim_cond is None:
            return ResidualUnit(dim, CausalConv3d(dim, dim, kernel), SqueezeExcite(dim), options.norm)
        return ResidualUnit(dim, ModulatedConv3d(dim, dim, kernel, dim_cond), nn.Identity(), options.norm)

    def attend(along: str) -> nn.Module:
        window = options.time_window or None
        attention = Attention(dim, options.heads, options.dim_head, is_causal=along == "time", window=window)
        return Attend(dim, attention, along, dim_cond)

    def attend_linearly() -> nn.Module:
        return Attend(dim, TaylorAttention(dim, options.linear_heads, options.linear_dim_head), "space", dim_cond)

    return {
        "residual": residual,
        "residual_space": residual,
        "consecutive_residual": residual,
        "attend_space": lambda: attend("space"),
        "linear_attend_space": attend_linearly,
        "attend_time": lambda: attend("time"),
        "gateloop_time": lambda: GateLoop(dim),
    }[name.removeprefix("cond_")]
