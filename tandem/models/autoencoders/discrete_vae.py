"""The discrete VAE of DALL-E (Ramesh et al. 2021, section 2.1), with the weight names of DALLE-pytorch."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.config.models.autoencoders import DiscreteVAEConfig
from tandem.models.base import Pretrained
from tandem.models.layers.convolutional import ResBlock, as_grid, channels_last, check_codes, check_images
from tandem.sides import height_and_width, sides_text


class VAEOutput(NamedTuple):
    """Results of a forward pass."""

    reconstruction: Tensor
    """(b, c, h, w), about [0, 1] and not clamped."""
    recon_loss: Tensor
    """0-d: mean squared error or smooth L1, in normalised space."""
    kl: Tensor
    """0-d: KL(q || uniform) in nats, a mean over batch and positions; in [0, ln num_tokens]."""
    codes: Tensor | None
    """int64 (b, s, s): the most likely codes, if asked for."""


class Codebook(nn.Embedding):
    """The K entries (D,) of a codebook: looked up by code, or averaged with weights.

    Both are calls of this module, because DeepSpeed's ZeRO 3 gathers the weights of a module when the module is called.
    """

    def forward(self, codes: Tensor) -> Tensor:
        """int64 codes (...) in [0, K) or floating weights (..., K) over the codes -> embeddings (..., D)."""
        if codes.is_floating_point():
            return codes.to(self.weight.dtype) @ self.weight
        return super().forward(codes)


class DiscreteVAE(Pretrained):
    """Images to a grid of codes and back; the choice of a code is relaxed by Gumbel-softmax noise while training.

    Inside, values are in [-1, 1]: they are normalised by a mean and a standard deviation of 0.5. Of 4 channels, the
    last, alpha, stays as it is.

    Raises:
        ValueError: an image size that is no power of two or too small, a number of layers or blocks that is out of
            range, or reinmax without straight_through.
    """

    Config = DiscreteVAEConfig
    _mean: Tensor
    _std: Tensor

    cut_before = ("decoder",)  # where torch.compile begins a new graph: `cut_graph` of distributed.engines.replicated

    def __init__(self, config: DiscreteVAEConfig) -> None:
        super().__init__(config)
        image_size, num_tokens, num_layers = config.image_size, config.num_tokens, config.num_layers
        num_resnet_blocks, hidden_dim, codebook_dim = config.num_resnet_blocks, config.hidden_dim, config.codebook_dim
        if num_layers < 1 or num_resnet_blocks < 0:
            numbers = f"num_layers {num_layers} and num_resnet_blocks {num_resnet_blocks}"
            raise ValueError(f"{numbers}: at least 1 layer and 0 blocks")
        for side in height_and_width(image_size):
            _check_side(side, num_layers)
        if config.reinmax and not config.straight_through:
            raise ValueError("reinmax refines the straight-through gradient: set straight_through too")
        self.image_size, self.num_tokens, self.num_codes = image_size, num_tokens, num_tokens
        self.channels = channels = config.channels
        self.straight_through, self.reinmax = config.straight_through, config.reinmax
        self.smooth_l1_loss, self.is_kl_trained = config.smooth_l1_loss, config.kl_loss_weight > 0
        self.grid = [side >> num_layers for side in height_and_width(image_size)]  # rows and columns of codes

        widths = [channels] + [hidden_dim] * num_layers
        encoder: list[nn.Module] = [
            nn.Sequential(nn.Conv2d(fan_in, fan_out, 4, stride=2, padding=1), nn.ReLU())
            for fan_in, fan_out in itertools.pairwise(widths)
        ]
        encoder += [ResBlock(hidden_dim, _half_block) for _ in range(num_resnet_blocks)]
        encoder += [nn.Conv2d(hidden_dim, num_tokens, 1)]

        decoder: list[nn.Module] = [nn.Conv2d(codebook_dim, hidden_dim, 1)] if num_resnet_blocks else []
        decoder += [ResBlock(hidden_dim, _half_block) for _ in range(num_resnet_blocks)]
        widths = [hidden_dim if num_resnet_blocks else codebook_dim] + [hidden_dim] * num_layers
        decoder += [
            nn.Sequential(nn.ConvTranspose2d(fan_in, fan_out, 4, stride=2, padding=1), nn.ReLU())
            for fan_in, fan_out in itertools.pairwise(widths)
        ]
        decoder += [nn.Conv2d(hidden_dim, channels, 1)]

        self.codebook = Codebook(num_tokens, codebook_dim)
        self.encoder, self.decoder = nn.Sequential(*encoder), nn.Sequential(*decoder)
        for name, alpha_value in (("mean", 0.0), ("std", 1.0)):
            values = torch.tensor([0.5, 0.5, 0.5, alpha_value] if channels == 4 else [0.5] * channels)
            self.register_buffer(f"_{name}", values[:, None, None], persistent=False)

    @property
    def codebook_summary(self) -> str:
        """A short description of the codebook."""
        return f"{self.num_codes} codes"

    @property
    def noise_shape(self) -> tuple[int, int, int]:
        """Shape of one sample's Gumbel noise: (num_tokens, rows, columns of the grid)."""
        rows, columns = self.grid
        return self.num_tokens, rows, columns

    def forward(
        self, images: Tensor, *, noise: Tensor | None = None, temperature: float = 1.0, with_codes: bool = False
    ) -> VAEOutput:
        """Images (b, c, h, w) in [0, 1] through soft codes and back.

        Args:
            noise: Standard Gumbel (b, num_tokens, s, s); None for no noise, which makes the pass deterministic.
            temperature: Temperature of the softmax over codes.
            with_codes: Return the codes, too, which costs a pass over the logits.
        """
        target = self._normalize(images)
        logits = self._logits(target).float()  # softmax and losses stay in fp32 under autocast
        code_weights = self._relax(logits, noise, temperature)
        out = self.decoder(rearrange(self.codebook(code_weights), "b h w d -> b d h w")).float()
        recon_loss = F.smooth_l1_loss(out, target) if self.smooth_l1_loss else F.mse_loss(out, target)
        kl = self._kl_from_uniform(logits)
        return VAEOutput(self._denormalize(out), recon_loss, kl, logits.argmax(dim=-1) if with_codes else None)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Images (b, c, height, width) of `image_size` in [0, 1] -> the most likely codes, int64 (b, h', w').

        Raises:
            ValueError: images of another size or type, or far from [0, 1].
        """
        check_images(images, self.channels)
        if images.shape[-2:] != height_and_width(self.image_size):
            actual, expected = "{} x {}".format(*images.shape[-2:]), sides_text(self.image_size)
            raise ValueError(f"images of {actual} pixels: this model was made for {expected}")
        return self._logits(self._normalize(images)).argmax(dim=-1)

    def get_codebook_indices(self, images: Tensor) -> Tensor:
        """As `encode`, row by row: int64 (b, s x s). The name and the shape are those of DALLE-pytorch."""
        return rearrange(self.encode(images), "b h w -> b (h w)")

    def decode(self, codes: Tensor) -> Tensor:
        """Codes (b, s, s), or (b, s x s) row by row, in [0, num_tokens) -> images (b, c, h, w), about [0, 1] and not
        clamped.

        Raises:
            ValueError: codes (b, n) whose n is not a square, or codes beyond the codebook.
        """
        check_codes(codes, self.num_codes)
        grid = as_grid(codes, *self.grid) if codes.dim() == 2 else codes
        embedded = rearrange(self.codebook(grid), "b h w d -> b d h w")
        return self._denormalize(self.decoder(embedded).float())

    def _logits(self, x: Tensor) -> Tensor:
        """Normalised images (b, c, h, w) -> logits over the codes (b, s, s, K)."""
        *layers, to_logits = self.encoder
        x = channels_last(x.to(self._mean.dtype))  # the weights may have been cast to half precision
        for layer in layers:
            x = layer(x)
        # With K = 8192, memory bandwidth limits the softmax and the codebook. Logits whose last axis is contiguous save
        # both a quarter of their time, forward and backward.
        return rearrange(to_logits(channels_last(x)), "b k h w -> b h w k")

    def _relax(self, logits: Tensor, noise: Tensor | None, temperature: float) -> Tensor:
        """Weights (b, s, s, K) over the codes: Gumbel-softmax (Jang et al. 2017), straight-through or ReinMax."""
        noisy = logits if noise is None else logits + rearrange(noise, "b k h w -> b h w k")
        soft = (noisy / temperature).softmax(dim=-1)
        if not self.straight_through:
            return soft
        hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(dim=-1, keepdim=True), 1.0)
        if not self.reinmax:
            return hard + (soft - soft.detach())
        # Liu et al. 2023, "Bridging discrete and backpropagation", algorithm 2.
        pi0 = logits.softmax(dim=-1)
        pi1 = (hard + (logits / temperature).softmax(dim=-1)) / 2
        pi1 = ((pi1.log() - logits).detach() + logits).softmax(dim=-1)
        pi2 = 2 * pi1 - pi0 / 2
        return hard + (pi2 - pi2.detach())

    def _kl_from_uniform(self, logits: Tensor) -> Tensor:
        """Logits (b, s, s, K) -> mean over batch and positions of sum_k q log(q K), q = softmax(logits): the
        KL term of Ramesh et al. 2021, equation 1, with the uniform prior of their first stage."""
        if not self.is_kl_trained:
            logits = logits.detach()  # the KL is only reported, so its gradient needs no memory
        log_q = logits.log_softmax(dim=-1)
        return (log_q.exp() * log_q).sum(dim=-1).mean() + math.log(self.num_tokens)

    def _normalize(self, images: Tensor) -> Tensor:
        return (images - self._mean) / self._std

    def _denormalize(self, images: Tensor) -> Tensor:
        return images * self._std + self._mean


def _half_block(channels: int) -> list[nn.Module]:
    """Half of a residual block: a 3 x 3 convolution and a ReLU."""
    return [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()]


def _check_side(image_size: int, num_layers: int) -> None:
    if num_layers > 40:
        raise ValueError(f"num_layers {num_layers}: no image can be halved so often; use a small number such as 3")
    smallest = 2**num_layers
    if image_size < smallest or image_size & (image_size - 1):
        smaller = 1 << max(image_size, 1).bit_length() - 1
        hint = f"use {smaller} or {2 * smaller}" if smaller >= smallest else f"use {smallest}"
        rule = f"must be a power of two and at least 2^num_layers = {smallest}"
        raise ValueError(f"image_size {image_size} {rule}; {hint}")
