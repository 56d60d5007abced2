"""Images or their latents, shrunk and turned: what an autoencoder with equivariant latents does to a latent as
to its image (Kouzelis et al. 2025, "EQ-VAE", arXiv:2502.09509)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Transform(NamedTuple):
    """Shrinks samples (b, c, ..., h, w), whose sides become `quarters` / 4 of themselves, and turns each of them
    counter-clockwise by its number of `turns`, int64 (b,) on the samples' device, times 90 degrees: samples that are
    not square by 0 or 2, so that all of a batch keep one shape."""

    quarters: int
    turns: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """(b, c, ..., h, w) -> (b, c, ..., h', w'). Samples are shrunk bilinearly between the nearest places, as the
        authors of EQ-VAE do it."""
        samples, turns = x, self.turns.view(-1, *[1] * (x.dim() - 1))
        numbers = (1, 2, 3) if x.shape[-2] == x.shape[-1] else (2,)
        for number in numbers:  # all turns of all samples: no graph of torch.compile depends on the drawn ones
            samples = torch.where(turns == number, torch.rot90(x, number, (-2, -1)), samples)
        if self.quarters == 4:
            return samples
        height, width = (side * self.quarters // 4 for side in x.shape[-2:])
        images = F.interpolate(samples.flatten(1, -3), size=(height, width), mode="bilinear", align_corners=False)
        return images.unflatten(1, samples.shape[1:-2])  # frames were channels


def possible_sizes(*sides: int) -> list[int]:
    """The `Transform.quarters` that leave latents of these sides a whole number of places, 2 at least, the largest
    first."""
    return [
        quarters
        for quarters in (4, 3, 2, 1)
        if quarters == 4 or all(side * quarters % 4 == 0 and side * quarters > 4 for side in sides)
    ]
