"""Parts that the convolutional tokenizers share."""

from __future__ import annotations

import math
from collections.abc import Callable

from einops import rearrange
from torch import Tensor, nn


class ResBlock(nn.Module):
    """A residual block: two halves (made by ``half``) and a 1 x 1 convolution, whose result is added to the input."""

    def __init__(self, channels: int, half: Callable[[int], list[nn.Module]]) -> None:
        super().__init__()
        self.net = nn.Sequential(*half(channels), *half(channels), nn.Conv2d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


def as_square(codes: Tensor) -> Tensor:
    """Codes (b, s x s), row by row -> (b, s, s).

    Raises:
        ValueError: the number of codes is not a square.
    """
    side = math.isqrt(codes.shape[1])
    if side * side != codes.shape[1]:
        raise ValueError(f"{codes.shape[1]} codes per image fill no square grid; give s x s of them, row by row")
    return rearrange(codes, "b (h w) -> b h w", h=side)
