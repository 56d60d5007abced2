"""Datasets, the order of samples, and the streams of batches that the scripts train on."""

from __future__ import annotations

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
