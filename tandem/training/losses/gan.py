"""The losses of a generator and its discriminator, the same however a batch is divided into processes and
micro-batches. `adversarial` has their formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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
    from tandem.config.autoencoder_training import GANFlags
    from tandem.distributed import ProcessGroup
    from tandem.distributed.engines.base import Update
    from tandem.models.quantizers.base import Quantizer

ADAPTIVE = "adaptive"
ZERO_CENTRED = "zero_centred"

FurtherInputs = Callable[[Mapping[str, Any], int], Mapping[str, Any]]
"""(micro-batch of the loader, number of the update) -> further arguments by name, one entry per image each."""


def weigh_perceptual(terms: Mapping[str, Tensor], config: Any) -> Tensor:
    """The terms of the perceptual loss by name, 0-d -> their sum, each with its weight in `GANFlags`, 0-d."""
    loss = config.perceptual_loss_weight * terms["perceptual_loss"]
    return loss + config.gram_loss_weight * terms["gram_loss"] if "gram_loss" in terms else loss


class _ImageLosses(NamedTuple):
    """The losses of reconstructed images, 0-d, and their gradients."""

    reconstruction: Tensor
    adversarial: Tensor
    gradients: Sequence[Tensor]  # of each with respect to the reconstructions (b, c, h, w)
    #: Of both with respect to the weight of the generator's last convolution (2, ...); None without an adaptive weight.
    last_layer_gradients: Tensor | None


class MicroBatch(NamedTuple):
    """The images (b, c, h, w), or videos, of a micro-batch, and what belongs to them."""

    images: Tensor
    generator_inputs: Mapping[str, Any]
    """Further arguments of the generator, by name."""
    loss_inputs: Mapping[str, Tensor]
    """Further arguments of the discriminator and of the perceptual loss, by name."""
    is_adversarial: bool
    losses: _ImageLosses | None = None
    """The losses, where they have been computed before, because the weight depends on those of all micro-batches."""
    gan_weight: Tensor | None = None
    """The adversarial loss's weight, if `losses` are given."""


