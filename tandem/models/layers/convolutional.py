"""Parts that the convolutional tokenizers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from einops import rearrange
from torch import Tensor, nn

Conv = TypeVar("Conv", nn.Conv2d, nn.Conv3d)


class ResBlock(nn.Module):
    """x + a 1 x 1 convolution of two halves, each made by ``make_half``: (b, channels, h, w) -> its shape."""

    def __init__(self, channels: int, make_half: Callable[[int], list[nn.Module]]) -> None:
        super().__init__()
        self.net = nn.Sequential(*make_half(channels), *make_half(channels), nn.Conv2d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


def channels_last(x: Tensor) -> Tensor:
    """(b, c, h, w) in the memory format in which convolutions need the fewest copies; later layers keep the format.

    On a CPU this makes the VQGAN 1.2 times as fast, and its discriminator 1.6 times. Only activations are copied, never
    weights: backends have formats of their own for these, and the format decides how sums are rounded.
    """
    return x.contiguous(memory_format=torch.channels_last)


def mix_noise(latents: Tensor, noise: Tensor | None, levels: Tensor | None) -> Tensor:
    """(1 - t) latents + t noise of shape (b, ...), with levels t (b,) in [0, 1]; the latents without noise."""
    if noise is None or levels is None:
        return latents
    t = levels.view(-1, *[1] * (latents.dim() - 1))
    return (1 - t) * latents + t * noise


def leaky_relu() -> nn.LeakyReLU:
    """LeakyReLU in place, for use after a convolution or a GroupNorm, whose backward passes do not need their outputs:
    one tensor is kept instead of two."""
    return nn.LeakyReLU(0.1, inplace=True)


def group_norm(channels: int, max_groups: int = 16) -> nn.GroupNorm:
    """With as many groups as the greatest common divisor of ``max_groups`` and the channels."""
    return nn.GroupNorm(math.gcd(max_groups, channels), channels)


def replicate_filters(conv: Conv, copies: int) -> Conv:
    """The convolution, initialised so that each filter starts equal to the ``copies`` - 1 after it, without a bias
    (Aitken et al. 2017, "Checkerboard artifact free sub-pixel convolution")."""
    filters = torch.empty(conv.out_channels // copies, *conv.weight.shape[1:])
    nn.init.kaiming_uniform_(filters)
    with torch.no_grad():
        conv.weight.copy_(filters.repeat_interleave(copies, dim=0))
    nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
    return conv


_checks_ranges = ContextVar("_checks_ranges", default=True)


@contextmanager
def without_range_checks() -> Iterator[None]:
    """A context in which `check_range` and `check_codes` read no values, because reading them waits for the device. The
    caller guarantees the range."""
    token = _checks_ranges.set(False)
    try:
        yield
    finally:
        _checks_ranges.reset(token)


# Resized and reconstructed images overshoot [0, 1] a little; images in [-1, 1] or [0, 255] are mistakes.
_MIN_PIXEL, _MAX_PIXEL = -0.5, 1.5


def check_images(images: Tensor, channels: int) -> None:
    """Check the type, the shape (b, channels, height, width) and the range of images. Waits for the device, except in
    `without_range_checks`.

    Raises:
        ValueError: one line.
    """
    if images.dim() != 4 or images.shape[1] != channels:
        raise ValueError(f"images of shape {tuple(images.shape)}: give (b, {channels}, height, width)")
    check_range(images)


def check_range(images: Tensor) -> None:
    """Check that images or videos are floating-point numbers, about in [0, 1]. Waits for the device, except in
    `without_range_checks`.

    Raises:
        ValueError: one line.
    """
    if not images.is_floating_point():
        raise ValueError(f"images of {images.dtype}: give floating-point numbers in [0, 1], such as images / 255")
    if images.numel() and _checks_ranges.get():
        minimum, maximum = (float(value) for value in images.aminmax())
        if not (minimum >= _MIN_PIXEL and maximum <= _MAX_PIXEL):
            raise ValueError(f"images with values from {minimum:.4g} to {maximum:.4g}: scale them to [0, 1]")


def check_codes(codes: Tensor, num_codes: int) -> None:
    """Check that codes are whole numbers in [0, num_codes). Waits for the device, except in `without_range_checks`.

    Raises:
        ValueError: one line.
    """
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise ValueError(f"codes of {codes.dtype}: give whole numbers")
    if codes.numel() and _checks_ranges.get():
        minimum, maximum = (int(value) for value in codes.aminmax())
        if minimum < 0 or maximum >= num_codes:
            raise ValueError(f"codes from {minimum} to {maximum}: the codebook has those from 0 to {num_codes - 1}")


def check_multiple(name: str, pixels: int, multiple: int, rule: str = "") -> None:
    """Raise a ValueError of one line unless ``pixels``, a height or width, is a multiple of ``multiple``, which the
    message calls ``rule``."""
    if pixels < multiple or pixels % multiple:
        smaller = max(pixels // multiple, 1) * multiple
        hint = f"use {smaller} or {smaller + multiple}"
        raise ValueError(f"{name} {pixels} must be a multiple of {rule or multiple}; {hint}")


def as_grid(codes: Tensor, rows: int, columns: int) -> Tensor:
    """Codes (b, h' x w'), row by row -> (b, h', w'): of rows x columns if there are as many, else of a square grid.

    Raises:
        ValueError: another number of codes, which is not a square.
    """
    count = codes.shape[1]
    side = rows if count == rows * columns else math.isqrt(count)
    if count != rows * columns and side * side != count:
        grid = "no square grid" if rows == columns else f"neither a grid of {rows} x {columns} nor a square one"
        raise ValueError(f"{count} codes per image fill {grid}; give s x s of them, row by row")
    return rearrange(codes, "b (h w) -> b h w", h=side)
