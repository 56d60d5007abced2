"""Parts that the convolutional tokenizers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from einops import rearrange
from torch import Tensor, nn

from tandem.models.base import Pretrained

Self = TypeVar("Self", bound="Autoencoder")


class Autoencoder(Pretrained):
    """A model with an `encoder`, a `quantizer` and a `decoder`; the decoder can be trained alone."""

    quantizer: Any
    _is_encoder_frozen = False

    def freeze_encoder(self) -> None:
        """Freeze what comes before the decoder: the encoder, and the quantizer with its codebook and its averages. Only
        the weights of `decoder` are trained."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith("decoder."))
        self._is_encoder_frozen = True
        self.train(self.training)

    def train(self: Self, mode: bool = True) -> Self:
        """As in `nn.Module`, but a frozen quantizer stays in eval mode."""
        super().train(mode)
        self.quantizer.train(mode and not self._is_encoder_frozen)
        return self


class ResBlock(nn.Module):
    """A residual block: two halves (made by ``half``) and a 1 x 1 convolution, whose result is added to the input."""

    def __init__(self, channels: int, half: Callable[[int], list[nn.Module]]) -> None:
        super().__init__()
        self.net = nn.Sequential(*half(channels), *half(channels), nn.Conv2d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


def channels_last(x: Tensor) -> Tensor:
    """(b, c, h, w) in the order of memory in which convolutions need the fewest copies; those that follow keep it.

    On a CPU the VQGAN takes 1/1.2 of the time, and its discriminator 1/1.6. Only activations are copied, never weights:
    backends store these in orders of their own, and the order decides how sums are rounded.
    """
    return x.contiguous(memory_format=torch.channels_last)


def leaky_relu() -> nn.LeakyReLU:
    """In place, for use after a convolution or a GroupNorm: neither needs its output for the backward pass, which keeps
    one tensor instead of two."""
    return nn.LeakyReLU(0.1, inplace=True)


def group_norm(channels: int) -> nn.GroupNorm:
    """With as many groups as the greatest common divisor of 16 and the channels."""
    return nn.GroupNorm(math.gcd(16, channels), channels)


_looks_at_values = ContextVar("_looks_at_values", default=True)


@contextmanager
def trusted_values() -> Iterator[None]:
    """Let `check_range` and `check_codes` skip values whose range the caller guarantees: they wait for the device."""
    token = _looks_at_values.set(False)
    try:
        yield
    finally:
        _looks_at_values.reset(token)


# Images may overshoot [0, 1] a little, as resized and reconstructed ones do; those in [-1, 1] or [0, 255] do not fit.
_LEAST, _MOST = -0.5, 1.5


def check_images(images: Tensor, channels: int) -> None:
    """Check the type, the shape (b, channels, height, width) and the range of images. Waits for the device, except in
    `trusted_values`.

    Raises:
        ValueError: one line.
    """
    if images.dim() != 4 or images.shape[1] != channels:
        raise ValueError(f"images of shape {tuple(images.shape)}: give (b, {channels}, height, width)")
    check_range(images)


def check_range(images: Tensor) -> None:
    """Check that images or videos are floating-point numbers, about in [0, 1]. Waits for the device, except in
    `trusted_values`.

    Raises:
        ValueError: one line.
    """
    if not images.is_floating_point():
        raise ValueError(f"images of {images.dtype}: give floating-point numbers in [0, 1], such as images / 255")
    if images.numel() and _looks_at_values.get():
        least, most = (float(value) for value in images.aminmax())
        if not (least >= _LEAST and most <= _MOST):
            raise ValueError(f"images with values from {least:.4g} to {most:.4g}: scale them to [0, 1]")


def check_codes(codes: Tensor, num_codes: int) -> None:
    """Check that codes are whole numbers in [0, num_codes). Waits for the device, except in `trusted_values`.

    Raises:
        ValueError: one line.
    """
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise ValueError(f"codes of {codes.dtype}: give whole numbers")
    if codes.numel() and _looks_at_values.get():
        least, most = (int(value) for value in codes.aminmax())
        if least < 0 or most >= num_codes:
            raise ValueError(f"codes from {least} to {most}: the codebook has those from 0 to {num_codes - 1}")


def as_square(codes: Tensor) -> Tensor:
    """Codes (b, s x s), row by row -> (b, s, s).

    Raises:
        ValueError: the number of codes is not a square.
    """
    side = math.isqrt(codes.shape[1])
    if side * side != codes.shape[1]:
        raise ValueError(f"{codes.shape[1]} codes per image fill no square grid; give s x s of them, row by row")
    return rearrange(codes, "b (h w) -> b h w", h=side)
