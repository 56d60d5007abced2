"""Causal convolutions, resampling and residual units of videos (b, c, f, h, w), for whole clips and for streams.

Layers that see other frames are called as ``layer(x, context)``, with a whole clip or with its chunks in order. For
chunks, the context holds the frames of earlier chunks that a layer needs, and the outputs equal those of the whole
clip.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv3d_weight

from tandem.models.layers.attention import at_least_fp32
from tandem.models.layers.convolutional import replicate_filters

_EPSILON = 1e-6  # added to a mean square


class Context(NamedTuple):
    """The second input of a layer. A tuple, because DeepSpeed's hooks look for tensors only in tuples, lists and
    dicts."""

    latents: Tensor | None = None
    """(b, d, f', h', w'), the quantized latents from which the decoder reconstructs this chunk."""
    is_start: bool = True
    """Whether the first frame of the input is the first one of the clip."""
    cache: dict[str, Tensor] | None = None
    """Tensors that layers keep for the next chunk, by the layer's name; None if there is no next chunk."""

    def past(self, name: str) -> Tensor | None:
        """The tensor that a layer stored at the previous chunk; None at the start."""
        if self.is_start:
            return None
        assert self.cache is not None
        return self.cache[name]

    def store(self, name: str, x: Tensor) -> None:
        """Store x for the next chunk, if there is one: a copy, because a view would hold the memory of its base."""
        if self.cache is not None:
            self.cache[name] = x.clone()


@dataclass
class StreamState:
    """The state of a stream of frames or codes between two calls, empty at the start. It holds tensors and numbers: it
    can be pickled and continued on another machine, and one model can serve several streams in turn.

    Its size does not grow with the number of frames, except that layers that attend to all earlier frames keep their
    keys and values.
    """

    cache: dict[str, Tensor] = field(default_factory=dict)
    """The tensor that each layer keeps for the next chunk, by the layer's name."""
    pending: Tensor | None = None
    """(b, c, f, h, w), frames of a chunk that is not complete yet."""
    num_consumed: int = 0
    """Number of frames in the chunks so far."""

    def move_to(self, device: torch.device) -> None:
        """Move all tensors to a device."""
        self.cache = {name: x.to(device) for name, x in self.cache.items()}
        self.pending = None if self.pending is None else self.pending.to(device)

    def chunks(self, x: Tensor, frames: int) -> Iterator[tuple[Tensor, Context]]:
        """(b, c, f, h, w) -> every chunk that is complete: the first has one frame, all others have ``frames``.

        Raises:
            ValueError: the batch, height or width differs from that of the frames before.
        """
        if self.pending is not None:
            if (old := _frame_shape(self.pending)) != (new := _frame_shape(x)):
                raise ValueError(f"a stream of frames {old} (b, c, h, w) cannot go on with frames {new}")
            x = torch.cat([self.pending, x], dim=2)
        while x.shape[2] >= (length := frames if self.num_consumed else 1):
            context = Context(is_start=self.num_consumed == 0, cache=self.cache)
            self.num_consumed += length
            chunk, x = x[:, :, :length].contiguous(), x[:, :, length:]
            yield chunk, context
        self.pending = x.clone()  # not a view, which would hold the memory of all frames


def _frame_shape(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:2], *x.shape[3:])


