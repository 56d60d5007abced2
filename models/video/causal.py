"""Causal convolutions and resampling of videos (b, c, f, h, w), for whole clips and for streams.

Every layer is called as ``layer(x, context)``. A clip is given at once, or as chunks in order; then the context carries
what a layer has to remember of earlier chunks, and the results are those of the whole clip.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv3d_weight

PAD_MODES = {"constant": "zeros", "reflect": "reflect", "replicate": "replicate"}  # our name: nn.Conv3d's


class Context(NamedTuple):
    """What a layer is given beside its input. A tuple, because DeepSpeed's hooks look for tensors only in tuples, lists
    and dicts."""

    cond: Tensor | None = None
    """(b, d), the condition."""
    latents: Tensor | None = None
    """(b, d, f', h', w'), the quantized latents from which the decoder reconstructs this chunk."""
    is_start: bool = True
    """Whether the first frame of the input is the first one of the clip."""
    kept: dict[str, Tensor] | None = None
    """What layers keep for the next chunk, by name; None if there is none."""

    def past(self, name: str) -> Tensor | None:
        """What a layer kept of the chunk before, None at the start."""
        if self.is_start:
            return None
        assert self.kept is not None
        return self.kept[name]

    def keep(self, name: str, x: Tensor) -> None:
        """Keep x for the next chunk, if there is one: a copy, because a view holds the memory of the whole."""
        if self.kept is not None:
            self.kept[name] = x.clone()


class CausalConv3d(nn.Conv3d):
    """A convolution whose output at frame stride x j depends on no frame after it: k - 1 frames of zeros come before
    the clip, so that 1 + stride x n frames become 1 + n (Yu et al. 2024, section 3.2).

    For one frame, an image, only the kernel's last time slice meets anything but zeros. It alone is used, and the other
    slices have a gradient of exactly 0.

    Args:
        kernel: (frames, height, width), odd in space.
        stride: In the same order.
        pad_mode: Padding in space: ``constant`` (zeros), ``reflect`` or ``replicate``. Padding in time is always zeros:
            a mirror would show frames of the future.
    """

    stream_name = ""

    def __init__(
        self, fan_in: int, fan_out: int, kernel: tuple[int, int, int], *,
        stride: tuple[int, int, int] = (1, 1, 1), pad_mode: str = "constant", bias: bool = True,
    ) -> None:  # fmt: skip
        padding = (0, kernel[1] // 2, kernel[2] // 2)
        mode: Any = PAD_MODES[pad_mode]
        super().__init__(fan_in, fan_out, kernel, stride, padding, bias=bias, padding_mode=mode)

    def forward(self, x: Tensor, context: Context) -> Tensor:  # type: ignore[override]
        """(b, i, f, h, w) -> (b, o, f', h', w')."""
        past = context.past(self.stream_name) if self._frames_kept else None
        padded = self._pad_time(x) if past is None else torch.cat([past, x], dim=2)
        if self._frames_kept:
            context.keep(self.stream_name, padded[:, :, -self._frames_kept :])
        if context.is_start and x.shape[2] == 1:
            return self._conv_forward(x, self.weight[:, :, -1:], self.bias)
        return self._conv_forward(padded, self.weight, self.bias)

    def weight_gradient(self, x: Tensor, output_gradient: Tensor) -> Tensor:
        """Gradient of a loss with respect to the weight, (o, i, *kernel) in fp32, from a whole clip (b, i, f, h, w) and
        the loss's gradient (b, o, f, h, w) with respect to the output. For stride 1. Needs no weights."""
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            _, height, width = self.kernel_size
            space = (width // 2, width // 2, height // 2, height // 2, 0, 0)
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            padded = F.pad(self._pad_time(x.float()), space, mode=mode)
            shape = (self.out_channels, self.in_channels, *self.kernel_size)
            return conv3d_weight(padded, shape, output_gradient.float())

    @property
    def _frames_kept(self) -> int:
        return self.kernel_size[0] - self.stride[0]

    def _pad_time(self, x: Tensor) -> Tensor:
        frames = self.kernel_size[0] - 1
        return F.pad(x, (0, 0, 0, 0, frames, 0)) if frames else x


class SpaceUp(nn.Module):
    """Doubles height and width: 1 x 1 convolution to four times the channels, SiLU, pixel shuffle. At the start all
    four pixels are equal."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.expand = _equal_parts(fan_in, fan_out, 4)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(b, i, f, h, w) -> (b, o, f, 2 h, 2 w)."""
        return rearrange(F.silu(self.expand(x)), "b (c p q) f h w -> b c f (h p) (w q)", p=2, q=2)


class TimeUp(nn.Module):
    """1 + n frames -> 1 + 2 n: 1 x 1 convolution to twice the channels, SiLU, shuffle, and the first of the 2 + 2 n
    frames is dropped. At the start, frame f is made from frame ceil(f / 2) of the input."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.expand = _equal_parts(fan_in, fan_out, 2)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(b, i, 1 + n, h, w) -> (b, o, 1 + 2 n, h, w); a chunk that is not the first: n frames -> 2 n."""
        frames = rearrange(F.silu(self.expand(x)), "b (c p) f h w -> b c (f p) h w", p=2)
        return frames[:, :, 1:] if context.is_start else frames

    def repeat_frames(self) -> None:
        """Make both frames that a frame becomes equal to the second, which alone is trained on images."""
        for part in self.expand.parameters():
            first, second = part.data.view(-1, 2, *part.shape[1:]).unbind(1)
            first.copy_(second)


def _equal_parts(fan_in: int, fan_out: int, parts: int) -> nn.Conv3d:
    """A 1 x 1 convolution to ``parts`` times fan_out channels, in which the parts of a channel start equal."""
    conv = nn.Conv3d(fan_in, parts * fan_out, 1)
    first = torch.empty(fan_out, *conv.weight.shape[1:])
    nn.init.kaiming_uniform_(first)
    with torch.no_grad():
        conv.weight.copy_(first.repeat_interleave(parts, dim=0))
    nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
    return conv
