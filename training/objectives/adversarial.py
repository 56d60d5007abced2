"""Losses and regularisers of a generator and a discriminator, and the adaptive weight of the adversarial loss.

A positive logit means that the discriminator takes the image for real. Losses are fp32 means over all logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight


def hinge_discriminator_loss(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    """mean relu(1 - D(real)) + mean relu(1 + D(fake)), 0-d (Lim & Ye 2017; without the factor 1/2 of some
    implementations)."""
    return F.relu(1 - real_logits.float()).mean() + F.relu(1 + fake_logits.float()).mean()


def hinge_generator_loss(fake_logits: Tensor) -> Tensor:
    """-mean D(fake), 0-d (Lim & Ye 2017)."""
    return -fake_logits.float().mean()


def bce_discriminator_loss(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    """-mean log s(D(real)) - mean log(1 - s(D(fake))) with the logistic function s, 0-d (Goodfellow et al. 2014)."""
    return F.softplus(-real_logits.float()).mean() + F.softplus(fake_logits.float()).mean()


def bce_generator_loss(fake_logits: Tensor) -> Tensor:
    """-mean log s(D(fake)), 0-d: the non-saturating one (Goodfellow et al. 2014, section 3)."""
    return F.softplus(-fake_logits.float()).mean()


class AdversarialLoss(NamedTuple):
    """A pair of losses that belong together."""

    discriminator: Callable[[Tensor, Tensor], Tensor]  # logits of real and of generated images -> loss, 0-d
    generator: Callable[[Tensor], Tensor]  # logits of generated images -> loss, 0-d


ADVERSARIAL_LOSSES = {
    "hinge": AdversarialLoss(hinge_discriminator_loss, hinge_generator_loss),
    "bce": AdversarialLoss(bce_discriminator_loss, bce_generator_loss),
}


class LeCam(nn.Module):
    """LeCam regulariser (Tseng et al. 2021, section 3.2), clipped as in the authors' code.

    mean relu(D(real) - a_fake)^2 + mean relu(a_real - D(fake))^2, where a_real and a_fake are exponential moving
    averages of mean D(real) and mean D(fake), corrected for their start from 0 like Adam's moments. These averages are
    the state, which belongs into the checkpoint.

    The loss uses only averages of earlier updates, so that it does not depend on how a batch is split. It is 0 before
    the first call of `update`.

    Args:
        decay: Decay of the averages, in [0, 1).

    Raises:
        ValueError: the decay is outside of this range.
    """

    real: Tensor
    fake: Tensor
    mass: Tensor

    def __init__(self, decay: float = 0.999) -> None:
        super().__init__()
        if not 0 <= decay < 1:
            raise ValueError(f"decay {decay} of the LeCam averages: give a number from 0 up to but without 1")
        self.decay = decay
        for name in ("real", "fake", "mass"):  # the mass is the average of the constant 1, for the correction
            self.register_buffer(name, torch.zeros(()))

    def forward(self, real_logits: Tensor, fake_logits: Tensor) -> Tensor:
        """Logits of any shapes -> the regulariser, 0-d."""
        mass = self.mass.clamp_min(torch.finfo(self.mass.dtype).tiny)
        from_fake = F.relu(real_logits.float() - self.fake / mass).square().mean()
        to_real = F.relu(self.real / mass - fake_logits.float()).square().mean()
        return (from_fake + to_real) * (self.mass > 0)

    @torch.no_grad()
    def update(self, real_mean: Tensor, fake_mean: Tensor) -> None:
        """Add mean D(real) and mean D(fake), 0-d, over the *global* batch; once per update. If one of them is not
        finite, neither is added. Does not wait for the device."""
        usable = real_mean.isfinite() & fake_mean.isfinite()
        for average, value in ((self.real, real_mean), (self.fake, fake_mean), (self.mass, torch.ones_like(self.mass))):
            average.copy_(torch.where(usable, average.lerp(value.to(average), 1 - self.decay), average))


def gradient_penalty(discriminator: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """mean (|grad_x sum D(x)| - 1)^2 over the images, 0-d, with a graph to the discriminator's weights.

    The penalty of Gulrajani et al. 2017, at real images, without its usual weight 10. The discriminator runs in fp32
    even under autocast, because half precision loses gradients of small gradients.

    Args:
        discriminator: (b, c, h, w) -> logits. Images must not influence one another's logits.
        images: (b, c, h, w). No gradient reaches them.
    """
    with torch.autocast(images.device.type, enabled=False):
        x = images.detach().float().requires_grad_()
        (gradient,) = torch.autograd.grad(discriminator(x).sum(), x, create_graph=True)
        return (torch.linalg.vector_norm(gradient.flatten(1), dim=1) - 1).square().mean()


# Keeps the small gradient of a mean over many pixels from vanishing in fp16. A power of two causes no rounding.
_GRADIENT_SCALE = 2.0**12


def image_gradient(loss: Tensor, images: Tensor) -> Tensor:
    """Gradient of a loss (0-d) with respect to images (b, c, h, w), fp32, without a graph of its own."""
    (gradient,) = torch.autograd.grad(loss * _GRADIENT_SCALE, images)
    return gradient.float() / _GRADIENT_SCALE


def last_layer_gradient(features: Tensor, image_gradient: Tensor, weight_shape: tuple[int, ...]) -> Tensor:
    """A loss's gradient with respect to the last convolution's weight, without a backward pass through the network.

    Args:
        features: Input of the convolution, (b, i, h, w).
        image_gradient: The loss's gradient with respect to the output of the convolution, (b, o, h, w).
        weight_shape: (o, i, k, k), k odd; stride 1 and padding k // 2.

    Returns:
        fp32, of ``weight_shape``, detached; a sum over the images, like autograd's.

    Raises:
        ValueError: k is even, so that no padding keeps the size of an image.
    """
    kernel = weight_shape[-1]
    if kernel % 2 == 0:
        raise ValueError(f"a last convolution of side {kernel}: only odd sides keep the size of an image")
    with torch.no_grad(), torch.autocast(features.device.type, enabled=False):
        x, gradient = features.float(), image_gradient.float()
        return conv2d_weight(x, weight_shape, gradient, padding=kernel // 2)


def adaptive_weight(nll_gradient: Tensor, gan_gradient: Tensor, cap: float = 1e4, eps: float = 1e-4) -> Tensor:
    """min(|nll_gradient| / max(|gan_gradient|, eps), cap), 0-d and detached (Esser et al. 2021, equation 7).

    With this weight the adversarial loss has a gradient of the same norm at the last layer as the reconstruction loss.

    Args:
        nll_gradient: Gradient of the reconstruction (and perceptual) loss with respect to the last layer's weight.
        gan_gradient: Gradient of the adversarial loss with respect to the same weight. Both must be averaged over all
            processes and micro-batches, because an average of ratios is not the ratio of averages.
    """
    nll_norm, gan_norm = (torch.linalg.vector_norm(g.detach().float()) for g in (nll_gradient, gan_gradient))
    return (nll_norm / gan_norm.clamp_min(eps)).clamp_max(cap)