class GANLoss:
    """Computes the terms of the generator's loss, which the caller combines, and updates the discriminator.

    `recon, adversarial, weight = gan_loss(out, micro_batch)` are a micro-batch's reconstruction and adversarial loss
    and the adversarial loss's weight for the whole batch. All are 0-d; the losses have gradients, so that
    `generator.backward(recon + weight * adversarial)`, or any other function of them, gives all weights their
    gradients. Discriminator and perceptual loss need no second backward pass: their gradients with respect to the
    reconstructions, from which an adaptive weight is computed, are used again.

    The generator's model gives `reconstruction`, `codes`, `losses` and `features` (`models.VQGANOutput`); called with
    `accumulate_stats=True` it only adds to the statistics of its `quantizer`. Its `last_layer_gradient` is (features,
    gradient of a loss with respect to the reconstruction) -> the gradient of the loss with respect to the weight of
    its last convolution, summed over the batch. The discriminator's model gives a list of logits if it has `num_heads`
    above 1; the last ones may be left out of an update. Both models may be of videos.

    Args:
        config: Kinds and weights of the losses.
        generator: Engine of the generator.
        discriminator: Engine of the discriminator.
        images: A micro-batch of the loader -> images (b, c, h, w), or videos, as both models take them.
        pixel_loss: Reconstructions and images -> their mean error, 0-d.
        perceptual_loss: Reconstructions, images and **loss_inputs -> the terms of the perceptual loss by name, 0-d, as
            of `PerceptualLoss`; None for none.
        log: Takes losses of a micro-batch by name, 0-d (`Run.add`).
        loss_inputs: Further arguments of the discriminator and of the perceptual loss.
        generator_inputs: Further arguments of the generator, such as noise.
    """

    def __init__(
        self, config: GANFlags, generator: Any, discriminator: Any, processes: ProcessGroup, *,
        images: Callable[[Mapping[str, Any]], Tensor], pixel_loss: Callable[[Tensor, Tensor], Tensor],
        perceptual_loss: Callable[..., Mapping[str, Tensor]] | None, log: Callable[..., None],
        loss_inputs: FurtherInputs = lambda micro, step: {}, generator_inputs: FurtherInputs = lambda micro, step: {},
    ) -> None:  # fmt: skip
        self._config, self._processes = config, processes
        self._generator, self._discriminator = generator, discriminator
        self._quantizer: Quantizer = generator.module.quantizer
        self._images, self._pixel_loss, self._perceptual_loss, self._log = images, pixel_loss, perceptual_loss, log
        self._loss_inputs, self._generator_inputs = loss_inputs, generator_inputs
        self._loss, self._heads = ADVERSARIAL_LOSSES[config.gan_loss], discriminator.module.num_heads
        self.lecam = LeCam(config.lecam_decay, self._heads).to(processes.device)

    def is_adversarial(self, step: int) -> bool:
        """Whether update number `step` has an adversarial loss, and an update of the discriminator."""
        return step >= self._config.discr_start_step

    def has_penalty(self, step: int) -> bool:
        """Whether the discriminator's loss in update number `step` has a gradient penalty."""
        return bool(self._config.penalty_weight) and step % self._config.apply_grad_penalty_every == 0

    def possible_columns(self, columns: Sequence[str], total_steps: int) -> list[str]:
        """Those of the metrics `columns` that can have a value in a run of so many updates: a model without codes uses
        none, and the discriminator may not begin to learn."""
        absent = set() if self._quantizer.num_codes else {"codes_used", "valid/codes_used"}
        absent |= set() if self.is_adversarial(total_steps - 1) else {"discr_loss"}
        return [name for name in columns if name not in absent]

    def active_terms(self, step: int, batch: Mapping[str, Any] | None = None) -> tuple[bool, bool]:
        """Whether update number `step` has the adversarial loss, and whether it has the gradient penalty: the argument
        `update_kind` of `training.updates`, which passes the batch, too."""
        return self.is_adversarial(step), self.is_adversarial(step) and self.has_penalty(step)

    def micro_batches(self, batch: Mapping[str, Any], step: int) -> Iterator[MicroBatch]:
        """The micro-batches of the generator's update number `step`. What depends on all of them is measured before the
        first one: the quantizer's statistics, and the losses from which an adaptive weight is computed. Collective."""
        if self._generator.grad_accum_steps == 1:
            yield from self._divide(batch, step, self._generator)
            return
        if self._quantizer.needs_stats:
            with recomputation(), torch.no_grad():
                for micro_batch in self._divide(batch, step, self._generator):
                    self._generator(micro_batch.images, accumulate_stats=True)
            self._quantizer.reduce_stats()
        if not (self.is_adversarial(step) and self._config.gan_weight == ADAPTIVE):
            yield from self._divide(batch, step, self._generator)
            return
        batch_losses = []
        for micro_batch in self._divide(batch, step, self._generator):
            inputs = {name: value for name, value in micro_batch.generator_inputs.items() if name != "transform"}
            with recomputation(), torch.no_grad():
                out = self._generator(micro_batch.images, **inputs)
            batch_losses.append(self._image_losses(out, micro_batch))
        weight = self._gan_weight(batch_losses)
        for micro_batch, losses in zip(self._divide(batch, step, self._generator), batch_losses, strict=True):
            yield micro_batch._replace(losses=losses, gan_weight=weight)

    def __call__(self, out: Any, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """The generator's output for these images -> their reconstruction and adversarial losses, and the adversarial
        loss's weight, all 0-d. Without an adversarial loss in this update it is 0, and so is its weight. Collective."""
        losses, weight = micro_batch.losses, micro_batch.gan_weight
        if losses is None:
            losses = self._image_losses(out, micro_batch)
        reconstruction = out.reconstruction.float()  # so that the two gradients are added in fp32
        adversarial = losses.adversarial
        if micro_batch.is_adversarial:
            weight = self._gan_weight([losses]) if weight is None else weight
            self._log(gan_weight=weight, gan_loss=adversarial)
            adversarial = with_gradient(adversarial, reconstruction, losses.gradients[1])
        # Autograd begins with the newest operation, so the gradient of the reconstruction loss is the first operand of
        # the sum, which takes its memory layout: the last digit of a bias's gradient depends on that.
        recon = with_gradient(losses.reconstruction, reconstruction, losses.gradients[0])
        return recon, adversarial, torch.zeros_like(losses.adversarial) if weight is None else weight

    def update_discriminator(
        self, batch: Mapping[str, Any], step: int, fakes: Sequence[Tensor], *, with_norm: bool = True
    ) -> Update:
        """One update of the discriminator, and of LeCam's averages, on the images and their reconstructions `fakes`
        (b, c, h, w), one tensor per micro-batch. `with_norm` as in `Engine.step`. Collective."""
        # fp64, because the sums feed back into training: the order in which processes and micro-batches are added must
        # not change the result. A head that takes no part has no mean.
        shape, device = (2, self._heads), self._processes.device
        logit_sums = torch.full(shape, torch.nan, dtype=sum_dtype(device), device=device)
        micro_batches = self._divide(batch, step, self._discriminator)
        for index, (micro_batch, fake) in enumerate(zip(micro_batches, fakes, strict=True)):
            images, inputs = micro_batch.images, micro_batch.loss_inputs
            head_logits = heads_of(self._discriminator(torch.cat([images, fake]), **_double(inputs)))
            real_logits, fake_logits = zip(*(logits.chunk(2) for logits in head_logits), strict=True)
            loss = discr_loss = self._loss.discriminator(real_logits, fake_logits)
            side_means = (torch.stack([logits.mean() for logits in heads]) for heads in (real_logits, fake_logits))
            means = torch.stack([*side_means]).detach()
            if index == 0:
                logit_sums[:, : len(head_logits)] = 0.0
            logit_sums[:, : len(head_logits)] += means
            discr_real, discr_fake = means.mean(1)
            self._log(discr_loss=discr_loss, discr_real=discr_real, discr_fake=discr_fake)
            if self._config.lecam_weight:
                lecam = self.lecam(real_logits, fake_logits)
                loss = loss + self._config.lecam_weight * lecam
                self._log(lecam_loss=lecam)
            if self.has_penalty(step):
                penalty = self._penalty(images, fake, inputs)
                loss = loss + self._config.penalty_weight * penalty
                self._log(gradient_penalty=penalty)
            self._discriminator.backward(loss)
        update = self._discriminator.step(with_norm=with_norm)
        if self._config.lecam_weight:
            real_means, fake_means = self._batch_mean(logit_sums, self._discriminator)
            self.lecam.update(real_means, fake_means, update.skipped)
        return update

    def _penalty(self, images: Tensor, fake: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        with self._discriminator.twice_differentiable():
            if self._config.penalty == ZERO_CENTRED:
                return zero_centred_penalty(partial(self._discriminator, **_double(inputs)), images, fake)
            return gradient_penalty(partial(self._discriminator, **inputs), images)

    def _image_losses(self, out: Any, micro_batch: MicroBatch) -> _ImageLosses:
        """Losses of reconstructions and their gradients with respect to these. There is no backward pass through
        the generator."""
        with torch.enable_grad(), self._discriminator.frozen():
            fake = out.reconstruction.detach().requires_grad_()
            with self._discriminator.autocast():
                loss = recon = self._pixel_loss(fake, micro_batch.images)
                self._log(recon_loss=recon)
                if self._perceptual_loss is not None:
                    terms = self._perceptual_loss(fake, micro_batch.images, **micro_batch.loss_inputs)
                    loss = recon + weigh_perceptual(terms, self._config)
                    self._log(**terms)
            gradients, adversarial = [image_gradient(loss, fake)], loss.new_zeros(())
            if micro_batch.is_adversarial:
                with self._discriminator.autocast():
                    adversarial = self._loss.generator(self._discriminator.module(fake, **micro_batch.loss_inputs))
                gradients.append(image_gradient(adversarial, fake))
        last_layer_gradients = None
        if micro_batch.is_adversarial and self._config.gan_weight == ADAPTIVE:
            with torch.no_grad():
                to_last_layer = partial(self._generator.module.last_layer_gradient, out.features)
                last_layer_gradients = torch.stack([to_last_layer(gradient) for gradient in gradients])
        return _ImageLosses(loss.detach(), adversarial.detach(), gradients, last_layer_gradients)

    def _gan_weight(self, losses: Sequence[_ImageLosses]) -> Tensor:
        """Weight of the adversarial loss for the whole batch, 0-d. Collective if the weight is adaptive."""
        if isinstance(self._config.gan_weight, float):
            fixed_weight = self._config.gan_weight * self._config.gan_weight_scale
            return torch.full((), fixed_weight, device=self._processes.device)  # no copy: the host does not wait
        gradients = torch.stack([loss.last_layer_gradients for loss in losses if loss.last_layer_gradients is not None])
        gradient_sums = gradients.to(sum_dtype(gradients.device)).sum(0)
        mean_gradients = self._batch_mean(gradient_sums, self._generator).float()
        weight = adaptive_weight(mean_gradients[0], mean_gradients[1], self._config.gan_weight_max)
        return weight * self._config.gan_weight_scale

    def _batch_mean(self, micro_batch_sum: Tensor, engine: Any) -> Tensor:
        """The mean over the micro-batches of all processes, from the sum over those of this process, in fp64. It is
        divided once: a mean of means is rounded more often, so that it would depend on the number of processes, in
        fp32 too where the mean lies half-way between two numbers. Collective."""
        return self._processes.sum(micro_batch_sum) / (engine.grad_accum_steps * self._processes.world_size)

    def _divide(self, batch: Mapping[str, Any], step: int, engine: Any) -> Iterator[MicroBatch]:
        """The micro-batches of update `step` of an engine, the generator or the discriminator."""
        for loader_batch in engine.micro_batches(batch):
            generator_inputs = self._generator_inputs(loader_batch, step) if engine is self._generator else {}
            loss_inputs = self._loss_inputs(loader_batch, step)
            yield MicroBatch(self._images(loader_batch), generator_inputs, loss_inputs, self.is_adversarial(step))


def with_gradient(value: Tensor, output: Tensor, gradient: Tensor) -> Tensor:
    """`value` (0-d), whose gradient with respect to `output` is `gradient`, of the same shape as `output`."""
    surrogate = (output * gradient).sum()
    return value + (surrogate - surrogate.detach())


def _double(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs for the real images, followed by the same inputs for the generated images."""
    return {name: torch.cat([value, value]) for name, value in inputs.items()}
