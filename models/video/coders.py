"""The two halves of the video tokenizer: frames to latents, and quantized latents to frames."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..recompute import recomputed
from .causal import CausalConv3d, Context
from .patches import from_patches, to_patches
from .residual import RMSNorm

COND_EXPANSION = 4  # the layers see a condition of this many times its width


class EdgeConv(nn.Module):
    """The encoder's first or the decoder's last convolution, k x k x k and causal.

    Args:
        separate_first_frame: The first frame has a convolution of its own, 1 x k x k. What the other frames become may
            depend on the first one nevertheless.
    """

    def __init__(self, fan_in: int, fan_out: int, kernel: int, pad_mode: str, separate_first_frame: bool) -> None:
        super().__init__()
        self.conv = CausalConv3d(fan_in, fan_out, (kernel, kernel, kernel), pad_mode=pad_mode)
        self.first = (
            CausalConv3d(fan_in, fan_out, (1, kernel, kernel), pad_mode=pad_mode) if separate_first_frame else None
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        out = self.conv(x, context)
        if self.first is None or not context.is_start:
            return out
        # For an image this leaves nothing of `out`, so the convolution of the other frames has a gradient of zeros. It
        # is not left out: then it would have none, and not every backend treats the two alike.
        return torch.cat([self.first(x[:, :, :1], context), out[:, :, 1:]], dim=2)

    def weight_gradient(self, x: Tensor, output_gradient: Tensor) -> Tensor:
        """A loss's gradient (n,) with respect to the weights of both, from whole clips; see `CausalConv3d`."""
        if self.first is None:
            return self.conv.weight_gradient(x, output_gradient).flatten()
        of_others = F.pad(output_gradient[:, :, 1:], (0, 0, 0, 0, 1, 0))
        gradients = (
            self.conv.weight_gradient(x, of_others),
            self.first.weight_gradient(x[:, :, :1], output_gradient[:, :, :1]),
        )
        return torch.cat([gradient.flatten() for gradient in gradients])


class Stack(nn.ModuleList):
    """Layers one after the other.

    Args:
        recompute: In training, compute each layer again in the backward pass instead of keeping what is inside of it.
    """

    def __init__(self, layers: Iterable[nn.Module], recompute: bool) -> None:
        super().__init__(layers)
        self.recompute = recompute

    def forward(self, x: Tensor, context: Context) -> Tensor:
        for layer in self:
            x = recomputed(layer, x, context, when=self.recompute and self.training)
        return x


class Condition(nn.Module):
    """A condition (b, dim) -> what the layers of one half see of it, (b, 4 dim): linear, SiLU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.expand = nn.Linear(dim, COND_EXPANSION * dim)

    def forward(self, cond: Tensor) -> Tensor:
        return F.silu(self.expand(cond.to(self.expand.weight.dtype)))


class Encoder(nn.Module):
    """Frames (b, c, f, h, w) -> latents (b, dim_latent, f', h', w').

    Args:
        conv_in: From the channels of a patch.
        layers: As `make_layers` gives them.
        dim: Channels after the layers.
        patch: Side and kind of the patches.
    """

    def __init__(
        self, conv_in: EdgeConv, layers: Stack, dim: int, dim_latent: int, dim_cond: int | None, patch: tuple[int, str]
    ) -> None:  # fmt: skip
        super().__init__()
        self.condition = None if dim_cond is None else Condition(dim_cond)
        self.patch, self.conv_in, self.layers = patch, conv_in, layers
        self.norm = RMSNorm(dim)
        self.to_latents = nn.Conv3d(dim, dim_latent, 1)

    def forward(self, frames: Tensor, context: Context) -> Tensor:
        if self.condition is not None:
            context = context._replace(cond=self.condition(context.cond))
        # Inside, values are in [-1, 1]: from a mean of 0 it learns several times faster than from one of 1/2.
        patches = to_patches(2 * frames.to(self.to_latents.weight.dtype) - 1, *self.patch)
        x = self.layers(self.conv_in(patches, context), context)
        return self.to_latents(self.norm(x, context))


class Decoder(nn.Module):
    """Quantized latents (b, dim_latent, f', h', w') -> frames (b, c, f, h, w) in fp32, and the input of the last
    convolution (b, d, f, h / patch, w / patch).

    Args:
        layers: As `make_layers` gives them.
        dim: Channels before the layers.
        norm: An RMSNorm and a SiLU precede the last convolution; None: nothing does.
        conv_out: To the channels of a patch.
        patch: Side and kind of the patches.
    """

    def __init__(
        self, dim_latent: int, dim: int, dim_cond: int | None, layers: Stack, norm: RMSNorm | None, conv_out: EdgeConv,
        patch: tuple[int, str],
    ) -> None:  # fmt: skip
        super().__init__()
        self.condition = None if dim_cond is None else Condition(dim_cond)
        self.from_latents = nn.Conv3d(dim_latent, dim, 1)
        self.layers, self.norm, self.conv_out, self.patch = layers, norm, conv_out, patch

    def forward(self, quantized: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        latents = quantized.to(self.from_latents.weight.dtype)
        context = context._replace(latents=latents)
        if self.condition is not None:
            context = context._replace(cond=self.condition(context.cond))
        x = self.layers(self.from_latents(latents), context)
        features = x if self.norm is None else F.silu(self.norm(x, context))
        return (from_patches(self.conv_out(features, context).float(), *self.patch) + 1) / 2, features

    def last_layer_gradient(self, features: Tensor, frames_gradient: Tensor) -> Tensor:
        """A loss's gradient (n,) with respect to the weights of ``conv_out``, from whole clips; uses no weights."""
        return self.conv_out.weight_gradient(features, to_patches(frames_gradient.float() / 2, *self.patch))
