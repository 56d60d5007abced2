"""Datasets, the order of samples, and the streams of batches that the scripts train on."""

from __future__ import annotations

from .bad_samples import BadSample, BadSampleLog
from .feed import ImageFeed, to_unit_range
from .images.sets import Images, open_images
from .order import Subset, split
from .sounds.captioned import SoundBatch, SoundFeed
from .sounds.sets import Sounds, open_sounds
from .stream import Batch, TrainingStream, ValidationStream
from .tokenizers import Tokenizer, open_tokenizer

__all__ = [
    "BadSample",
    "BadSampleLog",
    "Batch",
    "ImageFeed",
    "Images",
    "SoundBatch",
    "SoundFeed",
    "Sounds",
    "Subset",
    "Tokenizer",
    "TrainingStream",
    "ValidationStream",
    "open_images",
    "open_sounds",
    "open_tokenizer",
    "split",
    "to_unit_range",
]
