"""Decoding of an image file to a uint8 tensor of a given height and width; the crops of images and of the frames of
clips; and the random flip for training."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, PngImagePlugin, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional

from tandem.data.bad_samples import SampleIncomplete, report_partial_read
from tandem.data.sources.record import FileRef, open_range
from tandem.hashing import Draws, derive_key
from tandem.io.reading import LONGEST_BEGINNING, error_text, open_regular, wrong_kind_text
from tandem.sides import Sides, height_and_width

from .colours import to_resizable_mode, to_srgb

# Pillow's formats that are read, and the endings by which their files are listed. The content decides the format, so
# that a GIF called .png is read, too. Other formats are refused, because PostScript would start Ghostscript.
FORMATS = {
    "JPEG": (".jpg", ".jpeg"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm"),
}
ENDINGS = tuple(ending for endings in FORMATS.values() for ending in endings)
_EXIF_ORIENTATION, _ON_ITS_SIDE = 0x0112, range(5, 9)  # with these orientations, height and width change places
MAX_ASPECT_RATIO = 4  # the largest ratio of sides with --keep_aspect; it limits the memory
PILLOW_BILINEAR = "ours"  # resizing as in training: Pillow's antialiased bilinear filter
_BUFFER_BYTES = 1 << 16  # Pillow reads a JPEG in pieces of this size
_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
WIDEST_RATIO = 4 / 3  # the widest region of a crop, as width over height; the tallest is its inverse
_MAX_DRAWS = 10

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_PIXEL_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_MAX_PNG_BYTES = 1 << 28  # of a PNG that is read again without its comments
# Pillow allows 1 MiB for one comment or profile of a PNG; allow as much as for all of them together, 64 MiB.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY

# Silence Pillow's warnings about metadata and size: every worker would print them, and bad images are reported anyway.
warnings.filterwarnings("ignore", module=r"PIL\.")


class Box(NamedTuple):
    """A rectangle of a picture, in its pixels."""

    left: float
    top: float
    width: float
    height: float


# Width and height of a picture, width and height of the sample -> the part of the picture that becomes the sample.
ChooseBox = Callable[[int, int, int, int], Box]


def largest_box(width: float, height: float, sample_width: int, sample_height: int) -> tuple[float, float]:
    """Width and height of the largest part of a picture that has the shape of a sample."""
    if sample_width == sample_height:  # without a rounding error
        return min(width, height), min(width, height)
    if width * sample_height <= height * sample_width:
        return width, width * sample_height / sample_width
    return height * sample_width / sample_height, height


def center_box(width: float, height: float, sample_width: int, sample_height: int) -> Box:
    """The `largest_box` in the middle of a picture."""
    w, h = largest_box(width, height, sample_width, sample_height)
    return Box((width - w) / 2, (height - h) / 2, w, h)


@dataclass(frozen=True)
class Crop:
    """How training crops pictures, at random by (seed, epoch, index): first a region of the picture is chosen, then the
    largest part of it that has the shape of the sample, such as a square.

    Args:
        position: Where in the region this part lies: "center", or at a "random" position.
        area: The smallest and the largest area of the region, as a share of the picture; None: the region is the whole
            picture. The region is drawn as by torchvision's RandomResizedCrop: the area uniformly, the logarithm of
            width over height uniformly from log 3/4 to log 4/3, then the position uniformly; after ten draws that do
            not fit into the picture, it is the largest region of such a shape in the middle.
        min_side: The least number of pixels of both sides of the region; the picture must have as many.
    """

    position: str = "center"
    area: tuple[float, float] | None = None
    seed: int = 0
    min_side: int = 1

    def box_chooser(self, epoch: int, index: int) -> ChooseBox | None:
        """The function that chooses the part of a sample in an epoch, the same for all pictures of one size; None for
        the centre crop, the decoders' default."""
        is_plain = self.position == "center" and self.area is None
        return None if is_plain else functools.partial(self._draw_box, epoch, index)

    def _draw_box(self, epoch: int, index: int, width: int, height: int, *sample_sides: int) -> Box:
        draws = Draws("square", self.seed, epoch, index)
        left, top, w, h = self.region(width, height, draws)
        if self.position == "random":
            box_w, box_h = largest_box(w, h, *sample_sides)
            x, y = (draws.below(math.floor(room) + 1) for room in (w - box_w, h - box_h))
            return Box(left + x, top + y, box_w, box_h)
        box = center_box(w, h, *sample_sides)
        return box._replace(left=left + box.left, top=top + box.top)

    def region(self, width: int, height: int, draws: Draws) -> tuple[int, int, int, int]:
        """Left, top, width and height of the region in a picture of this size."""
        if self.area is None:
            return 0, 0, width, height
        for _ in range(_MAX_DRAWS):
            pixels = draws.uniform(*self.area) * width * height
            ratio = math.exp(draws.uniform(-math.log(WIDEST_RATIO), math.log(WIDEST_RATIO)))
            w, h = (max(round(math.sqrt(area)), self.min_side) for area in (pixels * ratio, pixels / ratio))
            if w <= width and h <= height:
                return draws.below(width - w + 1), draws.below(height - h + 1), w, h
        w, h = min(width, round(height * WIDEST_RATIO)), min(height, round(width * WIDEST_RATIO))
        return (width - w) // 2, (height - h) // 2, w, h


