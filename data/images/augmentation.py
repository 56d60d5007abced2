"""Random changes to an image, drawn from (seed, epoch, sample index) alone."""

from __future__ import annotations

from torch import Tensor

from ..hashing import derive_key


def randomly_flipped(image: Tensor, seed: int, epoch: int, index: int) -> Tensor:
    """(c, h, w), mirrored left to right in half of the draws."""
    return image.flip(-1) if derive_key("flip", seed, epoch, index) & 1 else image
