"""The two steps of an adversarial update. Their results do not depend on how a batch is divided into processes and
micro-batches."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..contracts import Processes
from .adversarial import (
    ADVERSARIAL_LOSSES,
    LeCam,
    adaptive_weight,
    gradient_penalty,
    image_gradient,
    last_layer_gradient,
)

ADAPTIVE = "adaptive"

ReconstructionLoss = Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(reconstruction, images) -> a loss (0-d), and its parts for the log."""


class Quantizer(Protocol):
    """Interface that an adversarial update requires of a quantizer, which may keep statistics of the whole batch."""

    @property
    def needs_observation(self) -> bool: ...
    def pool(self) -> None: ...
    def after_update(self, step: int, seed: int, skipped: Tensor | None = None) -> None: ...


@dataclass(frozen=True)
class AdversarialWeights:
    """Which adversarial losses are computed, and how much each counts: the flags of `add_adversary_arguments`."""

    gan_loss: str = "hinge"  # or "bce"
    gan_weight: float | str = ADAPTIVE  # weight of the generator's loss; adaptive: as strong as the reconstruction loss
    gan_weight_scale: float = 1.0  # multiplies gan_weight
    penalty_weight: float = 10.0  # weight of the gradient penalty at real images
    lecam_weight: float = 0.0
    lecam_decay: float = 0.999

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> AdversarialWeights:
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})


class _ImageLosses(NamedTuple):
    """The losses of reconstructed images, and their gradients."""

    reconstruction: Tensor  # 0-d
    adversarial: Tensor  # 0-d
    parts: dict[str, Tensor]  # the terms of the reconstruction loss by name, for the log
    reconstruction_gradient: Tensor  # with respect to the images (b, c, h, w)
    adversarial_gradient: Tensor
    last_layer_gradients: Tensor  # of both losses, with respect to the decoder's last weight (2, c, i, k, k)


