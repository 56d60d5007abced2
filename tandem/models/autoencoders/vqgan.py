"""VQGAN (Esser et al. 2021) with the convolutional body of Muse's public trainer or that of taming-transformers, and a
choice of quantizers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from tandem.config.fields import check_whole
from tandem.config.models.autoencoders import VQGANConfig, check_choices
from tandem.config.models.taming import TAMING, check_scale
from tandem.models.layers.convolutional import (
    ResBlock,
    as_grid,
    channels_last,
    check_codes,
    check_images,
    check_multiple,
    group_norm,
    leaky_relu,
    mix_noise,
)
from tandem.models.layers.recompute import recompute_in_backward
from tandem.models.quantizers import make_quantizer
from tandem.sides import height_and_width
from tandem.transforms import Transform

from .base import Autoencoder
from .taming import count_halvings, make_body

Self = TypeVar("Self", bound="VQGAN")


class VQGANOutput(NamedTuple):
    """Results of a forward pass."""

    reconstruction: Tensor
    """fp32 (b, c, h, w), about [0, 1] and not clamped."""
    codes: Tensor
    """int64 (b, h / 2^n, w / 2^n) in [0, num_codes); empty if latents are continuous."""
    losses: dict[str, Tensor]
    """Losses of the quantizer by name, 0-d and unweighted."""
    features: Tensor
    """(b, dim, h, w): input of the decoder's last layer, detached; for `VQGAN.last_layer_gradient`."""
    latents: Tensor
    """fp32 (b, d, h / 2^n, w / 2^n), with a gradient: the continuous latents that the decoder gets, before noise; of a
    model with codes, the encoder's output before quantization."""
    transformed: Tensor | None = None
    """What the decoder makes of transformed latents, fp32 (b, c, h', w'); None without a `transform`."""


