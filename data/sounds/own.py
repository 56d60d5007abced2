"""Sounds of a user's own dataset."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from ..files.source import Source
from ..own import OwnData, OwnDataset, as_array, part_of
from .decoding import SAMPLE_RATES, ClipDecoder
from .sidecars import NO_CAPTION, Texts, texts_of_object

_MOST_CHANNELS = 64
_EXPECTED = (
    'a tuple (waveform, sample rate, caption or captions), or a mapping with "waveform", "sample_rate" and "caption" '
    'or "captions": the waveform a tensor or array of floats, (samples,) or (channels, samples), the rate a whole '
    f"number of Hz from {SAMPLE_RATES[0]} to {SAMPLE_RATES[1]}, a caption a text"
)


class OwnSounds:
    """The sounds of a user's own dataset. See `Sounds` for the methods.

    An item is a tuple: waveform, sample rate, caption or captions and perhaps label; or a mapping with "waveform",
    "sample_rate" and what a .json beside a sound has (`texts_of_object`), or with an "audio" that is {"array":
    waveform, "sampling_rate": rate}. A waveform is float, (n,) or (channels, n). Clips are cut as of a file.
    """

    def __init__(self, data: OwnData, clips: ClipDecoder) -> None:
        self._items, self._clips = OwnDataset(data), clips
        self.describe, self.fingerprint = self._items.describe, self._items.fingerprint

    def __len__(self) -> int:
        return len(self._items)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        return self.read(index, epoch, augment)[1]

    def texts(self, index: int) -> Texts:
        return self._texts(self._items.item(index), index)

    def read(self, index: int, epoch: int = 0, augment: bool = False) -> tuple[Texts, Tensor]:
        """The texts and the clip, which come out of one item."""
        item = self._items.item(index, epoch, augment)
        texts = self._texts(item, index)
        return texts, self._clips.load(self._file_of(item, index), index, epoch, augment)

    def _texts(self, item: Any, index: int) -> Texts:
        if isinstance(item, (tuple, list)):
            label = item[3] if len(item) > 3 else None
            item = {"caption": item[2] if len(item) > 2 else None, "label": label}
        if not isinstance(item, Mapping):
            raise self._items.refuse(index, item, _EXPECTED)
        listed = {key: list(value) if isinstance(value, tuple) else value for key, value in item.items()}
        try:
            texts = texts_of_object(listed)
        except ValueError:
            raise self._items.refuse(index, item, _EXPECTED) from None
        if not texts.captions:
            raise ValueError(NO_CAPTION)
        return texts

    def _file_of(self, item: Any, index: int) -> Source:
        """The sound of an item as a file of floats in memory, of which clips are cut as of any other."""
        import soundfile

        waveform: Any = part_of(item, "waveform", "audio")
        rate: Any = part_of(item, "sample_rate", "sampling_rate", place=1)
        if isinstance(waveform, Mapping):  # as the library datasets decodes a sound
            waveform, rate = waveform.get("array"), waveform.get("sampling_rate")
        array = as_array(waveform)
        rate = rate.item() if hasattr(rate, "item") and getattr(rate, "size", 1) == 1 else rate
        is_rate = isinstance(rate, int) and not isinstance(rate, bool) and SAMPLE_RATES[0] <= rate <= SAMPLE_RATES[1]
        if array is None or array.dtype.kind != "f" or array.ndim not in (1, 2) or not is_rate:
            raise self._items.refuse(index, waveform if is_rate and array is not None else item, _EXPECTED)
        if array.ndim == 2 and array.shape[0] > _MOST_CHANNELS:
            raise self._items.refuse(index, array, "(channels, samples), channels first")
        if 0 in array.shape:
            raise ValueError("it holds no sound")
        content = io.BytesIO()
        soundfile.write(content, array.astype(np.float32).T, rate, format="WAV", subtype="FLOAT")
        return Source.in_memory(content.getbuffer(), self.describe(index))
