"""What autoencoders of images and of videos share: an encoder, a quantizer and a decoder, and the statistics of
continuous latents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tandem.config.models.taming import SCALE_IS_MEASURED, without_measured_scale
from tandem.models.base import Pretrained
from tandem.models.quantizers.gaussian import came_with_weights, compute_channel_statistics, compute_scale

Self = TypeVar("Self", bound="Autoencoder")


class Autoencoder(Pretrained):
    """A model with an `encoder`, a `quantizer` and a `decoder`; the decoder can be trained alone. Latents are codes, or
    continuous, with a scale and statistics that are given or measured in training."""

    quantizer: Any
    _is_encoder_frozen = False

    @classmethod
    def from_weights(cls: type[Self], source: Path, config: Mapping[str, Any], *arguments: Any, **options: Any) -> Self:
        return super().from_weights(source, without_measured_scale(config), *arguments, **options)

    @property
    def num_codes(self) -> int:
        """Number of codes; with FSQ it may differ a little from codebook_size. 0: latents are continuous."""
        return int(self.quantizer.num_codes)

    @property
    def latent_kind(self) -> str:
        """What `encode` gives: "codes" or continuous "latents"."""
        return "codes" if self.num_codes else "latents"

    @property
    def codebook_summary(self) -> str:
        """A short description of the codebook, such as "fsq: 1000 codes, levels 8,5,5,5"."""
        return f"{self.config['quantizer']}: {self.quantizer.summary()}"

    @property
    def config(self) -> dict[str, Any]:
        """The fields of the configuration by name; a scale of continuous latents that was not given is measured."""
        scale = self._measured_scale()
        if scale is None:
            return self._arguments
        return {**self._arguments, "scaling_factor": scale[0], "shift_factor": scale[1]}

    @property
    def scaling_factor(self) -> float | None:
        """A diffusion model gets (latent - `shift_factor`) x scaling_factor. As given or measured; None if it is not
        known, or there are codes."""
        return self.config["scaling_factor"]

    @property
    def shift_factor(self) -> float | None:
        """See `scaling_factor`; 0 if only that is given, None without it."""
        return None if self.scaling_factor is None else self.config["shift_factor"] or 0.0

    @property
    def latents_mean(self) -> list[float] | None:
        """Mean of each channel of the latents that the decoder got in training, d numbers. (latent - latents_mean) /
        `latents_std` has mean 0 and deviation 1 in each channel. None if it was not measured, or there are codes. With
        a latent_patch p, d p^2 numbers: number c p^2 + y p + x is for channel c at line y and column x of a patch."""
        statistics = self._channel_statistics()
        return statistics and statistics[0]

    @property
    def latents_std(self) -> list[float] | None:
        """Standard deviation of each channel; see `latents_mean`."""
        statistics = self._channel_statistics()
        return statistics and statistics[1]

    @property
    def has_given_channels(self) -> bool:
        """Whether `latents_mean` and `latents_std` came with published weights, even if training goes on from them."""
        return not self.num_codes and came_with_weights(self.quantizer.channel_stats)

    def saved_config(self) -> dict[str, Any]:
        """`config`, with a mark if the scale was measured: a run that starts from the model goes on measuring."""
        return {**self.config, SCALE_IS_MEASURED: True} if self._measured_scale() else self.config

    def freeze_encoder(self) -> None:
        """Freeze the encoder, and the quantizer with its codebook and its averages: only the weights of `decoder` are
        trained."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith("decoder."))
        self._is_encoder_frozen = True
        self.train(self.training)

    def train(self, mode: bool = True) -> Autoencoder:
        """As in `nn.Module`, but a frozen quantizer stays in eval mode."""
        super().train(mode)
        self.quantizer.train(mode and not self._is_encoder_frozen)
        return self

    def _moments(self, z: Tensor) -> Tensor:
        """What the encoder gives, (b, 2 d, ...) -> means, then standard deviations, fp32 of the same shape."""
        mean, log_variance = self.quantizer.gaussian(z)
        return torch.cat([mean, (0.5 * log_variance).exp()], dim=1)

    def _measured_scale(self) -> tuple[float, float] | None:
        is_needed = not (self.num_codes or self._arguments["scaling_factor"])
        return compute_scale(self.quantizer.latent_stats) if is_needed else None

    def _channel_statistics(self) -> tuple[list[float], list[float]] | None:
        return None if self.num_codes else compute_channel_statistics(self.quantizer.channel_stats)
