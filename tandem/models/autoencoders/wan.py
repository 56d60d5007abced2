"""The body of the video autoencoders of Wan 2.1 and 2.2 (Wan team 2025, arXiv:2503.20314, section 4.1), with the names
that their weights have in diffusers. Qwen-Image has the body of Wan 2.1.

Wan 2.1: 4 x 8 x 8 places of a video share a latent of 16 channels. Wan 2.2: 4 x 16 x 16 and 48 channels, because frames
are cut into patches of 2 x 2 first; and each level has a residual connection without parameters.

All convolutions over time are causal: a frame depends on no later one. Where frames are halved or doubled, frame 0
stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.config.models.autoencoders import VideoTokenizerConfig
from tandem.models.layers.attention import at_least_fp32
from tandem.models.layers.recompute import recompute_in_backward
from tandem.models.layers.video.causal import CausalConv3d, Context
from tandem.models.layers.video.patches import from_patches, to_patches

_KERNEL = (3, 3, 3)


class _Block(nn.Module):
    """A part of the body. With `recompute`, training computes each of its layers again in the backward pass."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute

    def apply_layers(self, layers: Iterable[nn.Module], x: Tensor, context: Context) -> Tensor:
        for layer in layers:
            x = recompute_in_backward(layer, x, context, when=self.recompute and self.training)
        return x


class WanEncoder(_Block):
    """Frames (b, c, f, h, w) in [0, 1] -> what the quantizer takes, (b, channels_out, f', h', w')."""

    def __init__(self, config: VideoTokenizerConfig, channels: int, channels_out: int) -> None:
        super().__init__(config.gradient_checkpointing)
        self.patch = (config.patch_size, config.patch)
        width = config.init_dim
        self.conv_in = CausalConv3d(channels * config.patch_size**2, width, _KERNEL)
        self.down_blocks = nn.ModuleList()
        for level, multiple in enumerate(config.ch_mult):
            width_in, width = width, config.init_dim * multiple
            layers = _residual_blocks(width_in, width, config.num_resnet_blocks)
            is_last = level == len(config.ch_mult) - 1
            down = None if is_last else Downsampling(width, halves_time=level in config.time_levels)
            if config.residual_resampling:
                self.down_blocks.append(_ResidualDownBlock(width_in, width, layers, down, self.recompute))
            else:
                self.down_blocks.extend(layers if down is None else [*layers, down])
        self.mid_block = _MiddleBlock(width, self.recompute)
        self.norm_out = _ChannelNorm(width, axes=3)
        self.conv_out = CausalConv3d(width, channels_out, _KERNEL)
        self.quant_conv = nn.Conv3d(channels_out, channels_out, 1)

    def forward(self, frames: Tensor, context: Context) -> Tensor:
        x = self.conv_in(to_patches(2 * frames.to(self.quant_conv.weight.dtype) - 1, *self.patch), context)
        for block in self.down_blocks:
            x = block(x, context) if isinstance(block, _Block) else self.apply_layers([block], x, context)
        x = self.mid_block(x, context)
        return self.quant_conv(self.conv_out(F.silu(self.norm_out(x)), context))


