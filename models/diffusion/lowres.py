"""What makes the low-resolution pictures that a super-resolution network is trained on as bad as those that it gets
later, which the network before it draws (Ho et al. 2022, Cascaded Diffusion Models, section 4)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur of each image by a kernel of 3 x 3 pixels, as in DALLE2-pytorch; edges are reflected.

    Args:
        images: (b, c, h, w).
        sigma: (b,), in pixels; 0 leaves an image bitwise as it is.
    """
    offsets = torch.arange(-1, 2, device=images.device)
    # The smallest normal number in place of 0: every tap but the middle one becomes exactly 0.
    taps = torch.exp(-(offsets / sigma.clamp_min(1e-18)[:, None]).square() / 2)
    taps = (taps / taps.sum(1, keepdim=True)).to(images.dtype)
    for axis in (2, 3):
        side = images.shape[axis]
        if side == 1:  # all its neighbours are itself
            continue
        padded = F.pad(images, (0, 0, 1, 1) if axis == 2 else (1, 1, 0, 0), mode="reflect")
        images = sum(
            (tap.view(-1, 1, 1, 1) * padded.narrow(axis, first, side) for first, tap in enumerate(taps.unbind(1))),
            start=torch.zeros_like(images),
        )
    return images
