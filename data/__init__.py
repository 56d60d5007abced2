"""Datasets, the order of samples, and the streams of batches that the scripts train on.

A module is imported when one of its names is first asked for, so that --help can read `data.flags` without PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bad_samples import BadSample, BadSampleLog
    from .feed import Feed, ImageBatch, image_feed, to_unit_range
    from .images.conditioned import ConditionedBatch, decoder_feed
    from .images.sets import Images, open_images
    from .order import Subset, split
    from .sounds.captioned import SoundBatch, sound_feed
    from .sounds.sets import Sounds, open_sounds
    from .stream import Batch, TrainingStream, ValidationStream
    from .tokenizers import Tokenizer, open_tokenizer
    from .videos.sets import VideoBatch, open_videos, video_feed

__all__ = [
    "BadSample", "BadSampleLog", "Batch", "ConditionedBatch", "Feed", "ImageBatch", "Images", "SoundBatch", "Sounds",
    "Subset", "Tokenizer", "TrainingStream", "ValidationStream", "VideoBatch", "decoder_feed", "image_feed",
    "open_images", "open_sounds", "open_tokenizer", "open_videos", "sound_feed", "split", "to_unit_range", "video_feed",
]  # fmt: skip

_NAMES = {
    "bad_samples": ("BadSample", "BadSampleLog"), "feed": ("Feed", "ImageBatch", "image_feed", "to_unit_range"),
    "images.conditioned": ("ConditionedBatch", "decoder_feed"), "images.sets": ("Images", "open_images"),
    "order": ("Subset", "split"), "sounds.captioned": ("SoundBatch", "sound_feed"),
    "sounds.sets": ("Sounds", "open_sounds"), "stream": ("Batch", "TrainingStream", "ValidationStream"),
    "tokenizers": ("Tokenizer", "open_tokenizer"), "videos.sets": ("VideoBatch", "open_videos", "video_feed"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