class WanDecoder(nn.Module):
    """Latents (b, d, f', h', w') -> frames fp32 (b, c, f, h, w), about [0, 1], and the input of the last convolution
    (b, dim, f, h / patch_size, w / patch_size)."""

    def __init__(self, config: VideoTokenizerConfig, channels: int, channels_in: int) -> None:
        super().__init__()
        recompute, dim = config.gradient_checkpointing, config.decoder_dim or config.init_dim
        self.patch = (config.patch_size, config.patch)
        width = dim * config.ch_mult[-1]
        self.post_quant_conv = nn.Conv3d(channels_in, channels_in, 1)
        self.conv_in = CausalConv3d(channels_in, width, _KERNEL)
        self.mid_block = _MiddleBlock(width, recompute)
        self.up_blocks = nn.ModuleList()
        for level, multiple in reversed([*enumerate(config.ch_mult)]):
            width_in, width = width, dim * multiple
            layers = _residual_blocks(width_in, width, config.num_resnet_blocks + 1)
            block_class, width_out = (_ResidualUpBlock, width) if config.residual_resampling else (_UpBlock, width // 2)
            up = Upsampling(width, width_out, doubles_time=level - 1 in config.time_levels) if level else None
            self.up_blocks.append(block_class(width_in, width, layers, up, recompute))
            width = width_out if level else width
        self.norm_out = _ChannelNorm(width, axes=3)
        self.conv_out = CausalConv3d(width, channels * config.patch_size**2, _KERNEL)

    def forward(self, latents: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        x = self.conv_in(self.post_quant_conv(latents.to(self.post_quant_conv.weight.dtype)), context)
        for block in (self.mid_block, *self.up_blocks):
            x = block(x, context)
        features = F.silu(self.norm_out(x))
        return (from_patches(self.conv_out(features, context).float(), *self.patch) + 1) / 2, features

    def last_layer_gradient(self, features: Tensor, frames_gradient: Tensor) -> Tensor:
        """A loss's gradient (n,) with respect to the weight of `conv_out`, from whole clips; uses no weights."""
        return self.conv_out.weight_gradient(features, to_patches(frames_gradient.float() / 2, *self.patch)).flatten()


class _MiddleBlock(_Block):
    """Attention between two residual blocks, at the resolution of the latents."""

    def __init__(self, dim: int, recompute: bool) -> None:
        super().__init__(recompute)
        self.resnets = nn.ModuleList(_residual_blocks(dim, dim, 2))
        self.attentions = nn.ModuleList([_FrameAttention(dim)])

    def forward(self, x: Tensor, context: Context) -> Tensor:
        before, after = self.resnets
        return self.apply_layers((before, *self.attentions, after), x, context)


class _UpBlock(_Block):
    """A level of Wan 2.1's decoder."""

    def __init__(
        self, fan_in: int, fan_out: int, layers: list[nn.Module], up: Upsampling | None, recompute: bool
    ) -> None:
        super().__init__(recompute)
        self.resnets, self.upsamplers = nn.ModuleList(layers), nn.ModuleList([up] if up else [])

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.apply_layers((*self.resnets, *self.upsamplers), x, context)


class _ResidualDownBlock(_Block):
    """A level of Wan 2.2's encoder. Its residual connection has no parameters: each of its channels is the mean of a
    group of values, those of neighbouring channels at the 2 x 2 places, perhaps of 2 frames, that become one place."""

    def __init__(
        self, fan_in: int, fan_out: int, layers: list[nn.Module], down: Downsampling | None, recompute: bool
    ) -> None:
        super().__init__(recompute)
        self.resnets, self.downsampler = nn.ModuleList(layers), down
        self._fan_out, self._factors = fan_out, _factors(down)
        _check_groups(fan_in, fan_out, self._factors)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        layers = self.resnets if self.downsampler is None else (*self.resnets, self.downsampler)
        y = self.apply_layers(layers, x.view_as(x), context)  # the view: as in `RMSNorm`
        if context.is_start:
            x = F.pad(x, (0, 0, 0, 0, self._factors["s"] - 1, 0))
        places = rearrange(x, "b c (f s) (h p) (w q) -> b (c s p q) f h w", **self._factors)
        return y + places.unflatten(1, (self._fan_out, -1)).mean(dim=2)


class _ResidualUpBlock(_Block):
    """A level of Wan 2.2's decoder. Its residual connection has no parameters: channels are repeated until a pixel
    shuffle, over the frames, too, gives as many as the layers do."""

    def __init__(
        self, fan_in: int, fan_out: int, layers: list[nn.Module], up: Upsampling | None, recompute: bool
    ) -> None:
        super().__init__(recompute)
        self.resnets, self.upsampler = nn.ModuleList(layers), up
        self._fan_out, self._factors = fan_out, _factors(up)
        if up:
            _check_groups(fan_out, fan_in, self._factors)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if self.upsampler is None:
            return self.apply_layers(self.resnets, x, context)
        y = self.apply_layers((*self.resnets, self.upsampler), x.view_as(x), context)  # the view: as in `RMSNorm`
        copies = self._fan_out * math.prod(self._factors.values()) // x.shape[1]
        places = x.repeat_interleave(copies, dim=1)
        frames = rearrange(places, "b (c s p q) f h w -> b c (f s) (h p) (w q)", **self._factors)
        return y + (frames[:, :, self._factors["s"] - 1 :] if context.is_start else frames)


def _factors(resampling: Resampling | None) -> dict[str, int]:
    """By how much time (s), height (p) and width (q) change."""
    space = 1 if resampling is None else 2
    return {"s": 2 if resampling is not None and resampling.time_conv is not None else 1, "p": space, "q": space}


def _check_groups(fine: int, coarse: int, factors: Mapping[str, int]) -> None:
    """Raise ValueError, in one line, if the residual connection between a finer and a coarser level cannot be made."""
    if fine * math.prod(factors.values()) % coarse:
        raise ValueError(f"residual_resampling: no mean over equal groups leads from {fine} to {coarse} channels")


class _ResidualBlock(nn.Module):
    """Norm, SiLU and causal convolution, twice, added to the input: (b, i, f, h, w) -> (b, o, f, h, w)."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _ChannelNorm(fan_in, axes=3), CausalConv3d(fan_in, fan_out, _KERNEL)
        self.norm2, self.conv2 = _ChannelNorm(fan_out, axes=3), CausalConv3d(fan_out, fan_out, _KERNEL)
        self.conv_shortcut = nn.Conv3d(fan_in, fan_out, 1) if fan_in != fan_out else nn.Identity()

    def forward(self, x: Tensor, context: Context) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)), context)
        return self.conv_shortcut(x) + self.conv2(F.silu(self.norm2(y)), context)


def _residual_blocks(fan_in: int, fan_out: int, count: int) -> list[nn.Module]:
    return [_ResidualBlock(fan_out if number else fan_in, fan_out) for number in range(count)]


class _FrameAttention(nn.Module):
    """Attention with one head among the places of each frame, added to the input: (b, c, f, h, w) -> its shape. It adds
    nothing at the start of training."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = _ChannelNorm(dim, axes=2)
        self.to_qkv, self.proj = nn.Conv2d(dim, 3 * dim, 1), nn.Conv2d(dim, dim, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return x + _each_frame(self._attend, x)

    def _attend(self, frames: Tensor) -> Tensor:
        """(n, c, h, w) -> its shape."""
        q, k, v = rearrange(self.to_qkv(self.norm(frames)), "n (k c) h w -> k n 1 (h w) c", k=3)
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.proj(rearrange(attended, "n 1 (h w) c -> n c h w", h=frames.shape[2]))


class _ChannelNorm(nn.Module):
    """x / |x| x sqrt(c) x gain at each place, with |x| over the c channels and at least 1e-12: like `RMSNorm`, but
    nothing is added to the mean square."""

    def __init__(self, dim: int, axes: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim, *[1] * axes))

    def forward(self, x: Tensor) -> Tensor:
        y = at_least_fp32(x).view_as(x)  # for the order in which gradients are added, as in `RMSNorm`
        return (F.normalize(y, dim=1) * (x.shape[1] ** 0.5 * self.gamma)).to(x.dtype)


class Resampling(nn.Module):
    """Layers that change the sides of frames and perhaps their number.

    Args:
        resample: Frames (n, c, h, w) -> (n, c', h', w').
        time_conv: Changes the number of frames; None: it stays.
    """

    def __init__(self, resample: nn.Sequential, time_conv: CausalConv3d | None) -> None:
        super().__init__()
        self.resample, self.time_conv = resample, time_conv
        self.repeat_frames()

    @torch.no_grad()
    def repeat_frames(self) -> None:
        """Let one of two frames stand for both: halving takes the later one, doubling repeats the one there is. So
        training starts, and what was trained on images alone goes on with videos."""
        if self.time_conv is not None:
            nn.init.zeros_(self.time_conv.weight)
            nn.init.zeros_(self.time_conv.bias)  # type: ignore[arg-type]
            for frame in self.time_conv.weight[:, :, -1, 0, 0].split(self.time_conv.in_channels):
                frame.diagonal().fill_(1)


class Downsampling(Resampling):
    """(b, c, f, h, w) -> (b, c, f, h / 2, w / 2): a 3 x 3 convolution of stride 2, padded below and on the right alone;
    with `halves_time`, a causal convolution then makes 1 + n frames of 1 + 2 n."""

    def __init__(self, dim: int, halves_time: bool) -> None:
        resample = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(dim, dim, 3, stride=2))
        super().__init__(resample, CausalConv3d(dim, dim, (3, 1, 1), stride=(2, 1, 1)) if halves_time else None)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = _each_frame(self.resample, x)
        if self.time_conv is None:
            return x
        halved = self.time_conv(x, context)  # also of an image, so that the weights have a gradient, of zeros
        return torch.cat([x[:, :, :1], halved[:, :, 1:]], dim=2) if context.is_start else halved


class Upsampling(Resampling):
    """(b, i, f, h, w) -> (b, o, f, 2 h, 2 w): every pixel twice in both directions, then a 3 x 3 convolution; with
    `doubles_time`, a causal convolution, which does not see frame 0, makes 1 + 2 n frames of 1 + n before."""

    def __init__(self, fan_in: int, fan_out: int, doubles_time: bool) -> None:
        resample = nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(fan_in, fan_out, 3, padding=1))
        super().__init__(resample, CausalConv3d(fan_in, 2 * fan_in, (3, 1, 1)) if doubles_time else None)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if self.time_conv is not None:
            first = x[:, :, :1]
            without_first = torch.cat([torch.zeros_like(first), x[:, :, 1:]], dim=2) if context.is_start else x
            doubled = rearrange(self.time_conv(without_first, context), "b (p c) f h w -> b c (f p) h w", p=2)
            x = torch.cat([first, doubled[:, :, 2:]], dim=2) if context.is_start else doubled
        return _each_frame(self.resample, x)


def _each_frame(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """(b, c, f, h, w) through a layer for images (n, c, h, w)."""
    frames = layer(rearrange(x, "b c f h w -> (b f) c h w"))
    return rearrange(frames, "(b f) c h w -> b c f h w", b=len(x))
