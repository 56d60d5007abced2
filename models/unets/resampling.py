"""Halving and doubling the sides of feature maps, and convolutions of several sizes side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .blocks import Block


class UnshuffledConv2d(nn.Conv2d):
    """A 1 x 1 convolution of pixel-unshuffled maps: (b, c, h, w) -> (b, dim_out, h / 2, w / 2), with a weight
    (dim_out, 4 c, 1, 1). Computed as the equal 2 x 2 convolution of stride 2, without the unshuffled copy."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight.reshape(self.out_channels, -1, 2, 2), self.bias, stride=2)


class PixelShuffleUpsample(nn.Module):
    """1 x 1 convolution, SiLU, pixel shuffle: (b, dim, h, w) -> (b, dim_out, 2 h, 2 w). The four pixels start equal
    (Aitken et al. 2017, "Checkerboard artifact free sub-pixel convolution")."""

    def __init__(self, dim: int, dim_out: int) -> None:
        super().__init__()
        conv = nn.Conv2d(dim, 4 * dim_out, 1)
        one_of_four = torch.empty(dim_out, dim, 1, 1)
        nn.init.kaiming_uniform_(one_of_four)
        with torch.no_grad():
            conv.weight.copy_(one_of_four.repeat_interleave(4, dim=0))
            conv.bias.zero_()  # type: ignore[union-attr]
        self.net = nn.Sequential(conv, nn.SiLU(), nn.PixelShuffle(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class CrossEmbed(nn.Module):
    """Convolutions with kernels of several sizes, their outputs concatenated (Wang et al. 2021, "CrossFormer"). The
    smallest kernel has half of the channels, the next a quarter, and so on; the largest has the rest.

    Args:
        stride: 1, with odd kernels, or 2, with even ones.
    """

    def __init__(self, dim: int, dim_out: int, kernel_sizes: Sequence[int], stride: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(dim, width, kernel, stride=stride, padding=(kernel - stride) // 2)
            for kernel, width in zip(sorted(kernel_sizes), widths_of(dim_out, len(kernel_sizes)), strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(b, dim, h, w) -> (b, dim_out, h / stride, w / stride)."""
        return torch.cat([conv(x) for conv in self.convs], dim=1)


class UpsampleCombiner(nn.Module):
    """A block of each level's output, brought to full size, beside the last level's (Qin et al. 2020, "U2-Net").

    Args:
        dims: Channels of each level's output, coarsest first.
        dim_out: Channels of each block's output.
    """

    def __init__(self, dims: Sequence[int], dim_out: int) -> None:
        super().__init__()
        self.fmap_convs = nn.ModuleList(Block(dim, dim_out) for dim in dims)

    def forward(self, x: Tensor, maps: Sequence[Tensor]) -> Tensor:
        """(b, c, h, w) and maps (b, dims[n], h / 2^k, w / 2^k) -> (b, c + len(dims) dim_out, h, w)."""
        blocks = zip(self.fmap_convs, maps, strict=True)
        return torch.cat([x, *(block(enlarged(each, x.shape[-1] // each.shape[-1])) for block, each in blocks)], dim=1)


def downsample(dim: int, dim_out: int, cross_embed_kernel_sizes: Sequence[int] | None) -> nn.Module:
    """(b, dim, h, w) -> (b, dim_out, h / 2, w / 2): pixel unshuffle and a 1 x 1 convolution, or a `CrossEmbed`."""
    if cross_embed_kernel_sizes is not None:
        return CrossEmbed(dim, dim_out, cross_embed_kernel_sizes, stride=2)
    return nn.Sequential(nn.Identity(), UnshuffledConv2d(4 * dim, dim_out, 1))


def upsample(dim: int, dim_out: int, pixel_shuffle: bool) -> nn.Module:
    """(b, dim, h, w) -> (b, dim_out, 2 h, 2 w): by pixel shuffle, or each pixel four times and a 3 x 3 convolution."""
    if pixel_shuffle:
        return PixelShuffleUpsample(dim, dim_out)
    return nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(dim, dim_out, 3, padding=1))


def widths_of(dim: int, parts: int) -> list[int]:
    """``dim`` channels as dim / 2, dim / 4, ..., and the rest."""
    widths = [dim >> part for part in range(1, parts)]
    return [*widths, dim - sum(widths)]


def enlarged(x: Tensor, factor: int) -> Tensor:
    """Maps (b, c, h, w) -> (b, c, factor h, factor w) by Keys' cubic interpolation (1981, a = -1/2) with zeros around
    the map. As products with matrices, because the interpolation of PyTorch has no deterministic gradient on GPUs."""
    if factor == 1:
        return x
    rows, columns = (_cubic_matrix(side, factor, x.device).to(x.dtype) for side in x.shape[-2:])
    return rows @ (x @ columns.T)


def _cubic_matrix(side: int, factor: int, device: torch.device) -> Tensor:
    """fp32 (factor side, side)."""
    centres = (torch.arange(factor * side, device=device) + 0.5) / factor - 0.5
    d = (centres[:, None] - torch.arange(side, device=device)).abs()
    near, far = (1.5 * d - 2.5) * d * d + 1, ((-0.5 * d + 2.5) * d - 4) * d + 2
    return torch.where(d <= 1, near, torch.where(d < 2, far, 0.0))
