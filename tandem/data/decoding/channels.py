"""Pictures of any number of channels but three, as they are stored: numpy arrays (.npy), TIFFs, and what Pillow reads.

Whole numbers are divided by the maximum of their type, such as 65535, and floats have to be from 0 to 1. A picture of
another number of channels is an error, because nothing is converted; RGBA alone is also read from pictures that have no
alpha (`images.decode_picture`). Its colours are not multiplied by alpha."""

from __future__ import annotations

import io
import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from tandem.data.sources.record import FileRef
from tandem.io.installed import require_packages
from tandem.io.reading import counted, error_text
from tandem.sides import Sides, height_and_width

from .images import ENDINGS as IMAGE_ENDINGS
from .images import ChooseBox, center_box, decode_image, decode_picture, open_picture, turn_upright

Array = npt.NDArray[Any]

ENDINGS = (*IMAGE_ENDINGS, ".npy")
_MAX_BYTES = 1 << 31  # of a file
_RGBA = 4
_NUMPY, _TIFFS = b"\x93NUMPY", (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_WHITE_IS_ZERO, _PALETTE = 0, 3  # of a TIFF's PhotometricInterpretation


def decode_channels(content: Any, image_size: Sides, channels: int, choose_box: ChooseBox | None = None) -> Tensor:
    """File, Pillow's picture or array (c, h, w) -> float32 (channels, height, width) of `image_size`, in [0, 1];
    `choose_box` as in `decode_picture`.

    Raises OSError if a file cannot be opened, and ValueError, in one line, if it cannot be decoded, has another number
    of channels, or floats outside of [0, 1].
    """
    beginning = content.read(len(_NUMPY)) if isinstance(content, FileRef) else b""
    if channels == _RGBA and not isinstance(content, np.ndarray) and not beginning.startswith((_NUMPY, *_TIFFS)):
        decode = decode_image if isinstance(content, FileRef) else decode_picture
        return decode(content, image_size, _RGBA, choose_box=choose_box) / 255
    try:
        values = _to_unit_range(_channels_first(_array_of(content, beginning), channels))
    except Exception as error:  # decoders fail on broken content with errors of any kind
        raise ValueError(error_text(error)) from error
    height, width = height_and_width(image_size)
    left, top, box_width, box_height = (choose_box or center_box)(values.shape[2], values.shape[1], width, height)
    box = (left, top, left + box_width, top + box_height)
    resized = [Image.fromarray(x).resize((width, height), Image.Resampling.BILINEAR, box=box) for x in values]
    return torch.from_numpy(np.stack([np.asarray(picture) for picture in resized]))


def _array_of(content: Any, beginning: bytes) -> Array:
    """The whole picture, (h, w), (c, h, w) or (h, w, c), in the depth of the file."""
    if isinstance(content, np.ndarray):
        return content
    if isinstance(content, Image.Image):
        return _array_of_picture(content)
    file = io.BytesIO(content.read(_MAX_BYTES))
    if beginning.startswith(_NUMPY):
        return np.lib.format.read_array(file, allow_pickle=False)
    if beginning.startswith(_TIFFS):
        return _array_of_tiff(file)
    with open_picture(file) as image:
        return _array_of_picture(image)


def _array_of_picture(image: Image.Image) -> Array:
    """(h, w) or (h, w, c), upright."""
    upright = turn_upright(image.convert("RGB") if image.mode == "P" else image.copy(), image)
    array = np.asarray(upright)
    # Pillow may keep the 16 bits of such a file in 32.
    return array.astype(np.uint16) if upright.mode == "I" and image.format in ("PNG", "PPM") else array


def _array_of_tiff(file: io.BytesIO) -> Array:
    """The first picture of a TIFF, (h, w) or (c, h, w); its channels may be pages."""
    require_packages("reading TIFFs for --channels other than 3", "tifffile", extra="tiff")
    import tifffile

    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # of a damaged file, the error says enough
    with tifffile.TiffFile(file) as tiff:
        series = tiff.series[0]
        if tiff.pages.first.photometric in (_WHITE_IS_ZERO, _PALETTE):
            raise ValueError("its white is zero, or its numbers are those of a palette: save brightness")
        return np.moveaxis(series.asarray(), [series.axes.index(axis) for axis in "YX"], (-2, -1))


def _channels_first(array: Array, channels: int) -> Array:
    """(h, w), (channels, h, w) or (h, w, channels) -> (channels, h, w). Raises ValueError, in one line, for others."""
    array = array[None] if array.ndim == 2 else array
    if array.ndim != 3 or 0 in array.shape:
        raise ValueError(f"its shape is {array.shape}: give (channels, height, width), or the channels last")
    if len(array) != channels and array.shape[2] == channels:
        return array.transpose(2, 0, 1)
    if len(array) != channels:
        actual = counted(min(len(array), array.shape[2]), "channel")
        raise ValueError(f"it has {actual} (its shape is {array.shape}), and the model takes {channels}: --channels")
    return array


def _to_unit_range(array: Array) -> Array:
    """Numbers of any type -> float32 in [0, 1]. Raises ValueError, in one line, for numbers outside."""
    limit = np.iinfo(array.dtype).max if array.dtype.kind in "iu" else 1
    if array.dtype.kind not in "iufb":
        raise ValueError(f"it holds {array.dtype}, neither whole numbers nor floats")
    wide: Array = array.astype(np.float32 if array.dtype.itemsize <= 2 else np.float64)
    values: Array = np.ascontiguousarray(np.divide(wide, limit), np.float32)
    least, most = values.min(), values.max()
    if not (least >= 0 and most <= 1):  # false for NaN
        numbers = f"floats from {least:g} to {most:g}" if limit == 1 else f"{array.dtype} below 0"
        raise ValueError(f"it holds {numbers}: give floats from 0 to 1, or whole numbers from 0 to their maximum")
    return values
