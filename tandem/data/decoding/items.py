"""The parts of the items of a user's dataset that fields read, and the errors for wrong items."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from tandem.data.bad_samples import BadDatasetItem
from tandem.data.sources.record import FileRef
from tandem.data.sources.user_dataset import as_array, describe_object

from .sounds import SAMPLE_RATES
from .texts import Texts, normalize_text, texts_of_object

IMAGE_NAMES = ("image", "img")
ARRAY_SHAPES = {1: "(d,)", 2: "(tokens, d)"}  # of stored embeddings, by dimensions
_MOST_CHANNELS = 64
# What an item has to be, for `item_error`.
_IMAGE = (
    "a PIL image, or a tensor or array of uint8 or floats from 0 to 1 whose 1, 3 or 4 channels come first (c, h, w); "
    'or a mapping with such an "image", or a tuple that begins with one'
)
_CLIP = (
    "a tensor or array (frames, channels, height, width) of 1, 3 or 4 channels, uint8 or floats from 0 to 1; or a "
    'mapping with such a "video", or a tuple that begins with one'
)
_SOUND = (
    'a tuple (waveform, sample rate, caption or captions), or a mapping with "waveform", "sample_rate" and "caption" '
    'or "captions": the waveform a tensor or array of floats, (samples,) or (channels, samples), the rate a whole '
    f"number of Hz from {SAMPLE_RATES[0]} to {SAMPLE_RATES[1]}, a caption a text"
)


def item_part(item: Any, *names: str, position: int | None = 0) -> Any:
    """A part of an item: of a mapping the value of the first key of `names` that exists; of a tuple the entry at
    `position`; of any other item the item itself, at position 0. None if there is no such part."""
    if isinstance(item, Mapping):
        return next((item[name] for name in names if item.get(name) is not None), None)
    if isinstance(item, (tuple, list)):
        return None if position is None or len(item) <= position else item[position]
    return item if position == 0 else None


def as_uint8(array: np.ndarray) -> np.ndarray | None:
    """Pixels as uint8: uint8 unchanged, floats in [0, 1] converted; None for others."""
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f" or not array.size:
        return None
    # An interpolation may exceed the range a little; NaN fails both comparisons.
    if not (float(array.min()) >= -1e-3 and float(array.max()) <= 1 + 1e-3):
        return None
    return np.rint(array.clip(0, 1) * 255).astype(np.uint8)


def item_error(value: Any, expected: str) -> BadDatasetItem:
    """The error for an item of a user's dataset that the script cannot train on; its text follows the item's name."""
    return BadDatasetItem(f"is {describe_object(value)}; it has to be {expected}")


def image_of(item: Any) -> Image.Image:
    return _to_picture(item_part(item, *IMAGE_NAMES), item, _IMAGE)


def channels_of(item: Any) -> Image.Image | np.ndarray:
    """The picture of an item for `decode_channels`."""
    part = item_part(item, *IMAGE_NAMES)
    array = part if isinstance(part, Image.Image) else as_array(part)
    if array is None:
        raise item_error(item, "a PIL image, or a tensor or array whose channels come first (c, h, w)")
    return array


class VideoItem(NamedTuple):
    """An item that is a video, and its frames (t, c, h, w), uint8 or floats; for `picture`, c is 1, 3 or 4."""

    item: Any
    frames: np.ndarray

    def picture(self, number: int) -> Image.Image:
        return _to_picture(self.frames[number], item_part(self.item, "video"), _CLIP)

    @property
    def fps(self) -> float:
        """Frames per second, which an item has to state only for --fps."""
        fps = item_part(self.item, "fps", position=None)
        if not (isinstance(fps, (int, float, np.number)) and 0 < float(fps) < math.inf):
            raise item_error(self.item, 'for --fps, a mapping with a "video" and its "fps", above 0')
        return float(fps)


def video_of(item: Any) -> VideoItem:
    frames = as_array(item_part(item, "video"))
    if frames is None or frames.ndim != 4 or 0 in frames.shape:
        raise item_error(item, _CLIP)
    return VideoItem(item, frames)


def sound_of(item: Any) -> FileRef:
    """The sound of an item of a user's dataset, as a WAV file of floats in memory. Waveform and rate are parts of the
    item, or the "array" and "sampling_rate" of its "audio"."""
    import soundfile

    waveform: Any = item_part(item, "waveform", "audio")
    rate: Any = item_part(item, "sample_rate", "sampling_rate", position=1)
    if isinstance(waveform, Mapping):  # as Hugging Face's library `datasets` decodes a sound
        waveform, rate = waveform.get("array"), waveform.get("sampling_rate")
    array = as_array(waveform)
    rate = rate.item() if hasattr(rate, "item") and getattr(rate, "size", 1) == 1 else rate
    least, most = SAMPLE_RATES
    is_rate = isinstance(rate, int) and not isinstance(rate, bool) and least <= rate <= most
    if array is None or array.dtype.kind != "f" or array.ndim not in (1, 2) or not is_rate:
        raise item_error(waveform if is_rate and array is not None else item, _SOUND)
    if array.ndim == 2 and array.shape[0] > _MOST_CHANNELS:
        raise item_error(array, "(channels, samples), channels first")
    if 0 in array.shape:
        raise ValueError("it holds no sound")
    content = io.BytesIO()
    soundfile.write(content, array.astype(np.float32).T, rate, format="WAV", subtype="FLOAT")
    return FileRef.in_memory(content.getbuffer(), "")


def texts_of(item: Any) -> Texts:
    """The texts of an item of a user's dataset."""
    if isinstance(item, (tuple, list)):
        item = {"caption": item[2] if len(item) > 2 else None, "label": item[3] if len(item) > 3 else None}
    if not isinstance(item, Mapping):
        raise item_error(item, _SOUND)
    try:
        return texts_of_object({key: list(value) if isinstance(value, tuple) else value for key, value in item.items()})
    except ValueError:
        raise item_error(item, _SOUND) from None


