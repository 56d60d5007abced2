"""The two steps of an adversarial update, such that they do not depend on how a batch is cut over processes and
micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .adversarial import (
    ADVERSARIAL_LOSSES,
    LeCam,
    adaptive_weight,
    gradient_penalty,
    image_gradient,
    last_layer_gradient,
)

ADAPTIVE = "adaptive"

Errors = tuple[Tensor, dict[str, Tensor]]
"""A loss (0-d), and its parts for the log."""


class Processes(Protocol):
    """What a game asks of the processes that train together."""

    device: torch.device

    @property
    def grad_accum_steps(self) -> int: ...
    def autocast(self) -> AbstractContextManager[Any]: ...
    def mean(self, value: Any) -> Any: ...


class Quantizer(Protocol):
    """What a game asks of a quantizer with statistics of the whole batch."""

    @property
    def needs_observation(self) -> bool: ...
    def pool(self) -> None: ...
    def after_update(self, step: int, seed: int, skipped: Tensor | None = None) -> None: ...


@dataclass(frozen=True)
class Rules:
    """How generator and discriminator meet.

    Args:
        gan_loss: "hinge" or "bce".
        gan_weight: Of the generator's adversarial loss; "adaptive": as strong as the reconstruction at the last layer.
        gan_weight_scale: Times that weight.
        penalty_weight: Of the gradient penalty at real images.
        lecam_weight: Of the LeCam regulariser.
        lecam_decay: Of its averages.
    """

    gan_loss: str = "hinge"
    gan_weight: float | str = ADAPTIVE
    gan_weight_scale: float = 1.0
    penalty_weight: float = 10.0
    lecam_weight: float = 0.0
    lecam_decay: float = 0.999


class _Judgement(NamedTuple):
    """What is said of reconstructions, and where it pulls them."""

    reconstruction: Tensor  # loss, 0-d
    adversarial: Tensor
    parts: dict[str, Tensor]
    pull_of_reconstruction: Tensor  # gradient with respect to the images (b, c, h, w)
    pull_of_adversarial: Tensor
    at_last_layer: Tensor  # both with respect to the decoder's last weight (2, c, i, k, k)


class Game:
    """Two engines and the rules by which they meet.

    The generator's model gives `reconstruction`, `codes`, `losses` and `features` (`models.VQGANOutput`) and has
    `quantizer` and `last_layer`; called with `observe=True` it only shows its input to the quantizer.

    Args:
        generator: Its engine.
        discriminator: Its engine.
        processes: Who trains.
        images: A micro-batch of the loader -> images (b, c, h, w) as both models take them.
        rules: How they meet.
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
        rules: Rules,
    ) -> None:
        self.generator, self.discriminator, self._processes = generator, discriminator, processes
        self._quantizer, self._images, self._rules = quantizer, images, rules
        self._last_weight_shape = tuple(last_weight_shape)
        self._loss = ADVERSARIAL_LOSSES[rules.gan_loss]
        self.lecam = LeCam(rules.lecam_decay).to(processes.device)

    def generator_step(
        self,
        batch: Mapping[str, Any],
        means: dict[str, Tensor],
        *,
        reconstruction_loss: Callable[[Tensor, Tensor], Errors],
        code_loss: Callable[[Mapping[str, Tensor]], Tensor | float],
        is_adversarial: bool,
        step: int,
        seed: int,
    ) -> tuple[Any, list[Tensor], list[Tensor]]:
        """One update of the generator: reconstruct, stay near the codes, and deceive the discriminator as it is.

        Args:
            batch: This process's part of the batch.
            means: Losses by name are added here, as means over the micro-batches.
            reconstruction_loss: (reconstruction, images) -> loss and its parts.
            code_loss: The quantizer's losses -> their weighted sum.
            is_adversarial: Whether the discriminator takes part yet; else nothing of it is computed.
            step: Number of the update.
            seed: Of the run.

        Returns:
            The engine's Update, and the reconstructions and codes of each micro-batch.
        """
        ahead = self._look_ahead(batch, reconstruction_loss, is_adversarial)
        weight = self._gan_weight(ahead) if ahead else None
        reconstructions, codes = [], []
        for index, images in enumerate(self._micro_batches(self.generator, batch)):
            out = self.generator(images)
            judgement = ahead[index] if ahead else self._judge(out, images, reconstruction_loss, is_adversarial)
            pull, value = judgement.pull_of_reconstruction, judgement.reconstruction
            if is_adversarial:
                if not ahead:
                    weight = self._gan_weight([judgement])
                assert weight is not None
                pull, value = pull + weight * judgement.pull_of_adversarial, value + weight * judgement.adversarial
                self._add(means, gan_weight=weight, gan_loss=judgement.adversarial)
            of_codes = code_loss(out.losses)
            # The gradient of the first term is that of all losses of the images; the passes through perceptual
            # network and discriminator have been made, once.
            self.generator.backward((out.reconstruction * pull).sum() + of_codes)
            self._add(means, loss=value + of_codes, **judgement.parts, **out.losses)
            reconstructions.append(out.reconstruction.detach())
            codes.append(out.codes)
        update = self.generator.step()
        self._quantizer.after_update(step, seed, update.skipped)
        return update, reconstructions, codes

    def discriminator_step(
        self, batch: Mapping[str, Any], fakes: Sequence[Tensor], means: dict[str, Tensor], *, with_penalty: bool
    ) -> Any:
        """One update of the discriminator, on the same images and what was made of them. Returns the Update."""
        # fp64 where sums feed back into training: in which order processes and micro-batches are added does not show.
        scores = torch.zeros(2, dtype=torch.float64, device=self._processes.device)
        for images, fake in zip(self._micro_batches(self.discriminator, batch), fakes, strict=True):
            real_logits, fake_logits = self.discriminator(torch.cat([images, fake])).chunk(2)
            loss = self._loss.discriminator(real_logits, fake_logits)
            of_micro_batch = torch.stack([real_logits.mean(), fake_logits.mean()]).detach()
            scores += of_micro_batch / self._processes.grad_accum_steps
            self._add(means, discr_loss=loss, discr_real=of_micro_batch[0], discr_fake=of_micro_batch[1])
            if self._rules.lecam_weight:
                lecam = self.lecam(real_logits, fake_logits)
                self._add(means, lecam_loss=lecam)
                loss = loss + self._rules.lecam_weight * lecam
            if self._rules.penalty_weight and with_penalty:
                with self.discriminator.twice_differentiable():
                    penalty = gradient_penalty(self.discriminator, images)
                self._add(means, gradient_penalty=penalty)
                loss = loss + self._rules.penalty_weight * penalty
            self.discriminator.backward(loss)
        if self._rules.lecam_weight:
            self.lecam.update(*self._processes.mean(scores))
        return self.discriminator.step()

    def _judge(
        self, out: Any, images: Tensor, reconstruction_loss: Callable[[Tensor, Tensor], Errors], is_adversarial: bool
    ) -> _Judgement:
        """Losses of reconstructions and their gradients up to the images: no pass back through the generator."""
        with torch.enable_grad(), self.discriminator.frozen():
            fake = out.reconstruction.detach().requires_grad_()
            loss, parts = reconstruction_loss(fake, images)
            to_real, deceive, adversarial = image_gradient(loss, fake), torch.zeros_like(fake), loss.new_zeros(())
            if is_adversarial:
                with self._processes.autocast():
                    adversarial = self._loss.generator(self.discriminator.module(fake))
                deceive = image_gradient(adversarial, fake)
        last = [last_layer_gradient(out.features, pull, self._last_weight_shape) for pull in (to_real, deceive)]
        parts = {name: part.detach() for name, part in parts.items()}
        return _Judgement(loss.detach(), adversarial.detach(), parts, to_real, deceive, torch.stack(last))

    @torch.no_grad()
    def _look_ahead(
        self, batch: Mapping[str, Any], reconstruction_loss: Callable[[Tensor, Tensor], Errors], is_adversarial: bool
    ) -> list[_Judgement]:
        """With several micro-batches: what depends on all of them is measured before the first is trained on."""
        if self._processes.grad_accum_steps == 1:
            return []
        if self._quantizer.needs_observation:
            for images in self._micro_batches(self.generator, batch):
                self.generator(images, observe=True)
            self._quantizer.pool()
        if not (is_adversarial and self._rules.gan_weight == ADAPTIVE):
            return []
        return [
            self._judge(self.generator(images), images, reconstruction_loss, is_adversarial)
            for images in self._micro_batches(self.generator, batch)
        ]

    def _gan_weight(self, judgements: Sequence[_Judgement]) -> Tensor:
        """Of the adversarial loss, for the whole batch, 0-d."""
        if isinstance(self._rules.gan_weight, float):
            weight = self._rules.gan_weight * self._rules.gan_weight_scale
            return torch.tensor(weight, device=self._processes.device)
        gradients = torch.stack([judgement.at_last_layer for judgement in judgements]).double()
        of_batch = self._processes.mean(gradients.mean(0)).float()
        return adaptive_weight(*of_batch) * self._rules.gan_weight_scale

    def _micro_batches(self, engine: Any, batch: Mapping[str, Any]) -> Iterator[Tensor]:
        return (self._images(micro) for micro in engine.micro_batches(batch))

    def _add(self, means: dict[str, Tensor], **values: Tensor) -> None:
        for name, value in values.items():
            means[name] = means.get(name, 0) + value.detach().double() / self._processes.grad_accum_steps
