"""Codes of a square grid, row by row."""

from __future__ import annotations

import math

from einops import rearrange
from torch import Tensor


def as_square(codes: Tensor) -> Tensor:
    """Codes (b, s x s) -> (b, s, s).

    Raises:
        ValueError: a number of codes that fills no square.
    """
    side = math.isqrt(codes.shape[1])
    if side * side != codes.shape[1]:
        raise ValueError(f"{codes.shape[1]} codes per image fill no square grid; give s x s of them, row by row")
    return rearrange(codes, "b (h w) -> b h w", h=side)