class CausalConv3d(nn.Conv3d):
    """A convolution whose output frame j depends on no input frame after number stride x j, both counted from 0: k - 1
    frames of zeros come before the clip, so that 1 + stride x n frames become 1 + n (Yu et al. 2024, section 3.2).

    For an image, one frame, all time slices of the kernel but the last would meet zeros. The last slice alone is used,
    and the others have a gradient of exactly 0.

    Args:
        kernel: (frames, height, width), odd in space.
        stride: In the same order.
        pad_mode: Padding in space: ``constant`` (zeros), ``reflect`` or ``replicate``. Padding in time is always zeros:
            a mirror would show frames of the future.
    """

    cache_key = ""

    def __init__(
        self, fan_in: int, fan_out: int, kernel: tuple[int, int, int], *,
        stride: tuple[int, int, int] = (1, 1, 1), pad_mode: str = "constant",
    ) -> None:  # fmt: skip
        padding = (0, kernel[1] // 2, kernel[2] // 2)
        mode: Any = "zeros" if pad_mode == "constant" else pad_mode
        super().__init__(fan_in, fan_out, kernel, stride, padding, padding_mode=mode)
        self._num_past_frames = kernel[0] - stride[0]

    def forward(self, x: Tensor, context: Context) -> Tensor:  # type: ignore[override]
        """(b, i, f, h, w) -> (b, o, f', h', w')."""
        past = context.past(self.cache_key) if self._num_past_frames else None
        padded = self._pad_time(x) if past is None else torch.cat([past, x], dim=2)
        if self._num_past_frames:
            context.store(self.cache_key, padded[:, :, -self._num_past_frames :])
        if context.is_start and x.shape[2] == 1:
            return self._conv_forward(x, self.weight[:, :, -1:], self.bias)
        return self._conv_forward(padded, self.weight, self.bias)

    def weight_gradient(self, x: Tensor, output_gradient: Tensor) -> Tensor:
        """Gradient of a loss with respect to the weight, (o, i, *kernel) in fp32, from a whole clip (b, i, f, h, w) and
        the loss's gradient (b, o, f, h, w) with respect to the output. For stride 1. Needs no weights."""
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            padded = self._pad_space(self._pad_time(x.float()))
            shape = (self.out_channels, self.in_channels, *self.kernel_size)
            return conv3d_weight(padded, shape, output_gradient.float())

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.padding_mode == "zeros":  # the convolution pads
            return super()._conv_forward(input, weight, bias)
        return F.conv3d(self._pad_space(input), weight, bias, self.stride)

    def _pad_space(self, x: Tensor) -> Tensor:
        _, height, width = self.kernel_size
        return pad_space(x, height // 2, width // 2, self.padding_mode)

    def _pad_time(self, x: Tensor) -> Tensor:
        frames = self.kernel_size[0] - 1
        return F.pad(x, (0, 0, 0, 0, frames, 0)) if frames else x


def pad_space(x: Tensor, height: int, width: int, mode: str) -> Tensor:
    """(b, c, f, h, w) -> (b, c, f, h + 2 height, w + 2 width), as `F.pad` with the mode "zeros" (its "constant"),
    "reflect" or "replicate". `F.pad` has no deterministic backward pass for the last two on a GPU."""
    if mode == "zeros":
        return F.pad(x, (width, width, height, height))
    for dim, count in ((3, height), (4, width)):
        length = x.shape[dim]
        if mode == "reflect":
            before, after = x.narrow(dim, 1, count).flip(dim), x.narrow(dim, length - 1 - count, count).flip(dim)
        else:
            shape = [count if axis == dim else -1 for axis in range(x.ndim)]
            before, after = (x.narrow(dim, index, 1).expand(shape) for index in (0, length - 1))
        x = torch.cat([before, x, after], dim)
    return x


class SpaceUp(nn.Module):
    """Doubles height and width: 1 x 1 convolution to four times the channels, SiLU, pixel shuffle. At the start of
    training all four pixels are equal; see `replicate_filters`."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.expand = replicate_filters(nn.Conv3d(fan_in, 4 * fan_out, 1), 4)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(b, i, f, h, w) -> (b, o, f, 2 h, 2 w)."""
        return rearrange(F.silu(self.expand(x)), "b (c p q) f h w -> b c f (h p) (w q)", p=2, q=2)


class TimeUp(nn.Module):
    """1 + n frames -> 1 + 2 n: 1 x 1 convolution to twice the channels, SiLU, shuffle, and the first of the 2 + 2 n
    frames is dropped. So frame f is made from frame ceil(f / 2) of the input. At the start of training, the two frames
    that are made from one are equal; see `replicate_filters`."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.expand = replicate_filters(nn.Conv3d(fan_in, 2 * fan_out, 1), 2)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(b, i, 1 + n, h, w) -> (b, o, 1 + 2 n, h, w); a chunk that is not the first: n frames -> 2 n."""
        frames = rearrange(F.silu(self.expand(x)), "b (c p) f h w -> b c (f p) h w", p=2)
        return frames[:, :, 1:] if context.is_start else frames

    def repeat_frames(self) -> None:
        """Copy the weights of the second of the two new frames to the first: images train only the second."""
        for parameter in self.expand.parameters():
            first, second = parameter.data.view(-1, 2, *parameter.shape[1:]).unbind(1)
            first.copy_(second)


class RMSNorm(nn.Module):
    """x / sqrt(mean of x^2 over the channels) x gain, for each position by itself (Zhang & Sennrich 2019). The gain is
    learned."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """(b, c, ...) -> the same shape and dtype; the mean is computed in fp32 or fp64."""
        gain = self.gain.view(-1, *[1] * (x.dim() - 2))
        # At the view the two gradients of y are summed before they reach x. Without it, a third one, of another use of
        # x, would be added before, between or after them, depending on the hooks of this module (ZeRO 3).
        y = at_least_fp32(x).view_as(x)
        return (y * (y.square().mean(dim=1, keepdim=True) + _EPSILON).rsqrt() * gain).to(x.dtype)


class SqueezeExcite(nn.Module):
    """Channels of each frame times a gate in (0, 2) (Hu et al. 2018, "Squeeze-and-excitation networks"), computed from
    an attention-weighted mean over the frame (Cao et al. 2020, "Global context networks"). The gate is twice a sigmoid,
    so that it starts as 1: a plain one could start there only saturated, with almost no gradient."""

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


class ResidualUnit(nn.Module):
    """x + gate(1 x 1 convolution(causal convolution(x))).

    Args:
        kernel: Of the causal convolution: (frames, height, width).
        norm: ``none``: an ELU follows each convolution. ``rms``: an RMSNorm and a SiLU precede each.
    """

    def __init__(self, dim: int, kernel: tuple[int, int, int], norm: str) -> None:
        super().__init__()
        conv, gate = CausalConv3d(dim, dim, kernel), SqueezeExcite(dim)
        self.conv, self.mix, self.gate = conv, nn.Conv3d(dim, dim, 1), gate
        self.norms = nn.ModuleList(RMSNorm(dim) for _ in range(2 if norm == "rms" else 0))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if not self.norms:
            return x + self.gate(F.elu(self.mix(F.elu(self.conv(x, context)))))
        before, between = self.norms
        y = self.conv(F.silu(before(x)), context)
        return x + self.gate(self.mix(F.silu(between(y))))
