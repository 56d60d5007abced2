"""The losses of a generator and its discriminator, the same however a batch is divided into processes and
micro-batches. `adversarial` has their formulas."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tandem.devices import sum_dtype
from tandem.flops import recomputation

from .adversarial import (
    ADVERSARIAL_LOSSES,
    LeCam,
    adaptive_weight,
    gradient_penalty,
    heads_of,
    image_gradient,
    zero_centred_penalty,
)

if TYPE_CHECKING:
    from tandem.distributed import Backend
    from tandem.models.quantizers.base import Quantizer

ADAPTIVE = "adaptive"
ZERO_CENTRED = "zero_centred"

ReconstructionLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(reconstruction, images, **loss_inputs) -> a loss (0-d), and its parts for the log."""

FurtherInputs = Callable[[Mapping[str, Any], int], Mapping[str, Tensor]]
"""(micro-batch of the loader, number of the update) -> further arguments by name, one entry per image each."""


def frames_of(videos: Tensor, frames: Tensor) -> Tensor:
    """Frame number frames[i] of video i: (b, c, f, h, w) and int64 (b,) -> (b, c, h, w)."""
    return videos[torch.arange(len(videos), device=videos.device), :, frames]


class _MicroBatch(NamedTuple):
    """A micro-batch: images, and further arguments of the losses and of the generator, by name."""

    images: Tensor
    loss_inputs: Mapping[str, Tensor]
    generator_inputs: Mapping[str, Tensor]


class _ImageLosses(NamedTuple):
    """The losses of reconstructed images, and their gradients."""

    reconstruction: Tensor  # 0-d
    adversarial: Tensor  # 0-d
    gradients: Tensor  # of both with respect to the images (2, b, c, h, w)
    last_layer_gradients: Tensor | None  # of both with respect to the last weight (2, ...), if needed