class VQGAN(Autoencoder):
    """Images to a grid of codes and back. Fully convolutional: any height and width that 2^num_layers divides.

    Gradient checkpointing computes each layer of encoder and decoder again in the backward pass of training instead of
    keeping its activations: less memory, the same bits, a third more time.

    With `normalize_input`, images are mapped from [0, 1] to [-1, 1] before the first layer and back after the last, so
    that an output of 0, and the padding of a convolution, are grey and not black. Without it, the first and the last
    layer start from weights that compute the same, except at the padding.

    Raises:
        ValueError: image_size is no multiple of 2^num_layers, or the quantizer cannot have the codebook size.
    """

    Config = VQGANConfig
    cut_before = ("quantizer",)  # where torch.compile begins a new graph: `cut_graph` of distributed.engines.replicated

    def __init__(self, config: VQGANConfig) -> None:
        super().__init__(config)
        check_choices(config)
        check_scale(config)
        dim, channels = config.dim, config.channels
        num_layers = count_halvings(config.ch_mult) if config.body == TAMING else config.num_layers
        if not 1 <= num_layers <= 40:
            raise ValueError(f"num_layers {num_layers}: give 1 to 40 halvings of the image")
        check_whole("latent_patch", config.latent_patch)
        multiple, patch = 2**num_layers * config.latent_patch, " x latent_patch" * (config.latent_patch > 1)
        for side in height_and_width(config.image_size):
            check_multiple("image_size", side, multiple, f"2^num_layers{patch} = {multiple}")
        self._arguments["num_layers"] = num_layers
        self.image_size, self.channels, self.num_layers = config.image_size, channels, num_layers
        self.recompute, self.normalize_input = config.gradient_checkpointing, config.normalize_input
        if config.body == TAMING:
            self.encoder, self.quantizer, self.decoder = make_body(config)
            return
        self._arguments["num_resnet_blocks"] = blocks = _blocks_per_level(config.num_resnet_blocks, num_layers)
        widths = [dim] + [dim * 2**level for level in range(num_layers)]

        encoder: list[nn.Module] = [nn.Conv2d(channels, dim, 5, padding=2)]
        decoder: list[nn.Module] = [nn.Conv2d(dim, channels, 1)]  # in reverse order
        for (fan_in, fan_out), count in zip(itertools.pairwise(widths), blocks, strict=True):
            down = nn.Conv2d(fan_in, fan_out, 4, stride=2, padding=1)
            encoder += [nn.Sequential(down, leaky_relu())]
            encoder += [ResBlock(fan_out, _leaky_half) for _ in range(count)]
            up = nn.ConvTranspose2d(fan_out, fan_in, 4, stride=2, padding=1)
            decoder += [nn.Sequential(up, leaky_relu())]
            decoder += [ResBlock(fan_out, _gated_half) for _ in range(count)]
        self.quantizer = make_quantizer(config)
        self.encoder = nn.Sequential(*encoder, nn.Conv2d(widths[-1], self.quantizer.in_dim, 1))
        self.decoder = nn.Sequential(nn.Conv2d(self.quantizer.dim, widths[-1], 1), *reversed(decoder))
        if not self.normalize_input:
            self._init_as_normalized()

    @property
    def last_layer(self) -> nn.Conv2d:
        """The decoder's last convolution, 1 x 1, or 3 x 3 of taming's body."""
        layer = self.decoder[-1]
        assert isinstance(layer, nn.Conv2d)
        return layer

    def forward(
        self, images: Tensor, noise: Tensor | None = None, *, latent_noise: Tensor | None = None,
        noise_levels: Tensor | None = None, transform: Transform | None = None,
        change_latent_gradient: Callable[[Tensor], Tensor] | None = None, accumulate_stats: bool = False,
    ) -> VQGANOutput | None:  # fmt: skip
        """Images (b, c, h, w) in [0, 1] through their codes, or latents, and back.

        Args:
            noise: Standard normal (b, *latent_shape), from which latents are sampled; with None they are means.
            latent_noise: (b, *latent_shape). With noise levels t, the decoder gets (1 - t) z + t latent_noise in the
                place of the latents, or the entries of codes, z.
            noise_levels: (b,) in [0, 1].
            transform: Of the latents, for `VQGANOutput.transformed`.
            change_latent_gradient: For the gradient of `VQGANOutput.latents`, as `torch.Tensor.register_hook` takes it.
            accumulate_stats: Only add the images to the quantizer's statistics over several micro-batches
                (``quantizer.accumulate_stats``), and return None.
        """
        z = self._encode(images)
        if accumulate_stats:
            self.quantizer.accumulate_stats(z)
            return None
        quantized, codes, losses = self.quantizer(z) if noise is None else self.quantizer(z, noise)
        latents, transformed = z if self.num_codes else quantized, None
        if change_latent_gradient is not None and latents.requires_grad:
            latents.register_hook(change_latent_gradient)
        if transform is not None:
            transformed, _ = self._decode(self.quantizer.requantize(transform(latents)))
        reconstruction, features = self._decode(mix_noise(quantized, latent_noise, noise_levels))
        return VQGANOutput(reconstruction, codes, losses, features.detach(), latents.float(), transformed)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Images (b, c, h, w) in [0, 1] -> codes, int64 (b, h / 2^n, w / 2^n), or the means of continuous latents, fp32
        (b, d, h / 2^n, w / 2^n), neither shifted nor scaled.

        Raises:
            ValueError: a height or width that 2^num_layers does not divide; integers, or values far from [0, 1].
        """
        check_images(images, self.channels)
        return self.quantizer.codes(self._encode(images))

    @torch.no_grad()
    def posterior(self, images: Tensor) -> Tensor:
        """Images as for `encode` -> the means of their continuous latents, then the standard deviations, concatenated
        along the channels: fp32 (b, 2 d, h / 2^n, w / 2^n), neither shifted nor scaled. Raises what `encode` raises."""
        check_images(images, self.channels)
        return self._moments(self._encode(images))

    def decode(self, codes: Tensor) -> Tensor:
        """Codes (b, h', w'), or codes (b, n) of images of the trained size or squares, row by row, or latents
        (b, d, h', w') -> images fp32 (b, c, h, w), about [0, 1] and not clamped.

        Raises:
            ValueError: codes (b, n) whose n is not a square, codes beyond the codebook, or latents of another shape.
        """
        if self.num_codes:
            check_codes(codes, self.num_codes)
            _, *grid = self.latent_shape(*height_and_width(self.image_size))
            codes = as_grid(codes, *grid) if codes.dim() == 2 else codes
        elif codes.dim() != 4 or codes.shape[1] != self.quantizer.dim:
            raise ValueError(f"latents of shape {tuple(codes.shape)}: give (b, {self.quantizer.dim}, h', w')")
        return self._decode(self.quantizer.decode_codes(codes))[0]

    def last_layer_gradient(self, features: Tensor, image_gradient: Tensor) -> Tensor:
        """Gradient of a loss with respect to the weight of the decoder's last layer, without a backward pass through
        the network. Uses only the shape of the weight, whose values may be sharded over processes.

        Args:
            features: Those of `VQGANOutput`.
            image_gradient: The loss's gradient with respect to the reconstruction, of its shape.

        Returns:
            The gradient, (c, dim, 1, 1) or (c, dim, 3, 3) fp32, detached, a sum over the images like autograd's.
        """
        with torch.no_grad(), torch.autocast(features.device.type, enabled=False):
            gradient = image_gradient.float() / (2 if self.normalize_input else 1)
            side = self.last_layer.kernel_size[0]
            shape = (self.channels, features.shape[1], side, side)
            return conv2d_weight(features.float(), shape, gradient, padding=side // 2)

    @torch.no_grad()
    def _init_as_normalized(self) -> None:
        """Change the first and the last layer so that images in [0, 1] give what images in [-1, 1] gave before."""
        first, last = self.encoder[0], self.last_layer
        assert isinstance(first, nn.Conv2d) and first.bias is not None and last.bias is not None
        first.bias -= first.weight.sum(dim=(1, 2, 3))
        first.weight *= 2
        last.bias.add_(1).div_(2)
        last.weight /= 2

    @classmethod
    def from_weights(cls: type[Self], source: Path, config: Mapping[str, Any], *arguments: Any, **options: Any) -> Self:
        # A folder without this argument holds a model whose input is not normalized.
        return super().from_weights(source, {"normalize_input": False, **config}, *arguments, **options)

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """(d, h', w') of the latents, or of the entries of the codes, of images of these sides."""
        return (int(self.quantizer.dim), height >> self.num_layers, width >> self.num_layers)

    def _encode(self, images: Tensor) -> Tensor:
        for name, side in zip(("height", "width"), images.shape[-2:], strict=True):
            check_multiple(name, side, 2**self.num_layers, f"2^num_layers = {2**self.num_layers}")
        inputs = 2 * images - 1 if self.normalize_input else images
        return self._apply_layers(self.encoder, channels_last(inputs.to(self.last_layer.weight.dtype)))

    def _decode(self, quantized: Tensor) -> tuple[Tensor, Tensor]:
        """Quantized (b, d, h', w') -> images fp32, and the input of the last layer."""
        *layers, last = self.decoder
        features = self._apply_layers(layers, channels_last(quantized.to(self.last_layer.weight.dtype)))
        outputs = last(features).float()
        return (outputs + 1) / 2 if self.normalize_input else outputs, features

    def _apply_layers(self, layers: Iterable[nn.Module], x: Tensor) -> Tensor:
        for layer in layers:
            is_convolution = isinstance(layer, nn.Conv2d)  # has no activations but its input
            x = recompute_in_backward(layer, x, when=self.recompute and self.training and not is_convolution)
        return x


def _leaky_half(channels: int) -> list[nn.Module]:
    """Half a block of the encoder: 3 x 3 convolution, GroupNorm, LeakyReLU."""
    return [nn.Conv2d(channels, channels, 3, padding=1), group_norm(channels), leaky_relu()]


def _gated_half(channels: int) -> list[nn.Module]:
    """Half a block of the decoder: 3 x 3 convolution to twice the width, GLU (Dauphin et al. 2017), GroupNorm."""
    return [nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.GLU(dim=1), group_norm(channels)]


def _blocks_per_level(num_resnet_blocks: Sequence[int], num_layers: int) -> list[int]:
    """Number of residual blocks of each level, finest first; one number is for the coarsest level alone."""
    blocks = list(num_resnet_blocks)
    if len(blocks) == 1:
        blocks = [0] * (num_layers - 1) + blocks
    if len(blocks) != num_layers or min(blocks) < 0:
        rule = f"must be one number, 0 or more, or {num_layers} of them: one per level, finest first"
        raise ValueError(f"num_resnet_blocks {list(num_resnet_blocks)} {rule}")
    return blocks
