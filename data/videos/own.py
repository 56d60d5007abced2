"""Videos of a user's own dataset."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from ..hashing import Draws
from ..images.decoding import decode_picture, randomly_flipped
from ..images.own import picture_of
from ..own import OwnData, OwnDataset, as_array, part_of
from .decoding import ClipDecoder

_EXPECTED = (
    "a tensor or array (frames, channels, height, width) of 1, 3 or 4 channels, uint8 or floats from 0 to 1; or a "
    'mapping with such a "video", or a tuple that begins with one'
)


class OwnVideos:
    """The videos of a user's own dataset. See `Videos` for the methods.

    An item is a uint8 or float tensor or array (t, c, h, w) with c 1, 3 or 4, floats in [0, 1]; or a mapping that has
    one as "video" (and, for --fps, its frames per second as "fps"), or a tuple that begins with one. Clips are cut as
    of a file: only the frames of a clip are resized.
    """

    def __init__(self, data: OwnData, clips: ClipDecoder, *, flip: bool = False, seed: int = 0) -> None:
        self._items, self.clips, self._flip, self._seed = OwnDataset(data), clips, flip, seed
        self.describe, self.name, self.fingerprint = self._items.describe, self._items.name, self._items.fingerprint

    def __len__(self) -> int:
        return len(self._items)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        item = self._items.item(index, epoch, augment)
        video = as_array(part_of(item, "video"))
        if video is None or video.ndim != 4 or 0 in video.shape:
            raise self._items.refuse(index, item, _EXPECTED)
        share = Draws("clip", self._seed, epoch, index).uniform() if augment else 0.5
        pictures = [picture_of(video[number]) for number in self._numbers(len(video), item, index, share)]
        if any(picture is None for picture in pictures):
            raise self._items.refuse(index, part_of(item, "video"), _EXPECTED)
        size, cut = self.clips.image_size, self.clips.crop.cut(epoch, index) if augment else None
        frames = [decode_picture(each, size, 3, cut=cut).permute(1, 2, 0).numpy() for each in pictures if each]
        clip = self.clips.filled(frames)
        return randomly_flipped(clip, self._seed, epoch, index) if self._flip and augment else clip

    def _numbers(self, n: int, item: Any, index: int, share: float) -> list[int]:
        """Which of n frames are those of a clip; fewer than num_frames if there are no more."""
        step = float(self.clips.frame_stride)
        if self.clips.fps:
            fps = part_of(item, "fps", place=None)
            if not (isinstance(fps, (int, float, np.number)) and 0 < float(fps) < math.inf):
                raise self._items.refuse(index, item, 'for --fps, a mapping with a "video" and its "fps", above 0')
            step = float(fps) / self.clips.fps
        count = min(self.clips.num_frames, math.ceil(n / step))
        start = max(0.0, n - 1 - (count - 1) * step) * share
        if not self.clips.fps:
            start = math.floor(start)
        return [min(n - 1, math.floor(start + number * step + 1e-6)) for number in range(count)]
