"""Data sets, the order of samples, and the streams of batches that the scripts train on."""

from __future__ import annotations

from .bad_samples import BadSample, BadSampleLog
from .feed import Feed, to_unit_range
from .order import Subset, split
from .samples import Samples
from .sets import (
    ConditionedBatch,
    ImageBatch,
    SoundBatch,
    VideoBatch,
    decoder_feed,
    image_feed,
    open_conditioned,
    open_images,
    open_sounds,
    open_videos,
    sound_feed,
    video_feed,
    widths_of,
)
from .stream import TrainingStream, ValidationStream
from .tokenizers import Tokenizer, open_tokenizer

__all__ = [
    "BadSample", "BadSampleLog", "ConditionedBatch", "Feed", "ImageBatch", "Samples", "SoundBatch", "Subset",
    "Tokenizer", "TrainingStream", "ValidationStream", "VideoBatch", "decoder_feed", "image_feed", "open_conditioned",
    "open_images", "open_sounds", "open_tokenizer", "open_videos", "sound_feed", "split", "to_unit_range", "video_feed",
    "widths_of",
]  # fmt: skip
