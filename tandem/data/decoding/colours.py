"""Conversion of pictures of any Pillow mode to sRGB. Where the mode does not state which samples are black, white and
transparent, the tags of the file do; and the colour profile is applied."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image, ImageChops, ImageCms

# Tags of TIFF 6.0. SMinSampleValue and SMaxSampleValue state the range. MinSampleValue and MaxSampleValue are
# statistics of the picture: of them only a maximum such as 4095 is used, which tells that samples have 12 bits.
_BITS_PER_SAMPLE, _PHOTOMETRIC, _MAX_SAMPLE_VALUE, _SAMPLE_FORMAT, _S_MIN, _S_MAX = 258, 262, 281, 339, 340, 341
_WHITE_IS_ZERO, _SIGNED = 0, 2
_MAXIMA_OF_FEWER_BITS = {(1 << bits) - 1 for bits in range(8, 16)}
_RANGE_TOLERANCE = 1e-3  # how far samples may exceed the range, as a share of it: an interpolation may overshoot
# By raw mode of Pillow: a PNG states the transparent value in the bits of the file, but Pillow's pixels have eight.
_TO_EIGHT_BITS = {"L;2": lambda value: value * 85, "L;4": lambda value: value * 17, "RGB;16B": lambda value: value >> 8}
_SPACES = {"L": "GRAY", "RGB": "RGB", "CMYK": "CMYK"}  # by mode, the colour space of the profiles that fit
_LEVEL_TOLERANCE = 1  # of 255: the largest difference of a profile that is equivalent to sRGB


def to_resizable_mode(image: Image.Image) -> Image.Image:
    """Picture of any mode -> L, LA, RGB or RGBA; CMYK stays CMYK if it has a profile, which `to_srgb` applies.

    Raises ValueError, in one line, if neither the mode nor a tag of the file states the range of the samples.
    """
    tags = getattr(image, "tag_v2", {})
    if image.mode.startswith(("I", "F")) or _first_number(tags.get(_SAMPLE_FORMAT)) == _SIGNED:
        return _to_grey(image, tags)
    if not image.has_transparency_data:
        if image.mode in ("L", "RGB") or (image.mode == "CMYK" and image.info.get("icc_profile")):
            return image  # convert() would copy it
        return image.convert("L" if image.mode == "1" else "RGB")
    tiles = getattr(image, "tile", None)  # of a file that is not decoded yet: (decoder, box, offset, raw mode)
    if image.format == "PNG" and tiles and tiles[0][3] in _TO_EIGHT_BITS:
        to_eight_bits, value = _TO_EIGHT_BITS[tiles[0][3]], image.info["transparency"]
        eight_bits = tuple(map(to_eight_bits, value)) if isinstance(value, tuple) else to_eight_bits(value)
        image.info["transparency"] = eight_bits
    with_alpha = image.convert("LA" if image.mode in ("LA", "La") else "RGBA")
    if image.format == "BMP" and with_alpha.getchannel("A").getextrema() == (0, 0):
        return with_alpha.convert("RGB")  # Windows writes 0 for alpha, and programs show such a file as opaque
    return with_alpha


def to_srgb(picture: Image.Image, profile: bytes | None) -> Image.Image:
    """A result of `to_resizable_mode` in sRGB: L, LA, RGB or RGBA. As in browsers, a damaged profile, or one for
    another mode, is ignored, and a picture without a profile is taken for sRGB."""
    has_alpha = picture.mode in ("LA", "RGBA")
    colours = picture.convert(picture.mode[:-1]) if profile and has_alpha else picture
    transform = _build_srgb_transform(profile, colours.mode) if profile else None
    if transform is None:
        return picture.convert("RGB") if picture.mode == "CMYK" else picture
    converted = transform.apply(colours)
    if has_alpha:
        converted.putalpha(picture.getchannel("A"))
    return converted


@functools.lru_cache(maxsize=32)  # building one takes milliseconds, and most pictures of a set have one of a few
def _build_srgb_transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """littleCMS's transform from a profile to sRGB, with the perceptual intent; None if there is none, or if the
    profile is sRGB and the transform changes nothing."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if source.profile.xcolor_space.strip() != _SPACES[mode]:
            return None
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (OSError, ValueError, TypeError, ImageCms.PyCMSError):
        return None
    levels = np.meshgrid(*[np.arange(0, 256, 17, dtype=np.uint8)] * len(mode))
    swatches = Image.frombytes(mode, (16, levels[0].size // 16), np.stack(levels, -1).tobytes())
    differences: Any = ImageChops.difference(swatches.convert("RGB"), transform.apply(swatches)).getextrema()
    return None if max(most for _, most in differences) <= _LEVEL_TOLERANCE else transform


def _to_grey(image: Image.Image, tags: Mapping[int, Any]) -> Image.Image:
    """Grey samples that are not bytes from 0 to 255 -> L, or LA if one of them is transparent."""
    black, white = _find_range(image, tags)
    samples = np.asarray(image)
    samples = samples.view(np.int8) if image.mode == "L" else samples
    least, most, margin = samples.min(), samples.max(), _RANGE_TOLERANCE * (white - black)
    if not (least >= black - margin and most <= white + margin):  # false for NaN
        raise ValueError(
            f"its samples reach from {least:g} to {most:g}, where black is {black:g} and white is {white:g} unless the "
            "tags SMinSampleValue and SMaxSampleValue of a TIFF say otherwise: save it with 8 or 16 bits"
        )
    levels = (samples.astype(np.float32) - black) * (255 / (white - black))
    levels = 255 - levels if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO else levels
    grey = Image.fromarray(levels.clip(0, 255).round().astype(np.uint8))
    if "transparency" in image.info:
        grey.putalpha(Image.fromarray(np.where(samples == image.info["transparency"], 0, 255).astype(np.uint8)))
    return grey


def _find_range(image: Image.Image, tags: Mapping[int, Any]) -> tuple[float, float]:
    """The samples that are black and white."""
    least, most = (_first_number(tags.get(tag)) for tag in (_S_MIN, _S_MAX))
    is_stated = least is not None and most is not None and least < most
    if image.mode == "F":  # a stated maximum of at most 1 may be just that of the picture
        return (least, most) if is_stated and most > 1 else (0.0, 1.0)
    if image.mode.startswith("I;16") or image.format in ("PNG", "PPM"):  # Pillow scales those of a PGM to 16 bits
        white = (1 << (_first_number(tags.get(_BITS_PER_SAMPLE)) or 16)) - 1
        maxima = (_first_number(tags.get(tag)) for tag in (_MAX_SAMPLE_VALUE, _S_MAX))  # 4095: 12 bits are used of 16
        return 0, next((int(value) for value in maxima if value in _MAXIMA_OF_FEWER_BITS and value < white), white)
    if not is_stated:
        sign = "signed " if _first_number(tags.get(_SAMPLE_FORMAT)) == _SIGNED else ""
        kind = f"{sign}integers of {_first_number(tags.get(_BITS_PER_SAMPLE)) or 32} bits"
        raise ValueError(
            f"it holds {kind}, and does not say which of them are black and white (the tags SMinSampleValue and "
            "SMaxSampleValue of a TIFF): save it with 8 bits, or with 16 bits without a sign"
        )
    return least, most


def _first_number(value: Any) -> Any:
    """A tag of one number, or the first of several."""
    return value[0] if isinstance(value, tuple) and value else value