class AdversarialTraining:
    """The updates of a generator and of a discriminator that judges what it generates.

    The generator's model gives `reconstruction`, `codes`, `losses` and `features` (`models.VQGANOutput`); called with
    `observe=True` it only shows its input to the quantizer.

    Args:
        generator: Engine of the generator.
        discriminator: Engine of the discriminator.
        quantizer: Quantizer of the generator's model.
        last_weight_shape: Shape of the weight of the generator's last convolution.
        images: A micro-batch of the loader -> images (b, c, h, w) as both models take them.
        log: Takes losses of a micro-batch by name, 0-d (`Run.add`).
    """

    def __init__(
        self,
        generator: Any,
        discriminator: Any,
        processes: Processes,
        *,
        quantizer: Quantizer,
        last_weight_shape: Sequence[int],
        images: Callable[[Mapping[str, Any]], Tensor],
        reconstruction_loss: ReconstructionLoss,
        weights: AdversarialWeights,
        log: Callable[..., None],
    ) -> None:
        self.generator, self.discriminator, self._processes = generator, discriminator, processes
        self._quantizer, self._images, self._weights, self._log = quantizer, images, weights, log
        self._reconstruction_loss = reconstruction_loss
        self._last_weight_shape = tuple(last_weight_shape)
        self._loss = ADVERSARIAL_LOSSES[weights.gan_loss]
        self.lecam = LeCam(weights.lecam_decay).to(processes.device)

    def generator_step(
        self,
        batch: Mapping[str, Any],
        *,
        code_loss: Callable[[Mapping[str, Tensor]], Tensor | float],
        is_adversarial: bool,
        step: int,
        seed: int,
    ) -> tuple[Any, list[Tensor], list[Tensor]]:
        """One update of the generator: reconstruct, stay near the codes, and deceive the unchanged discriminator.

        Args:
            code_loss: The quantizer's losses -> their weighted sum.
            is_adversarial: Whether the discriminator takes part yet; if not, the adversarial loss is not computed.

        Returns:
            The engine's Update, and the reconstructions and codes of each micro-batch.
        """
        measured = self._measure_batch(batch, is_adversarial)
        weight = self._gan_weight(measured) if measured else None
        reconstructions, codes = [], []
        for index, images in enumerate(self._micro_batches(self.generator, batch)):
            out = self.generator(images)
            losses = measured[index] if measured else self._image_losses(out, images, is_adversarial)
            gradient, value = losses.reconstruction_gradient, losses.reconstruction
            if is_adversarial:
                if weight is None or not measured:
                    weight = self._gan_weight([losses])
                gradient, value = gradient + weight * losses.adversarial_gradient, value + weight * losses.adversarial
                self._log(gan_weight=weight, gan_loss=losses.adversarial)
            of_codes = code_loss(out.losses)
            # The gradient of the first term is the gradient of all losses of the images. The perceptual network and the
            # discriminator need no second backward pass: `gradient` already contains theirs.
            self.generator.backward((out.reconstruction * gradient).sum() + of_codes)
            self._log(loss=value + of_codes, **losses.parts, **out.losses)
            reconstructions.append(out.reconstruction.detach())
            codes.append(out.codes)
        update = self.generator.step()
        self._quantizer.after_update(step, seed, update.skipped)
        return update, reconstructions, codes

    def discriminator_step(
        self, batch: Mapping[str, Any], reconstructions: Sequence[Tensor], *, with_penalty: bool
    ) -> Any:
        """One update of the discriminator, on the same images and their reconstructions. Returns the Update."""
        # fp64, because the sums feed back into training: the order in which processes and micro-batches are added must
        # not change the result.
        logit_means = torch.zeros(2, dtype=torch.float64, device=self._processes.device)
        for images, fake in zip(self._micro_batches(self.discriminator, batch), reconstructions, strict=True):
            real_logits, fake_logits = self.discriminator(torch.cat([images, fake])).chunk(2)
            loss = self._loss.discriminator(real_logits, fake_logits)
            of_micro_batch = torch.stack([real_logits.mean(), fake_logits.mean()]).detach()
            logit_means += of_micro_batch / self._processes.grad_accum_steps
            self._log(discr_loss=loss, discr_real=of_micro_batch[0], discr_fake=of_micro_batch[1])
            if self._weights.lecam_weight:
                lecam = self.lecam(real_logits, fake_logits)
                self._log(lecam_loss=lecam)
                loss = loss + self._weights.lecam_weight * lecam
            if self._weights.penalty_weight and with_penalty:
                with self.discriminator.twice_differentiable():
                    penalty = gradient_penalty(self.discriminator, images)
                self._log(gradient_penalty=penalty)
                loss = loss + self._weights.penalty_weight * penalty
            self.discriminator.backward(loss)
        if self._weights.lecam_weight:
            self.lecam.update(*self._processes.mean(logit_means))
        return self.discriminator.step()

    def _image_losses(self, out: Any, images: Tensor, is_adversarial: bool) -> _ImageLosses:
        """Losses of reconstructions and their gradients with respect to the images. There is no backward pass through
        the generator."""
        with torch.enable_grad(), self.discriminator.frozen():
            fake = out.reconstruction.detach().requires_grad_()
            loss, parts = self._reconstruction_loss(fake, images)
            gradient, adversarial_gradient = image_gradient(loss, fake), torch.zeros_like(fake)
            adversarial = loss.new_zeros(())
            if is_adversarial:
                with self._processes.autocast():
                    adversarial = self._loss.generator(self.discriminator.module(fake))
                adversarial_gradient = image_gradient(adversarial, fake)
        gradients = (gradient, adversarial_gradient)
        last = torch.stack([last_layer_gradient(out.features, each, self._last_weight_shape) for each in gradients])
        parts = {name: part.detach() for name, part in parts.items()}
        return _ImageLosses(loss.detach(), adversarial.detach(), parts, *gradients, last)

    @torch.no_grad()
    def _measure_batch(self, batch: Mapping[str, Any], is_adversarial: bool) -> list[_ImageLosses]:
        """With several micro-batches, measure what depends on all of them before training on the first one: the
        quantizer's statistics, and the losses from which an adaptive weight is computed. Returns these losses."""
        if self._processes.grad_accum_steps == 1:
            return []
        if self._quantizer.needs_observation:
            for images in self._micro_batches(self.generator, batch):
                self.generator(images, observe=True)
            self._quantizer.pool()
        if not (is_adversarial and self._weights.gan_weight == ADAPTIVE):
            return []
        return [
            self._image_losses(self.generator(images), images, is_adversarial)
            for images in self._micro_batches(self.generator, batch)
        ]

    def _gan_weight(self, losses: Sequence[_ImageLosses]) -> Tensor:
        """Weight of the adversarial loss for the whole batch, 0-d. Collective if the weight is adaptive."""
        if isinstance(self._weights.gan_weight, float):
            weight = self._weights.gan_weight * self._weights.gan_weight_scale
            return torch.tensor(weight, device=self._processes.device)
        gradients = torch.stack([of_micro_batch.last_layer_gradients for of_micro_batch in losses]).double()
        of_batch = self._processes.mean(gradients.mean(0)).float()
        return adaptive_weight(*of_batch) * self._weights.gan_weight_scale

    def _micro_batches(self, engine: Any, batch: Mapping[str, Any]) -> Iterator[Tensor]:
        return (self._images(micro) for micro in engine.micro_batches(batch))
