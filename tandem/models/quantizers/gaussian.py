"""Continuous latents with the interface of a quantizer: a diagonal Gaussian (Kingma & Welling 2014), as in the
autoencoders of Rombach et al. 2022."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.config.models.autoencoders import VQGANConfig
from tandem.devices import sum_dtype

from .base import Bottleneck, Quantized

_DECAY = 0.99  # per update, of the averages that give the scale of the latents
_MIN_DEVIATION = 1e-6  # of a channel that says nothing, whose rounding errors must not become its values
_MIN_LOG_VARIANCE, _MAX_LOG_VARIANCE = -30.0, 20.0  # as in latent diffusion


def compute_scale(latent_stats: Tensor) -> tuple[float, float] | None:
    """(scaling_factor, shift_factor), 1 / standard deviation and mean of all numbers of the latents, from
    `DiagonalGaussian.latent_stats`; None if nothing was measured, or if the latents were not finite."""
    statistics = _mean_and_deviation(*latent_stats.tolist())
    return statistics and (1 / max(statistics[1], 1e-12), statistics[0])


def compute_channel_statistics(channel_stats: Tensor) -> tuple[list[float], list[float]] | None:
    """Mean and standard deviation of each channel of the latents, d numbers each, from
    `DiagonalGaussian.channel_stats`; None as for `compute_scale`. With patches, of each channel of a patch."""
    channels = [_mean_and_deviation(*stats) for stats in channel_stats.T.tolist()]
    measured = [channel for channel in channels if channel is not None]
    if len(measured) < len(channels):
        return None
    return [mean for mean, _ in measured], [max(deviation, _MIN_DEVIATION) for _, deviation in measured]


def came_with_weights(channel_stats: Tensor) -> bool:
    """Whether the statistics of `DiagonalGaussian.channel_stats` began as those of published weights: they then have
    the weight 1, which training keeps. A measured one stays below 1 - 2^-19, where fp32 rounds updates to nothing."""
    return bool((channel_stats[0] == 1).all())


def _mean_and_deviation(weight: float, mean: float, mean_square: float) -> tuple[float, float] | None:
    if not weight or not math.isfinite(mean + mean_square):
        return None
    return mean / weight, math.sqrt(max(mean_square / weight - (mean / weight) ** 2, 0.0))


class DiagonalGaussian(Bottleneck):
    """Latents z ~ N(mean, variance), channel by channel; z (b, 2 dim, ...) holds means, then log variances.

    Loss: ``kl`` is KL(N(mean, variance) || N(0, 1)) in nats per latent: summed over the channels, a mean over batch and
    positions. In training it keeps moving averages of the mean and the mean square, over the whole batch of each
    update, of the latents that the decoder gets, for each channel and for all together. From them, `compute_scale` and
    `compute_channel_statistics` compute what a generator's latents are normalised by.
    """

    loss_names: ClassVar[tuple[str, ...]] = ("kl",)
    keeps_fp32 = True
    latent_stats: Tensor
    """fp32 (3,): moving averages, which start at 0, of the number 1, of the latents and of their squares. The first is
    the total weight of the updates so far; `compute_scale` divides the other two by it."""
    channel_stats: Tensor
    """fp32 (3, dim patch^2): the same of each channel or, with a patch above 1, of each channel and place of patches
    of that side. Earlier versions had `latent_stats` alone, so the weights may differ."""

    def __init__(self, config: VQGANConfig) -> None:
        super().__init__(0, config.latent_dim)
        self.in_dim = 2 * self.dim
        self.patch = getattr(config, "latent_patch", 1)  # a video tokenizer has none
        self.register_buffer("latent_stats", torch.zeros(3))
        self.register_buffer("channel_stats", torch.zeros(3, self.dim * self.patch**2))
        self._sums: list[Tensor] = []

    def summary(self) -> str:
        return f"continuous latents of {self.dim} channels"

    def gaussian(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """z (b, 2 dim, ...) -> mean and log variance, fp32 (b, dim, ...) each."""
        mean, log_variance = z.float().chunk(2, dim=1)
        return mean, log_variance.clamp(_MIN_LOG_VARIANCE, _MAX_LOG_VARIANCE)

    def forward(self, z: Tensor, noise: Tensor | None = None) -> Quantized:
        """z (b, 2 dim, ...) -> latents fp32 (b, dim, ...), which are samples with standard normal noise of their shape,
        and means without it. There are no codes: they are an empty tensor."""
        with torch.autocast(z.device.type, enabled=False):
            mean, log_variance = self.gaussian(z)
            kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
            latents = mean if noise is None else mean + (0.5 * log_variance).exp() * noise
            if self.is_learning:
                patches = F.pixel_unshuffle(latents.detach(), self.patch) if self.patch > 1 else latents.detach()
                wide = patches.to(sum_dtype(latents.device)).transpose(0, 1).flatten(1)
                counts = wide.new_full(wide.shape[:1], wide.shape[1])
                self._sums.append(torch.stack([counts, wide.sum(1), wide.square().sum(1)]))
            return Quantized(latents, torch.empty(0, dtype=torch.int64, device=z.device), {"kl": kl})

    @torch.no_grad()
    def codes(self, z: Tensor) -> Tensor:
        """z (b, 2 dim, ...) -> the means, fp32 (b, dim, ...)."""
        return self.gaussian(z)[0]

    def decode_codes(self, codes: Tensor) -> Tensor:
        return codes

    @torch.no_grad()
    def after_step(self, step: int, seed: int, skipped: Tensor | None = None) -> None:
        if not self.training:
            return
        channels = self.all_reduce(torch.stack(self._sums).sum(0))
        self._sums = []
        for stats, total in ((self.latent_stats, channels.sum(1)), (self.channel_stats, channels)):
            averages = stats.lerp((total / total[0]).float(), 1 - _DECAY)
            stats.copy_(averages if skipped is None else torch.where(skipped, stats, averages))
