"""The body of taming-transformers (Esser et al. 2021), which latent diffusion (Rombach et al. 2022), LlamaGen and
others share: residual blocks with GroupNorm and swish, attention at some levels and in the middle.

Layers have taming's names, with underscores in place of dots: ``down_0_block_1`` is its ``down.0.block.1``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from tandem.config.models.autoencoders import VQGANConfig
from tandem.models.quantizers import make_quantizer

_MAX_LEVELS = 12
_EPSILON = 1e-6  # of every GroupNorm


class NormSwish(nn.GroupNorm):
    """GroupNorm and then swish, x sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x))


class ResnetBlock(nn.Module):
    """GroupNorm, swish and a 3 x 3 convolution, twice, added to the input, (b, c, h, w) -> (b, width, h, w)."""

    def __init__(self, channels: int, width: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = NormSwish(groups, channels, _EPSILON), nn.Conv2d(channels, width, 3, padding=1)
        self.norm2, self.conv2 = NormSwish(groups, width, _EPSILON), nn.Conv2d(width, width, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(channels, width, 1) if channels != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.nin_shortcut(x) + self.conv2(self.norm2(self.conv1(self.norm1(x))))


class AttentionBlock(nn.Module):
    """Attention with one head among all positions of an image, added to the input: (b, c, h, w) -> its shape."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, _EPSILON)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (projection(normed).flatten(2).transpose(1, 2)[:, None] for projection in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2)
        return x + self.proj_out(attended.reshape(x.shape))


class Downsample(nn.Module):
    """(b, c, h, w) -> (b, c, h / 2, w / 2): a 3 x 3 convolution of stride 2, padded below and on the right alone."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """(b, c, h, w) -> (b, c, 2 h, 2 w): every pixel twice in both directions, then a 3 x 3 convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


def count_halvings(ch_mult: Sequence[int]) -> int:
    """How often a body with these levels halves the sides. Raises ValueError, in one line, if they make no body."""
    if not 2 <= len(ch_mult) <= _MAX_LEVELS or min(ch_mult) < 1:
        raise ValueError(f"ch_mult {list(ch_mult)}: give 2 to {_MAX_LEVELS} numbers of at least 1")
    return len(ch_mult) - 1


def make_body(config: VQGANConfig) -> tuple[nn.Sequential, Any, nn.Sequential]:
    """Encoder, quantizer and decoder of a `VQGAN`; images are in [-1, 1].

    Raises:
        ValueError: one line, if the numbers fit no such body.
    """
    levels, groups = len(config.ch_mult), config.norm_groups
    attention_levels = set(config.attention_levels or ())
    if not attention_levels <= set(range(levels)):
        raise ValueError(f"attention_levels {sorted(attention_levels)}: ch_mult has the levels 0 to {levels - 1}")
    if groups < 1 or config.dim % groups:
        raise ValueError(f"norm_groups {groups} do not divide dim {config.dim}; use a smaller norm_groups")
    blocks, *extra_blocks = config.num_resnet_blocks
    if extra_blocks or blocks < 1:
        raise ValueError(f"num_resnet_blocks {list(config.num_resnet_blocks)}: body taming has one number, 1 or more")
    if not config.normalize_input:
        raise ValueError("body taming sees images in [-1, 1]: leave --no-normalize_input out")
    quantizer = make_quantizer(config)
    z_channels = config.z_channels or quantizer.dim
    if not config.quant_conv and z_channels != quantizer.dim:
        raise ValueError(f"z_channels {z_channels} without quant_conv: give {quantizer.dim}, those of a code")
    num_moments = quantizer.in_dim // quantizer.dim  # 2 for a Gaussian: its mean and its log variance
    encoder = _make_encoder(config, num_moments * z_channels)
    decoder: OrderedDict[str, nn.Module] = OrderedDict()
    if config.quant_conv:
        encoder["quant_conv"] = nn.Conv2d(num_moments * z_channels, quantizer.in_dim, 1)
        decoder["post_quant_conv"] = nn.Conv2d(quantizer.dim, z_channels, 1)
    decoder |= _make_decoder(config, z_channels)
    return nn.Sequential(encoder), quantizer, nn.Sequential(decoder)


def _make_encoder(config: VQGANConfig, channels_out: int) -> OrderedDict[str, nn.Module]:
    """Layers by name: images (b, c, h, w) -> (b, channels_out, h', w')."""
    groups, channels = config.norm_groups, config.dim
    encoder: OrderedDict[str, nn.Module] = OrderedDict(conv_in=nn.Conv2d(config.channels, channels, 3, padding=1))
    for level, multiple in enumerate(config.ch_mult):
        for number in range(config.num_resnet_blocks[0]):
            encoder[f"down_{level}_block_{number}"] = ResnetBlock(channels, config.dim * multiple, groups)
            channels = config.dim * multiple
            if level in (config.attention_levels or ()):
                encoder[f"down_{level}_attn_{number}"] = AttentionBlock(channels, groups)
        if level < len(config.ch_mult) - 1:
            encoder[f"down_{level}_downsample"] = Downsample(channels)
    encoder |= _make_middle(channels, groups)
    encoder["norm_out"] = NormSwish(groups, channels, _EPSILON)
    encoder["conv_out"] = nn.Conv2d(channels, channels_out, 3, padding=1)
    return encoder


def _make_decoder(config: VQGANConfig, channels_in: int) -> OrderedDict[str, nn.Module]:
    """Layers by name: (b, channels_in, h', w') -> images (b, c, h, w)."""
    groups, channels = config.norm_groups, config.dim * config.ch_mult[-1]
    decoder: OrderedDict[str, nn.Module] = OrderedDict(conv_in=nn.Conv2d(channels_in, channels, 3, padding=1))
    decoder |= _make_middle(channels, groups)
    for level, multiple in reversed([*enumerate(config.ch_mult)]):
        for number in range(config.num_resnet_blocks[0] + 1):
            decoder[f"up_{level}_block_{number}"] = ResnetBlock(channels, config.dim * multiple, groups)
            channels = config.dim * multiple
            if config.decoder_attention and level in (config.attention_levels or ()):
                decoder[f"up_{level}_attn_{number}"] = AttentionBlock(channels, groups)
        if level:
            decoder[f"up_{level}_upsample"] = Upsample(channels)
    decoder["norm_out"] = NormSwish(groups, channels, _EPSILON)
    decoder["conv_out"] = nn.Conv2d(channels, config.channels, 3, padding=1)
    return decoder


def _make_middle(channels: int, groups: int) -> OrderedDict[str, nn.Module]:
    return OrderedDict(
        mid_block_1=ResnetBlock(channels, channels, groups),
        mid_attn_1=AttentionBlock(channels, groups),
        mid_block_2=ResnetBlock(channels, channels, groups),
    )
