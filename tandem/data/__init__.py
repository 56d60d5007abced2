"""Data sets, the order of samples, and the streams of batches that the scripts train on: see `tandem.data.sets`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.lazy import lazy_names

if TYPE_CHECKING:
    from .feed import Batch, TrainingData, ValidationBatches, to_unit_range
    from .sets import decoder_data, image_data, sound_data, video_data, widths_of
    from .tokenizers import Tokenizer, open_tokenizer

__all__ = [
    "Batch", "Tokenizer", "TrainingData", "ValidationBatches", "decoder_data", "image_data", "open_tokenizer",
    "sound_data", "to_unit_range", "video_data", "widths_of",
]  # fmt: skip

__getattr__ = lazy_names(__name__, {
    "Batch": "feed", "Tokenizer": "tokenizers", "TrainingData": "feed", "ValidationBatches": "feed",
    "decoder_data": "sets", "image_data": "sets", "open_tokenizer": "tokenizers", "sound_data": "sets",
    "to_unit_range": "feed", "video_data": "sets", "widths_of": "sets",
})  # fmt: skip