def caption_of(item: Any) -> str:
    """The caption of an item of a user's dataset; "" for a tuple of an image and its class."""
    caption = item_part(item, "caption", "text", "captions", position=1)
    if isinstance(caption, (list, tuple)):
        caption = caption[0] if caption else None
    if isinstance(item, (tuple, list)) and not isinstance(caption, str):
        caption = None
    if not (caption is None or isinstance(caption, str)):
        raise item_error(item, 'one whose "caption" is a text')
    return normalize_text(caption or "")


def array_of(item: Any, name: str, dimensions: int) -> np.ndarray | None:
    """The array of floats of this name in an item, None for a mapping without it. `dimensions`: 1 or 2. Raises
    `missing_array_error` for any other item."""
    part = item_part(item, name, position=None)
    if part is None and isinstance(item, Mapping):
        return None
    array = as_array(part)
    if array is None or array.dtype.kind != "f" or array.ndim != dimensions or 0 in array.shape:
        raise missing_array_error(item, name, dimensions)
    return array


def missing_array_error(item: Any, name: str, dimensions: int) -> BadDatasetItem:
    """The error for an item without this array."""
    form = ARRAY_SHAPES[dimensions]
    return item_error(item, f'a mapping with an "image" and a "{name}", a tensor or array of floats {form}')


def _to_picture(part: Any, value: Any, expected: str) -> Image.Image:
    """PIL image, or tensor or array (c, h, w) -> PIL image. For anything else, raises `item_error` with `value` and
    `expected`."""
    if isinstance(part, Image.Image):
        return part
    array, pixels = as_array(part), None
    if array is not None and array.ndim == 3 and array.shape[0] in (1, 3, 4) and 0 not in array.shape:
        pixels = as_uint8(array)
    if pixels is None:
        raise item_error(value, expected)
    return Image.fromarray(np.ascontiguousarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)))
