"""Augmentation of the low-resolution pictures that a super-resolution network sees: the pictures that it is trained on
are perfect, those of the network before it are not (Ho et al. 2022, Cascaded Diffusion Models, section 4)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .schedule import Schedule


def blur(images: Tensor, sigma: Tensor, size: Tensor, largest: int) -> Tensor:
    """Gaussian blur of each image by its own kernel; edges are reflected.

    Args:
        images: (b, c, h, w).
        sigma: (b,), in pixels; 0 leaves an image bitwise as it is.
        size: int64 (b,), odd width of each kernel in pixels.
        largest: No size is above it; below twice the side of the images.
    """
    radius = largest // 2
    offsets = torch.arange(-radius, radius + 1, device=images.device)
    # The smallest normal number in place of 0: every tap but the middle one becomes exactly 0.
    taps = torch.exp(-(offsets / sigma.clamp_min(1e-18)[:, None]).square() / 2)
    taps = taps * (offsets.abs() <= size[:, None] // 2)
    taps = (taps / taps.sum(1, keepdim=True)).to(images.dtype)
    for axis in (2, 3):
        side = images.shape[axis]
        padded = F.pad(images, (0, 0, radius, radius) if axis == 2 else (radius, radius, 0, 0), mode="reflect")
        images = sum(
            (tap.view(-1, 1, 1, 1) * padded.narrow(axis, first, side) for first, tap in enumerate(taps.unbind(1))),
            start=torch.zeros_like(images),
        )
    return images


def augment(
    images: Tensor,
    schedule: Schedule | None = None,
    *,
    lowres_time: Tensor | None = None,
    lowres_noise: Tensor | None = None,
    blur_sigma: Tensor | None = None,
    blur_size: Tensor | None = None,
    largest_blur: int = 3,
) -> Tensor:
    """Low-resolution images (b, c, h, w) in [-1, 1], blurred, and with noise added, each as its own draws say.

    Args:
        schedule: Of the added noise. DALLE2-pytorch: "linear" with 1000 levels, of which sampling uses number 200.
        lowres_time: int64 levels (b,); None adds no noise.
        lowres_noise: Standard normal, like the images.
        blur_sigma, blur_size, largest_blur: As for `blur`; None leaves the images sharp.
    """
    if blur_sigma is not None:
        assert blur_size is not None
        images = blur(images, blur_sigma, blur_size, largest_blur)
    if lowres_time is not None:
        assert schedule is not None and lowres_noise is not None
        images = schedule.add_noise(images, lowres_noise, lowres_time)
    return images
