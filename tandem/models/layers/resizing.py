"""Resizing and cropping images."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def resize_images(images: Tensor, side: int) -> Tensor:
    """Images (b, c, h, w) -> (b, c, side, side), bilinearly with antialiasing."""
    if images.shape[-2:] == (side, side):
        return images
    return F.interpolate(images, size=(side, side), mode="bilinear", antialias=True)


def crop_images(images: Tensor, places: Tensor | None, side: int) -> Tensor:
    """Crops (b, c, side, side) of images (b, c, h, w). ``places`` (b, 2), in [0, 1) and on the CPU, are the top and the
    left of each crop as fractions of the number of possible positions; None: the whole images."""
    if places is None:
        return images
    height, width = images.shape[-2:]
    num_positions = torch.tensor([height - side + 1, width - side + 1])
    corners = (places * num_positions).long().tolist()
    crops = [image[:, top : top + side, left : left + side] for image, (top, left) in zip(images, corners, strict=True)]
    return torch.stack(crops)
