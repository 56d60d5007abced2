"""Residual units, norms and gates of the video tokenizer. None of them mixes frames, except through the convolution."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import at_least_fp32
from .causal import CausalConv3d, Context

_EPSILON = 1e-6  # added to a mean square
_LEAST_SQUARE = 1e-8  # a squared norm is raised to this before division


class RMSNorm(nn.Module):
    """x / sqrt(mean of x^2 over the channels) x gain, for each position by itself (Zhang & Sennrich 2019). The gain is
    learned, or a linear function of the condition that starts as 1."""

    def __init__(self, dim: int, dim_cond: int | None = None) -> None:
        super().__init__()
        if dim_cond is None:
            self.gain = nn.Parameter(torch.ones(dim))
        else:
            self.to_gain = nn.Linear(dim_cond, dim)
            nn.init.zeros_(self.to_gain.weight)
            nn.init.ones_(self.to_gain.bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(b, c, ...) -> the same shape and dtype; the mean is computed in fp32 or fp64."""
        gain = self.to_gain(context.cond) if hasattr(self, "to_gain") else self.gain
        gain = gain.view(*gain.shape, *[1] * (x.dim() - 2))
        # The view adds the two gradients of y before x gets them. Otherwise a third one, of what else uses x, would be
        # added before, between or after them, depending on whether hooks at this module's border (ZeRO 3) part them.
        y = at_least_fp32(x).view_as(x)
        return (y * (y.square().mean(dim=1, keepdim=True) + _EPSILON).rsqrt() * gain).to(x.dtype)


class SqueezeExcite(nn.Module):
    """Channels of each frame times a gate in (0, 2), computed from an attention-weighted mean over the frame (global
    context, Cao et al. 2020). The gate starts as 1: at the sigmoid's far end it would take far too long to open."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = max(16, dim // 2)
        self.to_weights = nn.Conv3d(dim, 1, 1)
        self.squeeze = nn.Linear(dim, hidden)
        self.excite = nn.Linear(hidden, dim)
        nn.init.zeros_(self.excite.weight)
        nn.init.zeros_(self.excite.bias)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.to_weights(x).flatten(3).softmax(dim=-1).to(x.dtype)
        mean = torch.einsum("bcfn,bfn->bfc", x.flatten(3), weights.squeeze(1))
        gate = 2 * torch.sigmoid(self.excite(F.leaky_relu(self.squeeze(mean), 0.1)))
        return x * gate.transpose(1, 2)[..., None, None]


class ModulatedConv3d(CausalConv3d):
    """A causal convolution whose input channels are scaled by 1 + a linear function of the condition, and whose output
    channels are divided by the norm of their scaled weights (Karras et al. 2020, StyleGAN2, section 2.2), of all time
    slices: so even an image gives all of them a gradient."""

    def __init__(self, fan_in: int, fan_out: int, kernel: tuple[int, int, int], dim_cond: int) -> None:
        super().__init__(fan_in, fan_out, kernel, bias=False)
        self.to_scale = nn.Linear(dim_cond, fan_in)

    def forward(self, x: Tensor, context: Context) -> Tensor:  # type: ignore[override]
        """(b, i, f, h, w) -> (b, o, f, h, w)."""
        scale = 1 + self.to_scale(context.cond)
        squares = scale.square() @ self.weight.square().sum(dim=(2, 3, 4)).T
        out = super().forward(x * scale[..., None, None, None], context)
        return out * squares.clamp_min(_LEAST_SQUARE).rsqrt()[..., None, None, None]


class ResidualUnit(nn.Module):
    """x + gate(1 x 1 convolution(causal convolution(x))).

    Args:
        conv: The causal convolution, from dim to dim.
        gate: Of what is added.
        norm: ``none``: an ELU follows each convolution. ``rms``: an RMSNorm and a SiLU precede each.
    """

    def __init__(self, dim: int, conv: CausalConv3d, gate: nn.Module, norm: str) -> None:
        super().__init__()
        self.conv, self.mix, self.gate = conv, nn.Conv3d(dim, dim, 1), gate
        self.norms = nn.ModuleList(RMSNorm(dim) for _ in range(2 if norm == "rms" else 0))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if not self.norms:
            return x + self.gate(F.elu(self.mix(F.elu(self.conv(x, context)))))
        before, between = self.norms
        y = self.conv(F.silu(before(x, context)), context)
        return x + self.gate(self.mix(F.silu(between(y, context))))
