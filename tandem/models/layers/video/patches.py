"""Patches of frames as channels: fewer places for the layers of a video tokenizer."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor


def to_patches(x: Tensor, size: int, kind: str) -> Tensor:
    """(b, c, f, h, w) -> (b, c x size^2, f, h / size, w / size), orthonormal.

    ``pixels`` moves the pixels of a patch to channels. ``haar`` is log2(size) levels of the 2 x 2 Haar transform of all
    channels: pixels a b / c d become (a + b + c + d) / 2, (a - b + c - d) / 2, (a + b - c - d) / 2 and
    (a - b - c + d) / 2, in blocks of channels in this order.
    """
    if kind == "pixels":
        return rearrange(x, "b c f (h p) (w q) -> b (p q c) f h w", p=size, q=size)
    while size > 1:
        x, size = _haar(rearrange(x, "b c f (h p) (w q) -> (p q) b c f h w", p=2, q=2), dim=1), size // 2
    return x


def from_patches(x: Tensor, size: int, kind: str) -> Tensor:
    """The inverse of `to_patches`; it is also the transpose."""
    if kind == "pixels":
        return rearrange(x, "b (p q c) f h w -> b c f (h p) (w q)", p=size, q=size)
    while size > 1:
        corners = _haar(rearrange(x, "b (k c) f h w -> k b c f h w", k=4), dim=0)
        x, size = rearrange(corners, "(p q b) c f h w -> b c f (h p) (w q)", p=2, q=2), size // 2
    return x


def _haar(corners: Tensor, dim: int) -> Tensor:
    """Four tensors (4, b, ...) -> their 2 x 2 Haar transform, which is its own inverse, concatenated along ``dim``."""
    a, b, c, d = corners
    top, top_slope, bottom, bottom_slope = a + b, a - b, c + d, c - d
    parts = (top + bottom, top_slope + bottom_slope, top - bottom, top_slope - bottom_slope)
    return torch.cat(parts, dim=dim) / 2