CENTER = Crop()


def check_aspect_ratio(width: float, height: float) -> None:
    """Raise ValueError, in one line, if the ratio of the sides exceeds MAX_ASPECT_RATIO."""
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ValueError(
            f"it is {width:.5g} x {height:.5g} pixels large, and --keep_aspect takes no side that is more than "
            f"{MAX_ASPECT_RATIO} times as long as the other"
        )


def decode_image(ref: FileRef, image_size: Sides, channels: int, **options: Any) -> Tensor:
    """Image file -> uint8 (channels, height, width), see `decode_picture` for the arguments.

    Raises OSError if the file cannot be opened, and what `decode_picture` raises. With Pillow's LOAD_TRUNCATED_IMAGES,
    a truncated file is decoded as far as possible; the rest is black or grey.
    """
    with open_regular(ref.path) if ref.is_local_file else open_range(ref) as handle:
        file = io.BufferedReader(handle, _BUFFER_BYTES) if isinstance(handle, io.RawIOBase) else handle
        try:
            with open_picture(file) as image:
                picture = decode_picture(image, image_size, channels, **options)
                if _has_more_pictures(image):
                    report_partial_read("it holds several pictures, of which the first is read")
                return picture
        except SampleIncomplete:
            raise
        except ValueError:
            stripped_file = _strip_png(file)
            if stripped_file is None:
                raise
            with contextlib.suppress(ValueError), open_picture(stripped_file) as image:
                return decode_picture(image, image_size, channels, **options)
            raise


def _has_more_pictures(image: Image.Image) -> bool:
    """Whether the file has several pages or frames. Pictures that phones put behind a JPEG (MPO) do not count."""
    with contextlib.suppress(Exception):  # a second frame that is cut off
        return image.format != "MPO" and bool(getattr(image, "is_animated", False))
    return False


def _strip_png(file: Any) -> io.BytesIO | None:
    """A PNG with only the chunks of its pixels, because a comment may be damaged; None for another file."""
    file.seek(0)
    if file.read(len(_PNG_SIGNATURE)) != _PNG_SIGNATURE:
        return None
    content, chunks, begin = file.read(_MAX_PNG_BYTES), [_PNG_SIGNATURE], 0
    while len(header := content[begin : begin + 8]) == 8:
        end = begin + 12 + int.from_bytes(header[:4], "big")  # length, name, content and checksum
        if header[4:] in _PNG_PIXEL_CHUNKS:
            chunks.append(content[begin:end])
        begin = end
    return io.BytesIO(b"".join(chunks))


