"""Pictures of images in [0, 1], without normalisation of their brightness; histograms of codes."""

import contextlib
import io
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from tandem.io.reading import printable

_GAP_PIXELS = 2
_CHECKER_PIXELS = 8
_CHECKER_GREYS = (255, 204)
_BACKGROUND, _FOREGROUND = (255, 255, 255), (0, 0, 0)
_LONGEST_CAPTION = 48  # characters
# Tried in this order for labels that are not ASCII, because Pillow's own font has only ASCII.
_WIDE_FONTS = ("NotoSansCJK-Regular.ttc", "DejaVuSans.ttf", "Arial Unicode.ttf", "arial.ttf")


@dataclass(frozen=True)
class Sample:
    """A picture for samples/, and files beside it: ending such as "gif" -> content."""

    picture: Image.Image
    files: Mapping[str, bytes] = field(default_factory=dict)


def to_pixels(images: Tensor) -> Tensor:
    """Images (n, c, h, w) in [0, 1], c = 1 (grey), 3 (RGB), 4 (RGBA), or another number, of which the first three
    channels are shown, of 2 the first -> uint8 (n, h, w, 3).

    round(255 x) after clamping, without any normalisation; alpha is laid over a checkerboard of grey 255 and 204.
    """
    images = images.detach().float().cpu().clamp(0, 1)
    if images.shape[1] != 4:
        images = images[:, : 1 if images.shape[1] < 3 else 3]
    if images.shape[1] == 4:
        colour, alpha = images.split((3, 1), dim=1)
        rows, columns = (torch.arange(side) // _CHECKER_PIXELS for side in images.shape[-2:])
        checkerboard = torch.tensor(_CHECKER_GREYS)[(rows[:, None] + columns) % 2] / 255
        images = alpha * colour + (1 - alpha) * checkerboard
    pixels = (images * 255).round().to(torch.uint8)
    return pixels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous()


def enlarge(images: Tensor, side: int) -> Tensor:
    """Repeat the pixels of images (n, c, h, w), so that each side has at least `side` pixels."""
    factor = -(-side // min(images.shape[-2:]))
    return images.repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3)


def shorten_caption(text: str) -> str:
    """A text in one line, cut off if it is long; "(empty)" for none."""
    text = printable(" ".join(text.split())) or "(empty)"
    return text if len(text) <= _LONGEST_CAPTION else f"{text[: _LONGEST_CAPTION - 3]}..."


def _font(text: str) -> ImageFont.FreeTypeFont | ImageFont.ImageFont | None:
    """Pillow's own font for a text in ASCII, else the first of `_WIDE_FONTS` that is installed; None if none is."""
    if text.isascii():
        return ImageFont.load_default()
    for name in _WIDE_FONTS:
        with contextlib.suppress(OSError):
            return ImageFont.truetype(name)
    return None


def _ascii(text: str) -> str:
    """The text without accents, and with ? for letters that are not ASCII."""
    decomposed = unicodedata.normalize("NFKD", text)
    return "".join(letter if letter.isascii() else "?" for letter in decomposed if not unicodedata.combining(letter))


def grid(rows: Mapping[str, Tensor], least_side: int = 128) -> Image.Image:
    """A picture of rows of images (n, c, h, w) in [0, 1], by label of one or more lines. Small images are enlarged: no
    side has fewer than `least_side` pixels. Without a font for labels that are not ASCII, they are made ASCII."""
    if (font := _font("".join(rows))) is None:
        return grid({_ascii(label): images for label, images in rows.items()}, least_side)
    margin = round(max(font.getlength(line) for label in rows for line in label.split("\n"))) + 3 * _GAP_PIXELS
    pixels = {label: to_pixels(enlarge(images, least_side)) for label, images in rows.items()}
    width = max(sum(image.shape[1] + _GAP_PIXELS for image in row) for row in pixels.values())
    height = sum(row.shape[1] + _GAP_PIXELS for row in pixels.values())
    picture = Image.new("RGB", (margin + width, height + _GAP_PIXELS), _BACKGROUND)
    draw = ImageDraw.Draw(picture)
    top = _GAP_PIXELS
    for label, row in pixels.items():
        left = margin
        row_height, row_width = row.shape[1:3]
        draw.text((_GAP_PIXELS, top + row_height // 2), label, fill=_FOREGROUND, font=font, anchor="lm")
        for image in row:
            picture.paste(Image.fromarray(image.numpy()), (left, top))
            left += row_width + _GAP_PIXELS
        top += row_height + _GAP_PIXELS
    return picture


def to_png(picture: Image.Image) -> bytes:
    """The content of a PNG file."""
    content = io.BytesIO()
    picture.save(content, "png")
    return content.getvalue()


def code_histogram(counts: Tensor, width: int = 512, height: int = 128) -> Image.Image:
    """Bar chart of how often each code was used, from counts (k,), in descending order. The largest has the full
    height.

    Its `info["counts"]` holds the counts, an array of int64 (k,), for trackers that draw histograms themselves."""
    ordered = counts.double().sort(descending=True).values
    edges = torch.linspace(0, len(ordered), width + 1)
    shares = ordered[edges[:-1].long().clamp_max(len(ordered) - 1)] / ordered[0].clamp_min(1)
    picture = Image.new("RGB", (width, height), _BACKGROUND)
    picture.info["counts"] = counts.long().cpu().numpy()
    draw = ImageDraw.Draw(picture)
    for column, share in enumerate(shares.tolist()):
        if share > 0:
            draw.line((column, height - 1, column, round((height - 1) * (1 - share))), fill=_FOREGROUND)
    return picture
