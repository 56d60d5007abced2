"""Pictures of other sizes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def resized(images: Tensor, side: int) -> Tensor:
    """Images (b, c, h, w) -> (b, c, side, side), linearly, without aliasing."""
    if images.shape[-2:] == (side, side):
        return images
    return F.interpolate(images, size=(side, side), mode="bilinear", antialias=True)


def cropped(images: Tensor, places: Tensor | None, side: int) -> Tensor:
    """Crops (b, c, side, side) of images (b, c, h, w); each begins at its own shares, in [0, 1), of the places down and
    across where a crop fits: (b, 2), on the CPU. Without places they stay whole."""
    if places is None:
        return images
    height, width = images.shape[-2:]
    sizes = torch.tensor([height - side + 1, width - side + 1])
    begins = (places * sizes).long().tolist()
    crops = [image[:, top : top + side, left : left + side] for image, (top, left) in zip(images, begins, strict=True)]
    return torch.stack(crops)
