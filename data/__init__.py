"""Datasets, the order of samples, and the streams of batches that the scripts train on."""

from __future__ import annotations

from .bad_samples import BadSample, BadSampleLog
from .feed import ImageFeed, to_unit_range
from .images import Images, open_images
from .order import Subset, split
from .stream import Batch, TrainingStream, ValidationStream

__all__ = [
    "BadSample",
    "BadSampleLog",
    "Batch",
    "ImageFeed",
    "Images",
    "Subset",
    "TrainingStream",
    "ValidationStream",
    "open_images",
    "split",
    "to_unit_range",
]
