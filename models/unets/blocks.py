"""ResNet blocks of the Unet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import at_least_fp32
from .attention import CrossAttention, as_map, as_tokens
from .conditions import Context

_EPSILON = 1e-5  # added to a variance of weights


class StandardizedConv2d(nn.Conv2d):
    """A convolution with the weights of each output channel brought to mean 0 and variance 1 (Qiao et al. 2019, "Weight
    standardization"), in fp32 or fp64."""

    def forward(self, x: Tensor) -> Tensor:
        weight = at_least_fp32(self.weight)
        variance, mean = torch.var_mean(weight, dim=(1, 2, 3), correction=0, keepdim=True)
        weight = (weight - mean) * (variance + _EPSILON).rsqrt()
        return F.conv2d(x, weight.to(self.weight.dtype), self.bias, self.stride, self.padding)


class Block(nn.Module):
    """3 x 3 convolution, GroupNorm, FiLM (Perez et al. 2018) if there is one, SiLU."""

    def __init__(self, dim: int, dim_out: int, groups: int = 8, standardize: bool = False) -> None:
        super().__init__()
        self.project = (StandardizedConv2d if standardize else nn.Conv2d)(dim, dim_out, 3, padding=1)
        self.norm = nn.GroupNorm(groups, dim_out)

    def forward(self, x: Tensor, film: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """(b, dim, h, w) -> (b, dim_out, h, w). ``film`` are the scale, minus 1, and the shift, (b, dim_out, 1, 1)."""
        x = self.norm(self.project(x))
        if film is not None:
            scale, shift = film
            x = x * (scale + 1) + shift
        return F.silu(x)


@dataclass(frozen=True)
class BlockOptions:
    """What the ResNet blocks of a Unet have in common."""

    dim_time: int
    cond_dim: int
    heads: int
    dim_head: int
    cosine: bool
    standardize: bool


class ResnetBlock(nn.Module):
    """A block with FiLM by the noise level, cross-attention if it ``attends``, a second block; and the input, added.

    The views of what a module of the Unet uses more than once add up the gradients of these uses before what else uses
    it adds its own. Sums in another order have other bits, and otherwise the order would depend on whether hooks at the
    borders of modules (ZeRO 3) part the uses.
    """

    def __init__(self, dim: int, dim_out: int, groups: int, options: BlockOptions, attends: bool = False) -> None:
        super().__init__()
        # The Unet has applied the SiLU of which each block would have one in the place of the Identity.
        self.time_mlp = nn.Sequential(nn.Identity(), nn.Linear(options.dim_time, 2 * dim_out))
        self.cross_attn = (
            CrossAttention(dim_out, options.cond_dim, options.heads, options.dim_head, options.cosine)
            if attends else None
        )  # fmt: skip
        self.block1 = Block(dim, dim_out, groups, options.standardize)
        self.block2 = Block(dim_out, dim_out, groups, options.standardize)
        self.res_conv = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x: Tensor, t: Tensor, context: Context | None = None) -> Tensor:
        """(b, dim, h, w) -> (b, dim_out, h, w).

        Args:
            t: SiLU of the embedding of the noise level, (b, dim_time).
            context: For blocks that attend.
        """
        x = x.view_as(x)
        scale, shift = self.time_mlp(t)[:, :, None, None].chunk(2, dim=1)
        h = self.block1(x, (scale, shift))
        if self.cross_attn is not None:
            assert context is not None
            fixed = context.keys_values[self.cross_attn.index] if context.keys_values else None
            h = h + as_map(self.cross_attn(as_tokens(h), context.tokens, fixed), h)
        return self.block2(h) + self.res_conv(x)