def open_picture(file: Any) -> Image.Image:
    """The picture in an open file, not decoded yet. Raises ValueError, in one line, if it is none of `FORMATS`."""
    try:
        return Image.open(file, formats=tuple(FORMATS))
    except UnidentifiedImageError:
        file.seek(0)
        beginning = file.read(LONGEST_BEGINNING)
        formats = ", ".join(name for name, endings in FORMATS.items() if endings)
        reason = "the file is empty" if not beginning else wrong_kind_text(beginning)
        unknown = f"the content is none of {formats}, or a variant that Pillow does not read"
        raise ValueError(reason or unknown) from None
    except Exception as error:  # decoders fail on broken content with SyntaxError, struct.error, KeyError, ...
        raise ValueError(error_text(error)) from error


def decode_picture(
    image: Image.Image,
    image_size: Sides,
    channels: int,
    enlarge: bool = True,
    choose_box: ChooseBox | None = None,
    resize: str = PILLOW_BILINEAR,
    multiple: int | None = None,
) -> Tensor:
    """Picture, decoded or an open file -> uint8 (channels, height, width) of `image_size`, upright, in sRGB.

    Args:
        channels: 3: RGB, with white behind transparent pixels; 4: RGBA, opaque if the picture has no alpha.
        enlarge: Whether a picture with fewer pixels than `image_size` is enlarged; else it raises `SampleIncomplete`.
        choose_box: Chooses the part that is resized; by default the largest one of this shape in the middle.
        resize: PILLOW_BILINEAR or, without `choose_box`, one of RESIZES.
        multiple: Without `choose_box` and `resize`: the result is (channels, height, width) in the aspect ratio of
            the picture (see `check_aspect_ratio`), its shorter side that of `image_size`, cropped to multiples of this
            number.

    Raises ValueError, in one line, if the content cannot be decoded, or has more than 179 million pixels, which Pillow
    refuses as a decompression bomb.
    """
    height, width = height_and_width(image_size)
    if not enlarge and min(image.size) < min(height, width):
        raise SampleIncomplete(f"its shorter side has {min(image.size)} pixels, fewer than {min(height, width)}")
    try:
        if resize != PILLOW_BILINEAR:
            picture = to_srgb(to_resizable_mode(image), image.info.get("icc_profile"))
            picture = _convert_channels(turn_upright(picture, image), channels)
            return _to_tensor(_crop_center(RESIZES[resize](picture, width, height), width, height))
        is_turned = width != height and _orientation_before_decoding(image) in _ON_ITS_SIDE
        size = (height, width) if is_turned else (width, height)
        left, top, box_width, box_height = _set_draft(image, *size, choose_box)
        box = (left, top, left + box_width, top + box_height)
        if multiple:
            # The box is in the middle: its margins give the width and height of the decoded picture.
            full_size = box_width + 2 * left, box_height + 2 * top
            box, size = _find_box_and_size(*full_size, min(height, width), multiple)
        # Pillow weights colours by alpha when it resizes.
        picture = to_resizable_mode(image).resize(size, Image.Resampling.BILINEAR, box=box)
        picture = to_srgb(picture, image.info.get("icc_profile"))
        pixels = _to_tensor(_convert_channels(turn_upright(picture, image), channels))
        if not multiple and pixels.shape[1:] != (height, width):
            raise ValueError("it says after its pixels that it lies on its side: save it upright")
        return pixels
    except Exception as error:
        raise ValueError(error_text(error)) from error


def randomly_flipped(image: Tensor, seed: int, epoch: int, index: int) -> Tensor:
    """Image (c, h, w), mirrored left to right in half of the draws, which depend only on (seed, epoch, index)."""
    return image.flip(-1) if derive_key("flip", seed, epoch, index) & 1 else image


def _orientation_before_decoding(image: Image.Image) -> int:
    """The orientation that the metadata of an open file state; 1, upright, for a TIFF, whose sides Pillow gives as
    those of the turned picture, and if a PNG states it after its pixels."""
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):  # getexif would decode the PNG
        return 1
    with contextlib.suppress(Exception):
        return int(image.getexif().get(_EXIF_ORIENTATION, 1))
    return 1


