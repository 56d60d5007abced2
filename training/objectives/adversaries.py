"""The two steps of an adversarial update. Their results do not depend on how a batch is divided into processes and
micro-batches."""

from __future__ import annotations

import argparse
import functools
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
    heads_of,
    image_gradient,
    zero_centred_penalty,
)

ADAPTIVE = "adaptive"
ZERO_CENTRED = "zero_centred"

ReconstructionLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(reconstruction, images, **given) -> a loss (0-d), and its parts for the log."""

Given = Callable[[Mapping[str, Any], int], Mapping[str, Tensor]]
"""(micro-batch of the loader, number of the update) -> further arguments by name, one entry per image each."""


def reconstruction_loss(
    error: Callable[[Tensor, Tensor], Tensor],
    perceptual: Callable[[Tensor, Tensor], Tensor] | None,
    perceptual_weight: float,
    shown: Callable[..., Tensor] = lambda images: images,
) -> ReconstructionLoss:
    """A loss that is the error of all pixels, and the weighted perceptual distance of images if there is a network.

    `shown` takes images or videos and what is given beside them, and returns the images that the network compares.
    """

    def loss(fake: Tensor, images: Tensor, **given: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value = error(fake, images)
        if perceptual is None:
            return value, {"recon_loss": value}
        distance = perceptual(shown(fake, **given), shown(images, **given))
        return value + perceptual_weight * distance, {"recon_loss": value, "perceptual_loss": distance}

    return loss


def frames_of(videos: Tensor, frames: Tensor) -> Tensor:
    """Frame number frames[i] of video i: (b, c, f, h, w) and int64 (b,) -> (b, c, h, w)."""
    return videos[torch.arange(len(videos), device=videos.device), :, frames]


class Quantizer(Protocol):
    """Interface that an adversarial update requires of a quantizer, which may keep statistics of the whole batch."""

    @property
    def needs_observation(self) -> bool: ...
    def pool(self) -> None: ...
    def after_update(self, step: int, seed: int, skipped: Tensor | None = None) -> None: ...


@dataclass(frozen=True)
class AdversarialWeights:
    """Which adversarial losses are computed, and how much each counts: the flags of `add_adversary_arguments`."""

    gan_loss: str = "hinge"  # a name of ADVERSARIAL_LOSSES
    gan_weight: float | str = ADAPTIVE  # weight of the generator's loss; adaptive: as strong as the reconstruction loss
    gan_weight_scale: float = 1.0  # multiplies gan_weight
    penalty: str = "one_centred"  # at real images, or "zero_centred": at real and generated ones
    penalty_weight: float = 10.0  # weight of the gradient penalty
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
    last_layer_gradients: Tensor | None  # of both losses (2, ...), with respect to the last weight; if it is needed


class AdversarialTraining:
    """The updates of a generator and of a discriminator that judges what it generates. Both may be of videos.

    The generator's model gives `reconstruction`, `codes`, `losses` and `features` (`models.VQGANOutput`); called with
    `observe=True` it only shows its input to the quantizer.

    Args:
        generator: Engine of the generator.
        discriminator: Engine of the discriminator.
        quantizer: Quantizer of the generator's model.
        last_layer_gradient: (features, gradient of a loss with respect to the reconstruction) -> the gradient of the
            loss with respect to the weight of the generator's last convolution, summed over the batch.
        seed: Seed of the run, for the quantizer.
        images: A micro-batch of the loader -> images (b, c, h, w), or videos, as both models take them.
        log: Takes losses of a micro-batch by name, 0-d (`Run.add`).
        heads: Number of heads of the discriminator, which gives a list of logits if there are several. The last ones
            may be left out of an update.
        given: Further arguments of the discriminator and of the reconstruction loss.
    """

    def __init__(
        self,
        generator: Any,
        discriminator: Any,
        processes: Processes,
        *,
        quantizer: Quantizer,
        seed: int,
        last_layer_gradient: Callable[[Tensor, Tensor], Tensor],
        images: Callable[[Mapping[str, Any]], Tensor],
        reconstruction_loss: ReconstructionLoss,
        weights: AdversarialWeights,
        log: Callable[..., None],
        heads: int = 1,
        given: Given = lambda micro, step: {},
    ) -> None:
        self.generator, self.discriminator, self._processes = generator, discriminator, processes
        self._quantizer, self._seed, self._weights, self._log = quantizer, seed, weights, log
        self._images, self._reconstruction_loss = images, reconstruction_loss
        self._last_layer_gradient, self._heads, self._given = last_layer_gradient, heads, given
        self._loss = ADVERSARIAL_LOSSES[weights.gan_loss]
        self.lecam = LeCam(weights.lecam_decay, heads).to(processes.device)

    def generator_step(
        self, batch: Mapping[str, Any], code_weights: Mapping[str, float], step: int, *, is_adversarial: bool
    ) -> tuple[Any, list[Tensor], list[Tensor]]:
        """One update of the generator: reconstruct, stay near the codes, and deceive the unchanged discriminator.

        Args:
            code_weights: Weight of each loss that the quantizer may have, by name; fsq has none.
            step: Number of the update.
            is_adversarial: Whether the discriminator takes part yet; if not, the adversarial loss is not computed.

        Returns:
            The engine's Update, and the reconstructions and codes of each micro-batch.
        """
        measured = self._measure_batch(batch, is_adversarial, step)
        weight = self._gan_weight(measured) if measured else None
        reconstructions, codes = [], []
        for index, (images, given) in enumerate(self._micro_batches(self.generator, batch, step)):
            out = self.generator(images)
            losses = measured[index] if measured else self._image_losses(out, images, given, is_adversarial)
            gradient, value = losses.reconstruction_gradient, losses.reconstruction
            if is_adversarial:
                if weight is None or not measured:
                    weight = self._gan_weight([losses])
                gradient, value = gradient + weight * losses.adversarial_gradient, value + weight * losses.adversarial
                self._log(gan_weight=weight, gan_loss=losses.adversarial)
            of_codes = sum(code_weights[name] * loss for name, loss in out.losses.items())
            # The gradient of the first term is the gradient of all losses of the images. The perceptual network and the
            # discriminator need no second backward pass: `gradient` already contains theirs.
            self.generator.backward((out.reconstruction * gradient).sum() + of_codes)
            self._log(loss=value + of_codes, **losses.parts, **out.losses)
            reconstructions.append(out.reconstruction.detach())
            codes.append(out.codes)
        update = self.generator.step()
        self._quantizer.after_update(step, self._seed, update.skipped)
        return update, reconstructions, codes

    def discriminator_step(
        self, batch: Mapping[str, Any], reconstructions: Sequence[Tensor], step: int, *, with_penalty: bool
    ) -> Any:
        """One update of the discriminator, on the same images and their reconstructions. Returns the Update."""
        # fp64, because the sums feed back into training: the order in which processes and micro-batches are added must
        # not change the result. A head that takes no part has no mean.
        logit_means = torch.full((2, self._heads), torch.nan, dtype=torch.float64, device=self._processes.device)
        micro_batches = self._micro_batches(self.discriminator, batch, step)
        for index, ((images, given), fake) in enumerate(zip(micro_batches, reconstructions, strict=True)):
            of_heads = heads_of(self.discriminator(torch.cat([images, fake]), **_twice(given)))
            real_logits, fake_logits = zip(*(logits.chunk(2) for logits in of_heads), strict=True)
            loss = self._loss.discriminator(real_logits, fake_logits)
            both = (torch.stack([logits.mean() for logits in side]) for side in (real_logits, fake_logits))
            of_micro_batch = torch.stack([*both]).detach()
            if index == 0:
                logit_means[:, : len(of_heads)] = 0.0
            logit_means[:, : len(of_heads)] += of_micro_batch / self._processes.grad_accum_steps
            discr_real, discr_fake = of_micro_batch.mean(1)
            self._log(discr_loss=loss, discr_real=discr_real, discr_fake=discr_fake)
            if self._weights.lecam_weight:
                lecam = self.lecam(real_logits, fake_logits)
                self._log(lecam_loss=lecam)
                loss = loss + self._weights.lecam_weight * lecam
            if self._weights.penalty_weight and with_penalty:
                penalty = self._penalty(images, fake, given)
                self._log(gradient_penalty=penalty)
                loss = loss + self._weights.penalty_weight * penalty
            self.discriminator.backward(loss)
        update = self.discriminator.step()
        if self._weights.lecam_weight:
            real_means, fake_means = self._processes.mean(logit_means)
            self.lecam.update(real_means, fake_means, update.skipped)
        return update

    def _penalty(self, images: Tensor, fake: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        with self.discriminator.twice_differentiable():
            if self._weights.penalty == ZERO_CENTRED:
                return zero_centred_penalty(functools.partial(self.discriminator, **_twice(given)), images, fake)
            return gradient_penalty(functools.partial(self.discriminator, **given), images)

    def _image_losses(
        self, out: Any, images: Tensor, given: Mapping[str, Tensor], is_adversarial: bool
    ) -> _ImageLosses:
        """Losses of reconstructions and their gradients with respect to the images. There is no backward pass through
        the generator."""
        with torch.enable_grad(), self.discriminator.frozen():
            fake = out.reconstruction.detach().requires_grad_()
            with self._processes.autocast():
                loss, parts = self._reconstruction_loss(fake, images, **given)
            gradient, adversarial_gradient = image_gradient(loss, fake), torch.zeros_like(fake)
            adversarial = loss.new_zeros(())
            if is_adversarial:
                with self._processes.autocast():
                    adversarial = self._loss.generator(self.discriminator.module(fake, **given))
                adversarial_gradient = image_gradient(adversarial, fake)
        gradients = (gradient, adversarial_gradient)
        last = None
        if is_adversarial and self._weights.gan_weight == ADAPTIVE:
            last = torch.stack([self._last_layer_gradient(out.features, each) for each in gradients])
        parts = {name: part.detach() for name, part in parts.items()}
        return _ImageLosses(loss.detach(), adversarial.detach(), parts, *gradients, last)

    @torch.no_grad()
    def _measure_batch(self, batch: Mapping[str, Any], is_adversarial: bool, step: int) -> list[_ImageLosses]:
        """With several micro-batches, measure what depends on all of them before training on the first one: the
        quantizer's statistics, and the losses from which an adaptive weight is computed. Returns these losses."""
        if self._processes.grad_accum_steps == 1:
            return []
        if self._quantizer.needs_observation:
            for images, _ in self._micro_batches(self.generator, batch, step):
                self.generator(images, observe=True)
            self._quantizer.pool()
        if not (is_adversarial and self._weights.gan_weight == ADAPTIVE):
            return []
        return [
            self._image_losses(self.generator(images), images, given, is_adversarial)
            for images, given in self._micro_batches(self.generator, batch, step)
        ]

    def _gan_weight(self, losses: Sequence[_ImageLosses]) -> Tensor:
        """Weight of the adversarial loss for the whole batch, 0-d. Collective if the weight is adaptive."""
        if isinstance(self._weights.gan_weight, float):
            weight = self._weights.gan_weight * self._weights.gan_weight_scale
            return torch.full((), weight, device=self._processes.device)  # filled there: the host does not wait
        gradients = torch.stack([each.last_layer_gradients for each in losses if each.last_layer_gradients is not None])
        of_batch = self._processes.mean(gradients.double().mean(0)).float()
        return adaptive_weight(*of_batch) * self._weights.gan_weight_scale

    def _micro_batches(
        self, engine: Any, batch: Mapping[str, Any], step: int
    ) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """The images of each micro-batch, and what is given beside them."""
        return ((self._images(micro), self._given(micro, step)) for micro in engine.micro_batches(batch))


def _twice(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is given, for the real and then for the generated images."""
    return {name: torch.cat([value, value]) for name, value in given.items()}
