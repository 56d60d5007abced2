"""Images of a user's own dataset, and images of one with what a model is conditioned on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..bad_samples import Incomplete
from ..crops import CENTER, Crop
from ..own import OwnData, OwnDataset, as_array, as_bytes, part_of
from .decoding import decode_picture, randomly_flipped
from .embeddings import IMAGE, KINDS, TEXT, Kind

IMAGE_NAMES = ("image", "img")
_EXPECTED = (
    "a PIL image, or a tensor or array of uint8 or floats from 0 to 1 whose 1, 3 or 4 channels come first (c, h, w); "
    'or a mapping with such an "image", or a tuple that begins with one'
)


class OwnImages:
    """The images of a user's own dataset. See `Images` for the methods, and `ImageFiles` for the arguments.

    An item is a PIL image; or a uint8 or float tensor or array (c, h, w) with c 1, 3 or 4, floats in [0, 1]; or a
    mapping that has one as "image", or a tuple that begins with one. It is resized, cropped and flipped as that of a
    file.
    """

    def __init__(
        self, data: OwnData, *, image_size: int, channels: int = 3, flip: bool = False, seed: int = 0,
        enlarge: bool = True, crop: Crop = CENTER,
    ) -> None:  # fmt: skip
        self.items = OwnDataset(data)
        self.describe, self.name, self.fingerprint = self.items.describe, self.items.name, self.items.fingerprint
        self.image_size, self.channels, self.flip, self.seed = image_size, channels, flip, seed
        self.enlarge, self.crop = enlarge, crop

    def __len__(self) -> int:
        return len(self.items)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        return self.image(self.items.item(index, epoch, augment), index, epoch, augment)

    def image(self, item: Any, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        """The image of an item, as `load` gives it."""
        picture = picture_of(part_of(item, *IMAGE_NAMES))
        if picture is None:
            raise self.items.refuse(index, item, _EXPECTED)
        cut = self.crop.cut(epoch, index) if augment else None
        image = decode_picture(picture, self.image_size, self.channels, self.enlarge, cut)
        return randomly_flipped(image, self.seed, epoch, index) if self.flip and augment else image


def picture_of(part: Any) -> Image.Image | None:
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


class OwnConditionedImages:
    """Images of a user's own dataset with captions and embeddings; the same interface as `ConditionedImages`.

    An item is a mapping with "image" and, as the model takes them, "caption" (or "text"), "image_embed", (d,), and
    "text_encodings", (tokens, d); or a tuple of an image and a caption. The first item gives the widths.

    Args:
        takes: Which kinds of embeddings items have to hold.
        tokenize: Gives the tokens of captions, if embeddings are computed from these and the images.
        longest_text: Text encodings are padded to so many tokens, and may not have more.
    """

    shards = None
    has_captions = True

    def __init__(
        self, data: OwnData, *, image_size: int, takes: Mapping[str, bool], tokenize: Any = None,
        longest_text: int = 256, flip: bool = False, seed: int = 0, crop: Crop = CENTER,
    ) -> None:  # fmt: skip
        self.images: Any = self  # what divides the samples looks for its shards
        crop = dataclasses.replace(crop, least=image_size)  # nothing smaller is cut out of an image either
        self._images = OwnImages(data, image_size=image_size, flip=flip, seed=seed, enlarge=False, crop=crop)
        self._items, self._tokenize = self._images.items, tokenize
        self.describe, self.fingerprint, self.skipped = self._images.describe, self._images.fingerprint, ""
        kinds = [kind for kind in KINDS if takes[kind.key] and not tokenize]
        self._shapes: dict[str, tuple[int, ...]] = {}
        first = self._items.item(0) if kinds else None
        for kind in kinds:
            shape = self._array(kind, first, 0).shape
            self._shapes[kind.key] = shape if kind == IMAGE else (longest_text, *shape[1:])

    def __len__(self) -> int:
        return len(self._items)

    @property
    def widths(self) -> Any:
        """As those of `ConditionedImages`."""
        return {"image_embed": self._shapes.get(IMAGE.key, (None,))[0], "text_encodings": self._shapes.get(TEXT.key)}

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        """As that of `ConditionedImages`."""
        item = self._items.item(index, epoch, augment)
        found: dict[str, Any] = {"images": self._images.image(item, index, epoch, augment)}
        found["captions"] = self._caption(item, index)
        for kind in KINDS:
            if kind.key in self._shapes:
                found[kind.key] = self._embedding(kind, item, index)
        if self._tokenize:
            found["tokens"] = self._tokenize([found["captions"]])[0]
        return found

    def _caption(self, item: Any, index: int) -> str:
        caption = part_of(item, "caption", "text", "captions", place=1)
        if isinstance(caption, (list, tuple)):
            caption = caption[0] if caption else None
        if isinstance(item, (tuple, list)) and not isinstance(caption, str):
            caption = None  # such as the class of an image
        if not (caption is None or isinstance(caption, str)):
            raise self._items.refuse(index, item, 'one whose "caption" is a text')
        return " ".join((caption or "").split())

    def _array(self, kind: Kind, item: Any, index: int) -> np.ndarray:
        array = as_array(item.get(kind.key) if isinstance(item, Mapping) else None)
        if array is None or array.dtype.kind != "f" or array.ndim != kind.dimensions or 0 in array.shape:
            form = {1: "(d,)", 2: "(tokens, d)"}[kind.dimensions]
            raise self._items.refuse(
                index, item, f'a mapping with an "image" and a "{kind.key}", a tensor or array of floats {form}'
            )
        return array

    def _embedding(self, kind: Kind, item: Any, index: int) -> Tensor:
        shape = self._shapes[kind.key]
        if isinstance(item, Mapping) and item.get(kind.key) is None:
            raise Incomplete(f"it has no {kind.noun}")
        array = self._array(kind, item, index)
        if array.shape[-1] != shape[-1] or len(array) > shape[0]:
            most = f"at most {shape} (--max_text_len)" if kind == TEXT else f"{shape}, as in the first item"
            raise self._items.refuse(index, array, f"a {kind.noun} of {most}")
        if not np.isfinite(array).all():
            raise ValueError(f"its {kind.noun}: not all numbers are finite")
        whole = np.zeros(shape, np.float32)
        whole[: len(array)] = array
        return torch.from_numpy(whole)