def turn_upright(picture: Image.Image, image: Image.Image) -> Image.Image:
    """The picture, made from the image, turned by the orientation that the image's metadata state."""
    try:  # only after decoding, because for a PNG getexif decodes the pixels and ignores errors
        orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:  # an image with damaged metadata is not a bad one
        return picture
    return picture.transpose(_TRANSPOSES[orientation]) if orientation in _TRANSPOSES else picture


def _set_draft(image: Image.Image, sample_width: int, sample_height: int, choose_box: ChooseBox | None) -> Box:
    """Set Pillow to decode a JPEG at 1/2, 1/4 or 1/8 of its size, if the crop then still has the pixels of the sample.
    Returns the crop, in decoded pixels: the decoder rounds up, e.g. 375 pixels at 1/2 become 188, of which the image
    covers 187.5."""
    full_size, sample_size = image.size, (sample_width, sample_height)
    box = (choose_box or center_box)(*full_size, *sample_size)
    shorter = min(full_size)
    target = max(math.ceil(sample_width * shorter / box.width), math.ceil(sample_height * shorter / box.height))
    draft = image.draft(None, (target, target))
    width, height = draft[1][2:] if draft else full_size  # draft: (mode, (0, 0, width, height))
    if choose_box is None:
        return center_box(width, height, *sample_size)
    scale = width / full_size[0]
    return Box(*(scale * length for length in box))


def _find_box_and_size(
    width: float, height: float, image_size: int, multiple: int
) -> tuple[tuple[float, float, float, float], tuple[int, int]]:
    """The box in the middle of a picture (left, top, right, bottom) that is resized, and its new width and height,
    which are multiples of `multiple`."""
    check_aspect_ratio(width, height)
    scale = min(width, height) / image_size
    w, h = (round(length / scale) // multiple * multiple for length in (width, height))
    left, top = (max(0.0, (length - side * scale) / 2) for length, side in ((width, w), (height, h)))
    return (left, top, width - left, height - top), (w, h)


def _convert_channels(image: Image.Image, channels: int) -> Image.Image:
    if channels == 3 and image.mode in ("LA", "RGBA"):
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert({3: "RGB", 4: "RGBA"}[channels])


def _to_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)))


def _resize_as_taming(picture: Image.Image, width: int, height: int) -> Image.Image:
    """The shorter side becomes that of the sample by bilinear interpolation of the four nearest pixels, without
    antialiasing: albumentations' SmallestMaxSize, as in taming-transformers, Open-MAGVIT2 and IBQ. Values differ by at
    most one level from OpenCV's, whose weights have 11 bits."""
    width, height = _size_that_covers(picture, width, height)
    pixels = torch.from_numpy(np.array(picture)).movedim(2, 0)[None].float()
    resized = functional.interpolate(pixels, (height, width), mode="bilinear", align_corners=False).round().byte()
    return Image.fromarray(resized[0].movedim(0, 2).numpy())


def _resize_as_adm(picture: Image.Image, width: int, height: int) -> Image.Image:
    """Halved by a box filter while the shorter side is at least twice that of the sample, then resized by Pillow's
    bicubic filter: center_crop_arr of guided-diffusion, as in LlamaGen."""
    while picture.width >= 2 * width and picture.height >= 2 * height:
        picture = picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.BOX)
    return picture.resize(_size_that_covers(picture, width, height), Image.Resampling.BICUBIC)


def _size_that_covers(picture: Image.Image, width: int, height: int) -> tuple[int, int]:
    """Width and height of the smallest picture of this shape that covers a sample."""
    scale = max(width / picture.width, height / picture.height)
    return round(picture.width * scale), round(picture.height * scale)


def _crop_center(picture: Image.Image, width: int, height: int) -> Image.Image:
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    return picture.crop((left, top, left + width, top + height))


#: Other ways to resize a picture until it covers a sample, by name: (picture, width and height of the sample) -> it.
RESIZES: dict[str, Callable[[Image.Image, int, int], Image.Image]] = {
    "taming": _resize_as_taming,
    "adm": _resize_as_adm,
}
