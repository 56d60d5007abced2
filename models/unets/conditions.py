"""What a Unet is conditioned on: noise levels as vectors, and tokens that do not depend on them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

_LONGEST_WAVE = 10_000  # noise levels per radian of the slowest sinusoid


class Conditions(NamedTuple):
    """All that depends on the conditions but not on the noise level, computed once for many calls."""

    hidden: Tensor | None
    """(b, 4 dim): what the image embedding adds to the embedding of the noise level."""
    keys_values: tuple[Tensor | None, ...]
    """Keys and values (b, tokens, 2 heads dim_head) of the condition's tokens for each cross-attention; () if the
    Unet has no such tokens."""


class Context(NamedTuple):
    """What cross-attentions look at."""

    tokens: Tensor
    """(b, n, cond_dim), normalised."""
    keys_values: tuple[Tensor | None, ...] = ()
    """Of `Conditions`, for tokens that are not among these."""

    def view(self) -> Context:
        """The same, whose gradients add up here: see `ResnetBlock`."""
        return Context(self.tokens.view_as(self.tokens), self.keys_values)


class Sinusoids(nn.Module):
    """Numbers (b,) -> fp32 (b, dim): sines, then cosines of dim / 2 frequencies from 1 to 1 / 10000 (Vaswani et al.
    2017, section 3.5). Never in a lower precision: bf16 cannot tell apart the integers above 256."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.frequencies = dim // 2

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(self.frequencies, device=x.device, dtype=torch.float32)
        angles = x.float()[:, None] * torch.exp(steps * -(math.log(_LONGEST_WAVE) / (self.frequencies - 1)))
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class LevelEmbedding(nn.Sequential):
    """Noise levels (b,), int or float -> (b, width): sinusoids, a linear layer, GELU, and what is in ``after``."""

    def __init__(self, dim: int, width: int, *after: nn.Module) -> None:
        super().__init__(Sinusoids(dim), nn.Linear(dim, width), nn.GELU(), *after)

    def forward(self, level: Tensor) -> Tensor:
        sinusoids, first, *others = self
        x = first(sinusoids(level).to(first.weight.dtype))
        for layer in others:
            x = layer(x)
        return x


def tokens_from(dim_in: int, count: int, dim: int) -> nn.Sequential:
    """Vectors (b, dim_in) -> tokens (b, count, dim)."""
    return nn.Sequential(nn.Linear(dim_in, count * dim), nn.Unflatten(1, (count, dim)))


def kept(keep: Tensor, x: Tensor | None, null: Tensor) -> Tensor:
    """``x`` where ``keep`` is True, and ``null`` elsewhere, or everywhere if there is no x.

    Args:
        keep: bool, of the first dimensions of x.
        null: Of the shape of x, but 1 in the place of the batch.
    """
    if x is None:
        return null.expand(len(keep), *null.shape[1:])
    return torch.where(keep.view(*keep.shape, *[1] * (x.dim() - keep.dim())), x, null)


def together(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Two lots of tokens (b, n, d) and (b, m, d) -> (b, n + m, d); either may be None, which has no tokens."""
    if one is None or other is None:
        return other if one is None else one
    return torch.cat([one, other], dim=1)
