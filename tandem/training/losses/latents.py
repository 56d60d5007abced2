"""What makes the latents of an autoencoder easier to generate: noise that the decoder has to bear, and an error that
makes latents turn and shrink with their images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem.config.autoencoder_training import SMALLEST_SIDES
from tandem.config.models.taming import KL
from tandem.devices import to_device
from tandem.sides import height_and_width
from tandem.training.noise import Noise
from tandem.transforms import Transform, possible_sizes

from .gan import weigh_perceptual

if TYPE_CHECKING:
    from .gan import MicroBatch


class LatentLosses:
    """The generator's inputs that change its latents in training, and the loss terms about latents. All are functions
    of the seed, the update and the place of a sample in the batch.

    Args:
        config: `LatentRegularizerFlags`; of a model with continuous latents also `LatentLossFlags`.
        generator: Engine of a `VQGAN` or a `VideoTokenizer`.
        samples: Key of the samples (b, c, ..., h, w) in a micro-batch of the loader.
        pixel_loss, perceptual_loss: As in `GANLoss`.

    Raises:
        ValueError: one line, if latents of a single place are to be equivariant.
    """

    def __init__(
        self, config: Any, generator: Any, samples: str, device: torch.device,
        pixel_loss: Callable[[Tensor, Tensor], Tensor], perceptual_loss: Callable[..., Mapping[str, Tensor]] | None,
    ) -> None:  # fmt: skip
        self._config, self._generator, self._samples, self._device = config, generator, samples, device
        self._pixel_loss, self._perceptual_loss = pixel_loss, perceptual_loss
        self._is_sampled = config.quantizer == KL and config.latent == "sample"
        names = ("latents", "latent noise", "noise level", "transformed size", "turns")
        self._latents, self._noise, self._level, self._size, self._turns = (Noise(config.seed, name) for name in names)

        sides, frames = height_and_width(config.image_size), [1] if samples == "videos" else []
        latent_sides = generator.module.latent_shape(*frames, *sides)[-2:]
        self._sizes, self._is_square = possible_sizes(*latent_sides), sides[0] == sides[1]
        if config.equivariance_weight and set(latent_sides) == {1}:
            raise ValueError("--equivariance_weight: images have a single latent, which cannot be turned")

    def size(self, step: int) -> int:
        """`Transform.quarters` of update `step`, which decides how much it computes; 4 without a transform. It is the
        same for all samples: the processes of FSDP and ZeRO 3 have to make equally many passes through the decoder."""
        if not self._config.equivariance_weight:
            return 4
        return self._sizes[int(self._size.uniform(step, [0], ()).item() * len(self._sizes))]

    def update_kind(self, kind: Callable[..., Any]) -> Callable[..., Any]:
        """An `update_kind` of `training.updates` that tells sizes apart, too."""
        return lambda step, batch=None: (kind(step, batch), self.size(step))

    def inputs(self, micro_batch: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Further arguments of the generator for the samples of a micro-batch in update `step`."""
        positions, shape = (
            micro_batch["positions"],
            self._generator.module.latent_shape(*micro_batch[self._samples].shape[2:]),
        )
        inputs: dict[str, Any] = {}
        if self._is_sampled:
            inputs["noise"] = self._latents.normal(step, positions, shape, self._device)
        if self._config.latent_noise:
            # Interpolative noise of l-DeTok (Yang et al. 2025, arXiv:2507.15856): (1 - t) z + t S e, t uniform.
            noise = self._config.latent_noise * self._noise.normal(step, positions, shape, self._device)
            levels = to_device(self._level.uniform(step, positions, ()), self._device)
            inputs["latent_noise"], inputs["noise_levels"] = noise, levels
        if self._config.equivariance_weight:
            inputs["transform"] = self._draw_transform(step, positions)
        return inputs

    def terms(self, out: Any, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """The terms by name, 0-d and unweighted: "equivariance_loss", the reconstruction error between images that are
        shrunk and turned, and what the decoder makes of their latents, shrunk and turned in the same way; without
        --equivariance_weight none."""
        if out.transformed is None:
            return {}
        target = micro_batch.generator_inputs["transform"](micro_batch.images)
        with self._generator.autocast():
            loss = self._pixel_loss(out.transformed, target)
            perceptual_loss = self._perceptual_loss
            if perceptual_loss is not None and min(target.shape[-2:]) >= SMALLEST_SIDES[self._config.perceptual]:
                perceptual_terms = perceptual_loss(out.transformed, target, **micro_batch.loss_inputs)
                loss = loss + weigh_perceptual(perceptual_terms, self._config)
        return {"equivariance_loss": loss}

    def _draw_transform(self, step: int, positions: Sequence[int]) -> Transform:
        """The transform of the samples of a micro-batch."""
        quarters = self.size(step)
        fractions = self._turns.uniform(step, positions, ())  # on the CPU, so that every device draws the same
        least = 1 if quarters == 4 else 0  # an image that is neither shrunk nor turned says nothing
        if self._is_square:
            turns = least + (fractions * (4 - least)).long()
        else:
            turns = 2 * (least + (fractions * (2 - least)).long())
        return Transform(quarters, to_device(turns, self._device))
