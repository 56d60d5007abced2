"""The levels of the Unet, which pass their maps on to the levels of equal size on the way up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..recompute import recomputed
from .attention import Attention, LinearAttention, OnTokens, Residual
from .blocks import BlockOptions, ResnetBlock
from .conditions import Context
from .config import UnetConfig
from .resampling import downsample, upsample


class Down(nn.ModuleList):
    """A level on the way down: [what comes first, a block, blocks that may attend, attention, what comes last]."""

    def __init__(
        self, before: nn.Module, first: nn.Module, blocks: Sequence[nn.Module], attention: nn.Module, after: nn.Module
    ) -> None:  # fmt: skip
        super().__init__([before, first, nn.ModuleList(blocks), attention, after])

    def forward(self, x: Tensor, t: Tensor, context: Context, recompute: bool) -> tuple[Tensor, list[Tensor]]:
        """The level's output, and the maps after each block and after the attention, for the way up."""
        before, first, blocks, attention, after = self
        t, context = t.view_as(t), context.view()
        x = recomputed(first, before(x), t, when=recompute)
        skips = []
        for block in blocks:  # type: ignore[attr-defined]
            x = recomputed(block, x, t, context, when=recompute)
            skips.append(x)
        x = attended(attention, x, recompute)
        return after(x), [*skips, x]


class Up(nn.ModuleList):
    """A level on the way up: [a block, more blocks, attention, what comes last]; each block also gets a map of the way
    down, times ``skip_scale``."""

    def __init__(
        self, first: nn.Module, blocks: Sequence[nn.Module], attention: nn.Module, after: nn.Module, skip_scale: float
    ) -> None:  # fmt: skip
        super().__init__([first, nn.ModuleList(blocks), attention, after])
        self.skip_scale = skip_scale

    def forward(
        self, x: Tensor, skips: Sequence[Tensor], t: Tensor, context: Context, recompute: bool
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The level's output, and the map before its last part. ``skips`` are the maps of the level on the way down."""
        first, blocks, attention, after = self
        t, context = t.view_as(t), context.view()
        for block, skip in zip((first, *blocks), reversed(skips), strict=True):  # type: ignore[misc]
            x = recomputed(joined, block, x, skip, self.skip_scale, t, context, when=recompute)
        x = attended(attention, x, recompute)
        return after(x), x


def make_levels(config: UnetConfig, options: BlockOptions) -> tuple[nn.ModuleList, nn.ModuleList]:
    """The levels on the way down, finest first, and those on the way up, coarsest first."""
    widths = [config.init_dim, *(config.dim * mult for mult in config.dim_mults)]
    early = config.memory_efficient  # the sides are halved before the blocks
    kernels = config.cross_embed_downsample_kernel_sizes if config.cross_embed_downsample else None
    skip_scale = 2**-0.5 if config.scale_skip_connection else 1.0
    downs, ups, last = [], [], len(widths) - 2
    for level, (narrow, wide) in enumerate(pairwise(widths)):
        groups, count, dim = config.resnet_groups[level], config.num_resnet_blocks[level], wide if early else narrow
        attends = level > 0

        def block(dim_in: int, dim: int, attends: bool, groups: int = groups) -> ResnetBlock:
            return ResnetBlock(dim_in, dim, groups, options, attends)

        downs.append(Down(
            downsample(narrow, wide, kernels) if early else nn.Identity(),
            block(dim, dim, attends=False),
            [block(dim, dim, attends) for _ in range(count)],
            attention_of(config, level, dim),
            nn.Conv2d(dim, wide, 1) if early or level == last else downsample(dim, wide, kernels),
        ))  # fmt: skip
        ups.append(Up(
            block(wide + dim, wide, attends),
            [block(wide + dim, wide, attends) for _ in range(count)],
            attention_of(config, level, wide),
            upsample(wide, narrow, config.pixel_shuffle_upsample) if early or level > 0 else nn.Identity(),
            skip_scale,
        ))  # fmt: skip
    return nn.ModuleList(downs), nn.ModuleList(reversed(ups))


def self_attention(config: UnetConfig, dim: int) -> nn.Module:
    """Self-attention with its residual, on maps (b, dim, h, w)."""
    sizes = (config.attn_heads, config.attn_dim_head)
    return OnTokens(Residual(Attention(dim, *sizes, cosine=config.cosine_sim_self_attn)))


def attention_of(config: UnetConfig, level: int, dim: int) -> nn.Module:
    """The attention of a level with its residual, or an Identity."""
    if config.self_attn[level]:
        return self_attention(config, dim)
    if config.sparse_attn:
        return Residual(LinearAttention(dim, config.attn_heads, config.attn_dim_head))
    return nn.Identity()


def attended(attention: nn.Module, x: Tensor, recompute: bool) -> Tensor:
    """``attention(x)``, where an Identity keeps nothing that would have to be computed again."""
    return x if isinstance(attention, nn.Identity) else recomputed(attention, x, when=recompute)


def joined(block: nn.Module, x: Tensor, skip: Tensor, scale: float, t: Tensor, context: Context | None) -> Tensor:
    """A block of two maps. To be computed again, it needs the two alone to be kept, and not the copy of both."""
    return block(torch.cat([x, skip * scale if scale != 1 else skip], dim=1), t, context)
