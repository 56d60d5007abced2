"""Data sets, the order of samples, and the streams of batches that the scripts train on: see `tandem.data.sets`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.lazy import lazy_names

if TYPE_CHECKING:
    from .feed import Batch, to_unit_range
    from .sets import decoder_feed, image_data, sound_feed, video_data

__all__ = ["Batch", "decoder_feed", "image_data", "sound_feed", "to_unit_range", "video_data"]

__getattr__ = lazy_names(__name__, {
    "Batch": "feed", "decoder_feed": "sets", "image_data": "sets", "sound_feed": "sets", "to_unit_range": "feed",
    "video_data": "sets",
})  # fmt: skip
