"""Datasets, the order of samples, and the streams of batches that the scripts train on."""

from __future__ import annotations

import torch
from torch import Tensor

from .bad_samples import BadSample, BadSampleLog
from .images import Images, open_images
from .order import Subset, split
from .stream import Batch, TrainingStream, ValidationStream

__all__ = [
    "BadSample",
    "BadSampleLog",
    "Batch",
    "Images",
    "Subset",
    "TrainingStream",
    "ValidationStream",
    "open_images",
    "split",
    "to_unit_range",
]


def to_unit_range(images: Tensor) -> Tensor:
    """uint8 in [0, 255] -> float32 in [0, 1], same shape and device."""
    return images.to(torch.float32).div_(255)
