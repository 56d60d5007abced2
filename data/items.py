"""What fields take out of the items of a user's own dataset (`--dataset`), and what they say of others."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from .bad_samples import NotASample
from .decoding.sounds import SAMPLE_RATES
from .decoding.texts import Texts, texts_of_object
from .records.own import as_array, as_bytes, part_of, shown
from .records.record import Entry

IMAGE_NAMES = ("image", "img")
_MOST_CHANNELS = 64
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


def refused(found: Any, expected: str) -> NotASample:
    """The error for an item of a user's dataset that is none that the script trains on: what follows its name."""
    return NotASample(f"is {shown(found)}; it has to be {expected}")


def image_of(item: Any) -> Image.Image:
    """The image of an item."""
    picture = _picture_of(part_of(item, *IMAGE_NAMES))
    if picture is None:
        raise refused(item, _IMAGE)
    return picture


class Video(NamedTuple):
    """The frames (t, c, h, w) of an item, c 1, 3 or 4, uint8 or floats."""

    item: Any
    frames: np.ndarray

    def picture(self, number: int) -> Image.Image:
        """A frame."""
        picture = _picture_of(self.frames[number])
        if picture is None:
            raise refused(part_of(self.item, "video"), _CLIP)
        return picture

    @property
    def fps(self) -> float:
        """Frames per second, which an item has to state for --fps alone."""
        fps = part_of(self.item, "fps", place=None)
        if not (isinstance(fps, (int, float, np.number)) and 0 < float(fps) < math.inf):
            raise refused(self.item, 'for --fps, a mapping with a "video" and its "fps", above 0')
        return float(fps)


def video_of(item: Any) -> Video:
    """The video of an item."""
    frames = as_array(part_of(item, "video"))
    if frames is None or frames.ndim != 4 or 0 in frames.shape:
        raise refused(item, _CLIP)
    return Video(item, frames)


def sound_of(item: Any) -> Entry:
    """The sound of an item of a user's dataset as a file of floats in memory, of which clips are cut as of any other.
    A waveform and its rate are parts of the item, or the "array" and "sampling_rate" of its "audio"."""
    import soundfile

    waveform: Any = part_of(item, "waveform", "audio")
    rate: Any = part_of(item, "sample_rate", "sampling_rate", place=1)
    if isinstance(waveform, Mapping):  # as the library datasets decodes a sound
        waveform, rate = waveform.get("array"), waveform.get("sampling_rate")
    array = as_array(waveform)
    rate = rate.item() if hasattr(rate, "item") and getattr(rate, "size", 1) == 1 else rate
    least, most = SAMPLE_RATES
    is_rate = isinstance(rate, int) and not isinstance(rate, bool) and least <= rate <= most
    if array is None or array.dtype.kind != "f" or array.ndim not in (1, 2) or not is_rate:
        raise refused(waveform if is_rate and array is not None else item, _SOUND)
    if array.ndim == 2 and array.shape[0] > _MOST_CHANNELS:
        raise refused(array, "(channels, samples), channels first")
    if 0 in array.shape:
        raise ValueError("it holds no sound")
    content = io.BytesIO()
    soundfile.write(content, array.astype(np.float32).T, rate, format="WAV", subtype="FLOAT")
    return Entry.in_memory(content.getbuffer(), "")


def texts_of(item: Any) -> Texts:
    """The texts of an item of a user's dataset."""
    if isinstance(item, (tuple, list)):
        item = {"caption": item[2] if len(item) > 2 else None, "label": item[3] if len(item) > 3 else None}
    if not isinstance(item, Mapping):
        raise refused(item, _SOUND)
    try:
        return texts_of_object({key: list(value) if isinstance(value, tuple) else value for key, value in item.items()})
    except ValueError:
        raise refused(item, _SOUND) from None


def caption_of(item: Any) -> str:
    """The caption of an item of a user's dataset: of a tuple of an image and its class there is none."""
    caption = part_of(item, "caption", "text", "captions", place=1)
    if isinstance(caption, (list, tuple)):
        caption = caption[0] if caption else None
    if isinstance(item, (tuple, list)) and not isinstance(caption, str):
        caption = None
    if not (caption is None or isinstance(caption, str)):
        raise refused(item, 'one whose "caption" is a text')
    return " ".join((caption or "").split())


def array_of(item: Any, name: str, dimensions: int) -> np.ndarray | None:
    """The array of floats of this name in an item, None if it has none. `dimensions`: 1 or 2."""
    if isinstance(item, Mapping) and item.get(name) is None:
        return None
    array = as_array(item.get(name) if isinstance(item, Mapping) else None)
    if array is None or array.dtype.kind != "f" or array.ndim != dimensions or 0 in array.shape:
        raise without_array(item, name, dimensions)
    return array


def without_array(item: Any, name: str, dimensions: int) -> NotASample:
    """The error for an item without this array."""
    form = {1: "(d,)", 2: "(tokens, d)"}[dimensions]
    return refused(item, f'a mapping with an "image" and a "{name}", a tensor or array of floats {form}')


def _picture_of(part: Any) -> Image.Image | None:
    """A PIL image of a PIL image, or of a tensor or array (c, h, w); None for anything else."""
    if isinstance(part, Image.Image):
        return part
    array = as_array(part)
    if array is None or array.ndim != 3 or array.shape[0] not in (1, 3, 4) or 0 in array.shape:
        return None
    pixels = as_bytes(array)
    if pixels is None:
        return None
    return Image.fromarray(np.ascontiguousarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)))
