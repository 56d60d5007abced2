"""Losses and regularisers of a generator and a discriminator, and the adaptive weight of the adversarial loss.

A positive logit means that the discriminator takes the image for real. Losses are fp32 means over all logits. A
discriminator with several heads returns a list with a tensor of logits for each head; its loss is the sum over them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Logits = Tensor | Sequence[Tensor]
"""Logits of any shape, or those of each head; the last heads may be missing in an update."""


def heads_of(logits: Logits) -> list[Tensor]:
    """The logits of each head."""
    return [logits] if isinstance(logits, Tensor) else list(logits)


def _sum_over_heads(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a loss of one head's logits also take those of several heads, and return the sum of their losses."""

    @functools.wraps(loss)
    def summed_loss(*logits: Logits) -> Tensor:
        return torch.stack([loss(*head_logits) for head_logits in zip(*map(heads_of, logits), strict=True)]).sum()

    return summed_loss


@_sum_over_heads
def hinge_discriminator_loss(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    """mean relu(1 - D(real)) + mean relu(1 + D(fake)), 0-d (Lim & Ye 2017, "Geometric GAN"; without the factor 1/2 of
    some implementations)."""
    return F.relu(1 - real_logits.float()).mean() + F.relu(1 + fake_logits.float()).mean()


@_sum_over_heads
def hinge_generator_loss(fake_logits: Tensor) -> Tensor:
    """-mean D(fake), 0-d (Lim & Ye 2017)."""
    return -fake_logits.float().mean()


@_sum_over_heads
def bce_discriminator_loss(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    """-mean log s(D(real)) - mean log(1 - s(D(fake))) with the logistic function s, 0-d (Goodfellow et al. 2014)."""
    return F.softplus(-real_logits.float()).mean() + F.softplus(fake_logits.float()).mean()


@_sum_over_heads
def bce_generator_loss(fake_logits: Tensor) -> Tensor:
    """-mean log s(D(fake)), 0-d: the non-saturating loss (Goodfellow et al. 2014, section 3)."""
    return F.softplus(-fake_logits.float()).mean()


@_sum_over_heads
def softplus_generator_loss(fake_logits: Tensor) -> Tensor:
    """mean over the images of softplus(-mean D(fake)), 0-d, where the inner mean is over the logits of an image
    (`non_saturate_gen_loss` of Open-MAGVIT2). The gradient for an image shrinks as the image deceives the
    discriminator; the gradient of `hinge_generator_loss` does not."""
    return F.softplus(-fake_logits.float().reshape(len(fake_logits), -1).mean(1)).mean()


class AdversarialLoss(NamedTuple):
    """A pair of losses that belong together."""

    discriminator: Callable[[Logits, Logits], Tensor]  # logits of real and of generated images -> loss, 0-d
    generator: Callable[[Logits], Tensor]  # logits of generated images -> loss, 0-d


ADVERSARIAL_LOSSES = {
    "hinge": AdversarialLoss(hinge_discriminator_loss, hinge_generator_loss),
    "bce": AdversarialLoss(bce_discriminator_loss, bce_generator_loss),
    "hinge_softplus": AdversarialLoss(hinge_discriminator_loss, softplus_generator_loss),
}


class LeCam(nn.Module):
    """LeCam regulariser (Tseng et al. 2021, section 3.2), clipped as in the authors' code.

    mean relu(D(real) - a_fake)^2 + mean relu(a_real - D(fake))^2, where a_real and a_fake are exponential moving
    averages of mean D(real) and mean D(fake), corrected for their start from 0 like Adam's moments. These averages are
    the module's state. Every head has its own, and the loss is summed over the heads.

    The loss uses only averages of earlier updates, so that it does not depend on how a batch is split. For a head it is
    0 before the first call of `update` that holds this head.

    Args:
        decay: Decay of the averages, in [0, 1).
        heads: Number of heads of the discriminator.
    """

    real: Tensor
    fake: Tensor
    mass: Tensor

    def __init__(self, decay: float = 0.999, heads: int = 1) -> None:
        super().__init__()
        self.decay = decay
        for name in ("real", "fake", "mass"):  # the mass is the average of the constant 1, for the correction
            self.register_buffer(name, torch.zeros(() if heads == 1 else heads))

    def forward(self, real_logits: Logits, fake_logits: Logits) -> Tensor:
        """Logits of any shapes -> the regulariser, 0-d."""
        head_losses = []
        for head, (real, fake) in enumerate(zip(heads_of(real_logits), heads_of(fake_logits), strict=True)):
            a_real, a_fake, mass = (average.flatten()[head] for average in (self.real, self.fake, self.mass))
            divisor = mass.clamp_min(torch.finfo(mass.dtype).tiny)
            real_term = F.relu(real.float() - a_fake / divisor).square().mean()
            fake_term = F.relu(a_real / divisor - fake.float()).square().mean()
            head_losses.append((real_term + fake_term) * (mass > 0))
        return torch.stack(head_losses).sum()

    @torch.no_grad()
    def update(self, real_mean: Tensor, fake_mean: Tensor, skipped: Tensor | None = None) -> None:
        """Add mean D(real) and mean D(fake) over the *global* batch, 0-d or (heads,); once per update. If a mean of a
        head is not finite, such as NaN for a head that took no part, this head's averages do not change; nor do
        those of any head if the optimizer skipped the update (0-d bool). Does not wait for the device."""
        real_mean, fake_mean = (mean.reshape(self.mass.shape) for mean in (real_mean, fake_mean))
        is_usable = real_mean.isfinite() & fake_mean.isfinite()
        if skipped is not None:
            is_usable = is_usable & ~skipped
        for average, value in ((self.real, real_mean), (self.fake, fake_mean), (self.mass, torch.ones_like(self.mass))):
            average.copy_(torch.where(is_usable, average.lerp(value.to(average), 1 - self.decay), average))


def gradient_penalty(discriminator: Callable[[Tensor], Logits], images: Tensor) -> Tensor:
    """mean (|grad_x sum D(x)| - 1)^2 over the images, 0-d, with a graph to the discriminator's weights; summed over the
    heads.

    The penalty of Gulrajani et al. 2017, "Improved training of Wasserstein GANs", equation 3, without its usual weight
    10, and at real images instead of points between real and generated ones, as Muse's public trainer has it. The
    discriminator runs in fp32 even under autocast, because half precision loses gradients of small gradients.

    Args:
        discriminator: (b, c, h, w), or (b, c, f, h, w) for videos -> logits. Images must not influence one another's
            logits.
        images: (b, c, h, w) or (b, c, f, h, w). No gradient reaches them.
    """
    with torch.autocast(images.device.type, enabled=False):
        x = images.detach().float().requires_grad_()
        gradients = (_gradient(logits.sum(), x) for logits in heads_of(discriminator(x)))
        norms = [torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients]
        return torch.stack([(norm - 1).square().mean() for norm in norms]).sum()


def zero_centred_penalty(discriminator: Callable[[Tensor], Logits], real: Tensor, fake: Tensor) -> Tensor:
    """E |grad_x D(x)|^2 at real images + E |grad_x D(x)|^2 at generated ones, 0-d, with a graph to the discriminator's
    weights; summed over the heads.

    R1 + R2 of Mescheder et al. 2018, "Which training methods for GANs do actually converge?", section 4.1, without
    their factor gamma / 2. D(x) is the mean of an image's logits, so that the penalty does not grow with their number.
    Runs in fp32. `gradient_penalty` says what the discriminator and the images must be. The discriminator is called
    once, on the real images followed by the generated ones.
    """
    with torch.autocast(real.device.type, enabled=False):
        x = torch.cat([real, fake]).detach().float().requires_grad_()
        head_penalties = []
        for logits in heads_of(discriminator(x)):
            squares = _gradient(logits.reshape(len(x), -1).mean(1).sum(), x).square().flatten(1).sum(1)
            head_penalties.append(squares[: len(real)].mean() + squares[len(real) :].mean())
        return torch.stack(head_penalties).sum()


def _gradient(value: Tensor, x: Tensor) -> Tensor:
    """The gradient of a value (0-d) with respect to x, which can be differentiated again."""
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    return gradient


# Keeps the small gradient of a mean over many pixels from vanishing in fp16. A power of two causes no rounding.
_GRADIENT_SCALE = 2.0**12


def image_gradient(loss: Tensor, images: Tensor) -> Tensor:
    """Gradient of a loss (0-d) with respect to images (b, c, h, w), fp32; it cannot be differentiated again."""
    (gradient,) = torch.autograd.grad(loss * _GRADIENT_SCALE, images)
    return gradient.float() / _GRADIENT_SCALE


def adaptive_weight(
    reconstruction_gradient: Tensor, adversarial_gradient: Tensor, cap: float = 1e4, eps: float = 1e-4
) -> Tensor:
    """min(|r| / max(|a|, eps), cap) of the norms of two gradients r and a, 0-d and detached: the lambda of Esser et al.
    2021, equation 7, but with max(|a|, eps) instead of |a| + 1e-6, and with the cap of the authors' code.

    With this weight the adversarial loss has a gradient of the same norm at the last layer as the reconstruction loss.

    Args:
        reconstruction_gradient: That of the reconstruction and perceptual loss with respect to the last layer's weight.
        adversarial_gradient: That of the adversarial loss with respect to the same weight. Both must be averaged over
            all processes and micro-batches: an average of ratios is not the ratio of averages.
    """
    gradients = (reconstruction_gradient, adversarial_gradient)
    reconstruction_norm, adversarial_norm = (torch.linalg.vector_norm(x.detach().float()) for x in gradients)
    return (reconstruction_norm / adversarial_norm.clamp_min(eps)).clamp_max(cap)