class GANLoss:
    """The terms of the generator's and the discriminator's losses, for any formula of them.

    `recon, adversarial = gan(out)` are losses of a micro-batch (0-d). `weight` (0-d), the adversarial loss's weight
    for the whole batch, is then known. A loss may be any function of them and of the other losses in `out`:
        `generator.backward(gan.surrogate_loss(loss))` gives all weights its gradients as if one graph led from them to
        the loss. Discriminator and perceptual loss need no second backward pass: their gradients with respect to the
        images are reused.

    The generator's model gives `reconstruction`, `codes`, `losses` and `features` (`models.VQGANOutput`); called with
    `accumulate_stats=True` it only adds to the statistics of its `quantizer`. Its `last_layer_gradient` is (features,
    gradient of a loss with respect to the reconstruction) -> the gradient of the loss with respect to the weight of
    its last convolution, summed over the batch. The discriminator's model gives a list of logits if it has `num_heads`
    above 1; the last ones may be left out of an update. Both models may be of videos.

    Args:
        args: The flags of `GANFlags`, and the seed.
        generator: Engine of the generator.
        discriminator: Engine of the discriminator.
        images: A micro-batch of the loader -> images (b, c, h, w), or videos, as both models take them.
        reconstruction_loss: Called once for each micro-batch.
        log: Takes losses of a micro-batch by name, 0-d (`Run.add`).
        loss_inputs: Further arguments of the discriminator and of the reconstruction loss.
        generator_inputs: Further arguments of the generator, such as noise.
    """

    weight: Tensor
    generator_inputs: Mapping[str, Tensor]
    """Further arguments of the generator for the current images."""

    def __init__(
        self, args: argparse.Namespace, generator: Any, discriminator: Any, processes: Backend, *,
        images: Callable[[Mapping[str, Any]], Tensor], reconstruction_loss: ReconstructionLoss,
        log: Callable[..., None], loss_inputs: FurtherInputs = lambda micro, step: {},
        generator_inputs: FurtherInputs = lambda micro, step: {},
    ) -> None:  # fmt: skip
        self._args, self._generator, self._discriminator, self._processes = args, generator, discriminator, processes
        self._quantizer: Quantizer = generator.module.quantizer
        self._images, self._reconstruction_loss, self._log = images, reconstruction_loss, log
        self._make_loss_inputs, self._make_generator_inputs = loss_inputs, generator_inputs
        self._loss, self._heads = ADVERSARIAL_LOSSES[args.gan_loss], discriminator.module.num_heads
        self.lecam = LeCam(args.lecam_decay, self._heads).to(processes.device)

    def active_terms(self, step: int) -> tuple[bool, bool]:
        """Whether update `step` has an adversarial loss, and whether it has a gradient penalty."""
        is_active = step >= self._args.discr_start_step
        return is_active, is_active and step % self._args.apply_grad_penalty_every == 0

    def micro_batches(self, batch: Mapping[str, Any], step: int, *, is_active: bool) -> Iterator[Tensor]:
        """The images of each micro-batch of update number `step`. Call this object for each before the next one. If the
        discriminator is not active yet, the adversarial loss is 0 and not computed. Collective."""
        self._batch, self._step, self._is_active = batch, step, is_active
        self._fakes: list[Tensor] = []
        self.weight = torch.zeros((), device=self._processes.device)
        self._batch_losses = self._measure_batch()
        if self._batch_losses:
            self.weight = self._gan_weight(self._batch_losses)
        for micro_batch in self._micro_batches_of(self._generator):
            self._micro_batch, self.generator_inputs = micro_batch, micro_batch.generator_inputs
            yield micro_batch.images

    def __call__(self, out: Any) -> tuple[Tensor, Tensor]:
        """The generator's output for these images -> their reconstruction and adversarial losses, 0-d. Collective."""
        if self._batch_losses:
            losses = self._batch_losses[len(self._fakes)]
        else:
            losses = self._image_losses(out, self._micro_batch)
            if self._is_active:
                self.weight = self._gan_weight([losses])
        if self._is_active:
            self._log(gan_weight=self.weight, gan_loss=losses.adversarial)
        self._reconstruction = out.reconstruction
        self._fakes.append(out.reconstruction.detach())
        # A displacement of the reconstruction by 0, with respect to which `surrogate_loss` differentiates the loss.
        self._displacement = torch.zeros_like(self._fakes[-1]).requires_grad_()
        reconstruction_term, adversarial_term = ((self._displacement * gradient).sum() for gradient in losses.gradients)
        return losses.reconstruction + reconstruction_term, losses.adversarial + adversarial_term

    def surrogate_loss(self, loss: Tensor) -> Tensor:
        """A loss of these images (0-d), with a graph that leads through their reconstruction."""
        (gradient,) = torch.autograd.grad(loss, self._displacement, retain_graph=True)
        surrogate = (self._reconstruction * gradient).sum()
        return loss + (surrogate - surrogate.detach())

    def update_codebook(self, skipped: Tensor) -> None:
        """Update the quantizer after an update of the generator, which may have been skipped (0-d bool)."""
        self._quantizer.after_step(self._step, self._args.seed, skipped)

    def discriminator_losses(self, *, with_penalty: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each micro-batch of the discriminator its loss, LeCam's regulariser and the gradient penalty, 0-d, on the
        images and their reconstructions. A term is 0 if its weight is, the penalty also without `with_penalty`."""
        # fp64, because the sums feed back into training: the order in which processes and micro-batches are added must
        # not change the result. A head that takes no part has no mean.
        shape, device = (2, self._heads), self._processes.device
        self._logit_means = torch.full(shape, torch.nan, dtype=sum_dtype(device), device=device)
        micro_batches = self._micro_batches_of(self._discriminator)
        for index, ((images, inputs, _), fake) in enumerate(zip(micro_batches, self._fakes, strict=True)):
            head_logits = heads_of(self._discriminator(torch.cat([images, fake]), **_double(inputs)))
            real_logits, fake_logits = zip(*(logits.chunk(2) for logits in head_logits), strict=True)
            loss = self._loss.discriminator(real_logits, fake_logits)
            side_means = (torch.stack([logits.mean() for logits in heads]) for heads in (real_logits, fake_logits))
            means = torch.stack([*side_means]).detach()
            if index == 0:
                self._logit_means[:, : len(head_logits)] = 0.0
            self._logit_means[:, : len(head_logits)] += means / self._processes.grad_accum_steps
            discr_real, discr_fake = means.mean(1)
            self._log(discr_loss=loss, discr_real=discr_real, discr_fake=discr_fake)
            lecam = penalty = loss.new_zeros(())
            if self._args.lecam_weight:
                lecam = self.lecam(real_logits, fake_logits)
                self._log(lecam_loss=lecam)
            if self._args.penalty_weight and with_penalty:
                penalty = self._penalty(images, fake, inputs)
                self._log(gradient_penalty=penalty)
            yield loss, lecam, penalty

    def update_lecam(self, skipped: Tensor) -> None:
        """Move LeCam's averages after an update of the discriminator, unless it was skipped (0-d bool). Collective."""
        if self._args.lecam_weight:
            real_means, fake_means = self._processes.mean(self._logit_means)
            self.lecam.update(real_means, fake_means, skipped)

    def _penalty(self, images: Tensor, fake: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        with self._discriminator.twice_differentiable():
            if self._args.penalty == ZERO_CENTRED:
                return zero_centred_penalty(functools.partial(self._discriminator, **_double(inputs)), images, fake)
            return gradient_penalty(functools.partial(self._discriminator, **inputs), images)

    def _image_losses(self, out: Any, micro_batch: _MicroBatch) -> _ImageLosses:
        """Losses of reconstructions and their gradients with respect to the images. There is no backward pass through
        the generator."""
        with torch.enable_grad(), self._discriminator.frozen():
            fake = out.reconstruction.detach().requires_grad_()
            with self._processes.autocast():
                loss, loss_parts = self._reconstruction_loss(fake, micro_batch.images, **micro_batch.loss_inputs)
            gradient, adversarial_gradient = image_gradient(loss, fake), torch.zeros_like(fake)
            adversarial = loss.new_zeros(())
            if self._is_active:
                with self._processes.autocast():
                    adversarial = self._loss.generator(self._discriminator.module(fake, **micro_batch.loss_inputs))
                adversarial_gradient = image_gradient(adversarial, fake)
        self._log(**loss_parts)
        gradients, last_layer_gradients = torch.stack([gradient, adversarial_gradient]), None
        if self._is_active and self._args.gan_weight == ADAPTIVE:
            to_last_layer = self._generator.module.last_layer_gradient
            last_layer_gradients = torch.stack([to_last_layer(out.features, image_grad) for image_grad in gradients])
        return _ImageLosses(loss.detach(), adversarial.detach(), gradients, last_layer_gradients)

    @torch.no_grad()
    def _measure_batch(self) -> list[_ImageLosses]:
        """With several micro-batches, measure what depends on all of them before training on the first one: the
        quantizer's statistics, and the losses from which an adaptive weight is computed. Returns these losses."""
        if self._processes.grad_accum_steps == 1:
            return []
        if self._quantizer.needs_stats:
            with recomputation():
                for micro_batch in self._micro_batches_of(self._generator):
                    self._generator(micro_batch.images, accumulate_stats=True)
            self._quantizer.reduce_stats()
        if not (self._is_active and self._args.gan_weight == ADAPTIVE):
            return []
        batch_losses = []
        for micro_batch in self._micro_batches_of(self._generator):
            with recomputation():
                out = self._generator(micro_batch.images, **micro_batch.generator_inputs)
            batch_losses.append(self._image_losses(out, micro_batch))
        return batch_losses

    def _gan_weight(self, losses: Sequence[_ImageLosses]) -> Tensor:
        """Weight of the adversarial loss for the whole batch, 0-d. Collective if the weight is adaptive."""
        if isinstance(self._args.gan_weight, float):
            weight = self._args.gan_weight * self._args.gan_weight_scale
            return torch.full((), weight, device=self._processes.device)  # filled there: the host does not wait
        gradients = torch.stack([loss.last_layer_gradients for loss in losses if loss.last_layer_gradients is not None])
        mean_gradients = self._processes.mean(gradients.to(sum_dtype(gradients.device)).mean(0)).float()
        weight = adaptive_weight(mean_gradients[0], mean_gradients[1], self._args.gan_weight_max)
        return weight * self._args.gan_weight_scale

    def _micro_batches_of(self, engine: Any) -> Iterator[_MicroBatch]:
        """The images and further arguments of each micro-batch."""
        for loader_batch in engine.micro_batches(self._batch):
            inputs = self._make_generator_inputs(loader_batch, self._step) if engine is self._generator else {}
            yield _MicroBatch(self._images(loader_batch), self._make_loss_inputs(loader_batch, self._step), inputs)


def _double(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs for the real images, followed by the same inputs for the generated images."""
    return {name: torch.cat([value, value]) for name, value in inputs.items()}
