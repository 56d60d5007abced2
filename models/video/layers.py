"""The layers of a video tokenizer as text: their names, the sizes of videos that fit, and their modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from .attention import AdaptiveNorm, AttendSpace, AttendTime, Attention, GateLoop, TaylorAttention
from .causal import CausalConv3d, SpaceUp, TimeUp
from .residual import ModulatedConv3d, ResidualUnit, SqueezeExcite

# Names of layers, and what the number after their colon says: None if they take none.
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
    time_window: int | None


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
            raise ValueError(f"layer {name!r} needs a condition: give dim_cond, its width")
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

    def attention() -> Attention:
        return Attention(dim, options.heads, options.dim_head)

    def linear_attention() -> TaylorAttention:
        return TaylorAttention(dim, options.linear_heads, options.linear_dim_head)

    return {
        "residual": residual,
        "residual_space": residual,
        "consecutive_residual": residual,
        "attend_space": lambda: AttendSpace(dim, attention(), dim_cond),
        "linear_attend_space": lambda: AttendSpace(dim, linear_attention(), dim_cond),
        "attend_time": lambda: AttendTime(dim, attention(), options.time_window, dim_cond),
        "gateloop_time": lambda: GateLoop(dim),
    }[name.removeprefix("cond_")]
