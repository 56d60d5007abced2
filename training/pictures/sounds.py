"""Pictures of what an audio-text model makes of sounds."""

from __future__ import annotations

import contextlib
import math
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional

from tandem.files.reading import printable

_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

_PAPER, _INK, _PALE, _RIGHT = (255, 255, 255), (35, 35, 35), (120, 120, 120), (20, 125, 60)
_FONT_PIXELS, _LINE_PIXELS, _GAP_PIXELS, _MARK_PIXELS = 14, 19, 14, 18
_WIDTH, _HEIGHT = 320, 128  # pixels of a spectrogram's picture
_COLUMNS = 4
_LINES = 2  # most lines that a caption takes
_MATRIX_PIXELS = 512
_LONGEST_CAPTION = 500  # characters; cut before its width is measured, which is slow

# Tried in this order for captions that are not ASCII, which Pillow's own font lacks.
_WIDE_FONTS = ("NotoSansCJK-Regular.ttc", "DejaVuSans.ttf", "Arial Unicode.ttf", "arial.ttf")

# From blue for -1 over white for 0 to red for 1.
_DIVERGING = ((33, 82, 156), (128, 172, 213), (247, 247, 247), (232, 146, 116), (166, 27, 41))


class Match(NamedTuple):
    """A caption, and how near it is to a clip."""

    caption: str
    score: float  # cosine
    is_right: bool
    rank: int  # from 1, among all captions


def best_matches(
    audio: Tensor, text: Tensor, captions: Sequence[str], right: Sequence[Sequence[str]], count: int = 3
) -> list[list[Match]]:
    """The nearest captions of each clip; if no right one is among them, the best right one follows them.

    Args:
        audio: Unit vectors of clips (n, d).
        text: Unit vectors of captions (m, d).
        captions: Texts of the captions (m). Of several equal texts only the first is a candidate.
    """
    rows = list({caption: row for row, caption in reversed(list(enumerate(captions)))}.values())[::-1]
    scores = (audio.detach().double() @ text[rows].detach().double().T).cpu()
    lists = []
    for own, of_clip in zip(right, scores, strict=True):
        matches = [
            Match(captions[rows[place]], float(of_clip[place]), captions[rows[place]] in own, rank)
            for rank, place in enumerate(of_clip.argsort(descending=True, stable=True).tolist(), start=1)
        ]
        behind = [match for match in matches[count:] if match.is_right]
        has_right = any(match.is_right for match in matches[:count])
        lists.append(matches[:count] + ([] if has_right else behind[:1]))
    return lists


def spectrogram_grid(spectrograms: Tensor, titles: Sequence[Sequence[Match]]) -> Image.Image:
    """Spectrograms, low frequencies at the bottom, with ranks, cosines and captions below; right ones green and ticked.

    Args:
        spectrograms: (n, mels, frames), n at least 1; each is scaled to its own smallest and largest value.
    """
    fonts = _Fonts([match.caption for matches in titles for match in matches])
    columns = math.ceil(len(spectrograms) / math.ceil(len(spectrograms) / _COLUMNS))
    cells = [[(match, fonts.wrap(match.caption, _WIDTH - fonts.indent)) for match in matches] for matches in titles]
    tops, top = [], _GAP_PIXELS
    for first in range(0, len(cells), columns):
        lines = max(sum(len(wrapped) for _, wrapped in cell) for cell in cells[first : first + columns])
        tops.append(top)
        top += _HEIGHT + 6 + lines * _LINE_PIXELS + _GAP_PIXELS
    picture = Image.new("RGB", (_GAP_PIXELS + columns * (_WIDTH + _GAP_PIXELS), top), _PAPER)
    draw = ImageDraw.Draw(picture)
    for number, (spectrogram, cell) in enumerate(zip(spectrograms, cells, strict=True)):
        left, top = _GAP_PIXELS + number % columns * (_WIDTH + _GAP_PIXELS), tops[number // columns]
        picture.paste(_spectrogram_picture(spectrogram), (left, top))
        _draw_matches(draw, left, top + _HEIGHT + 6, cell, fonts)
    return picture


def _spectrogram_picture(spectrogram: Tensor) -> Image.Image:
    values = spectrogram.detach().float().cpu().flip(0)
    finite = values[values.isfinite()] if values.isfinite().any() else torch.zeros(1)
    low, high = finite.min(), finite.max()
    values = torch.where(values.isfinite(), values, low)
    # A pixel is the mean of the values in it; with fewer values than pixels, values are repeated.
    shown = functional.interpolate(values[None, None], (_HEIGHT, _WIDTH), mode="area")[0, 0]
    return _coloured((shown - low) / (high - low).clamp_min(1e-12), cubehelix())


def _draw_matches(
    draw: ImageDraw.ImageDraw, left: int, top: int, cell: Sequence[tuple[Match, Sequence[str]]], fonts: _Fonts
) -> None:
    for match, lines in cell:
        if match.is_right:
            tick = [(left + 1, top + 9), (left + 5, top + 13), (left + 12, top + 4)]
            draw.line(tick, fill=_RIGHT, width=2, joint="curve")
        colour = _RIGHT if match.is_right else _INK
        right = left + fonts.indent - 8
        draw.text((left + _MARK_PIXELS, top), f"{match.rank}.", fill=_PALE, font=fonts.plain)
        draw.text((right, top), f"{match.score:.2f}", fill=_PALE, font=fonts.plain, anchor="ra")
        for line in lines:
            draw.text((left + fonts.indent, top), line, fill=colour, font=fonts.of(line))
            top += _LINE_PIXELS


def similarity_picture(matrix: Tensor) -> Image.Image:
    """Cosines of clips (rows) and captions (columns), with a colour scale; the pairs that belong together are framed.

    Red is positive and blue negative; the scale ends at the largest absolute value, rounded up to a tenth.

    Args:
        matrix: (n, m) in [-1, 1], n and m at least 1; clip i belongs to caption i. NaN is grey.
    """
    values = matrix.detach().float().cpu()
    limit = max(0.1, math.ceil(10 * float(values.nan_to_num(0.0).abs().max()) - 1e-3) / 10)
    side = max(1, _MATRIX_PIXELS // max(values.shape))
    cells = _coloured((values / limit + 1) / 2, torch.tensor(_DIVERGING))
    cells = cells.resize((values.shape[1] * side, values.shape[0] * side), Image.Resampling.NEAREST)
    font = ImageFont.load_default(_FONT_PIXELS)
    left = top = _LINE_PIXELS + 2 * _GAP_PIXELS
    scale_left = left + cells.width + 2 * _GAP_PIXELS
    size = (scale_left + _GAP_PIXELS + 60, top + max(cells.height, 4 * _LINE_PIXELS) + _GAP_PIXELS)
    picture = Image.new("RGB", size, _PAPER)
    picture.paste(cells, (left, top))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((left - 1, top - 1, left + cells.width, top + cells.height), outline=_PALE)
    draw.text((left, top - 8), "captions", fill=_INK, font=font, anchor="ls")
    _draw_upwards(picture, "clips", left - 8, top, font)
    _mark_diagonal(draw, left, top, side, min(values.shape))
    _draw_scale(picture, scale_left, top, max(cells.height, 4 * _LINE_PIXELS), limit, font)
    return picture


def side_by_side(*pictures: Image.Image) -> Image.Image:
    """Join several pictures into one, from left to right."""
    width = sum(picture.width for picture in pictures)
    together = Image.new("RGB", (width, max(picture.height for picture in pictures)), _PAPER)
    left = 0
    for picture in pictures:
        together.paste(picture, (left, 0))
        left += picture.width
    return together


def _mark_diagonal(draw: ImageDraw.ImageDraw, left: int, top: int, side: int, count: int) -> None:
    if side < 5:  # cells are too small for a frame: mark the two ends of the diagonal
        end = count * side
        draw.line((left - 8, top - 8, left - 2, top - 2), fill=_INK, width=2)
        draw.line((left + end + 2, top + end + 2, left + end + 8, top + end + 8), fill=_INK, width=2)
        return
    for place in range(0, count * side, side):
        draw.rectangle((left + place, top + place, left + place + side - 1, top + place + side - 1), outline=_INK)


def _draw_upwards(picture: Image.Image, text: str, right: int, top: int, font: _Font) -> None:
    label = Image.new("RGB", (math.ceil(font.getlength(text)), _LINE_PIXELS), _PAPER)
    ImageDraw.Draw(label).text((0, _LINE_PIXELS - 4), text, fill=_INK, font=font, anchor="ls")
    turned = label.rotate(90, expand=True)
    picture.paste(turned, (right - turned.width, top))


def _draw_scale(picture: Image.Image, left: int, top: int, height: int, limit: float, font: _Font) -> None:
    ramp = torch.linspace(1, 0, height)[:, None].expand(-1, _GAP_PIXELS)
    picture.paste(_coloured(ramp, torch.tensor(_DIVERGING)), (left, top))
    draw = ImageDraw.Draw(picture)
    for share, text in ((0.0, f"{limit:.1f}"), (0.5, "0"), (1.0, f"-{limit:.1f}")):
        y = top + round(share * (height - 1))
        draw.line((left + _GAP_PIXELS, y, left + _GAP_PIXELS + 4, y), fill=_PALE)
        anchor = {0.0: "lt", 0.5: "lm", 1.0: "lb"}[share]
        draw.text((left + _GAP_PIXELS + 8, y), text, fill=_INK, font=font, anchor=anchor)


def cubehelix(count: int = 256) -> Tensor:
    """Colours from black to white whose brightness rises evenly: float32 (count, 3) in [0, 255].

    Green 2011 (Bulletin of the Astronomical Society of India 39, 289), with his start 0.5, rotations -1.5, hue 1 and
    gamma 1: RGB = x + x (1 - x) / 2 A (cos t, sin t), t = 2 pi (start / 3 + 1 + rotations x).
    """
    x = torch.linspace(0, 1, count, dtype=torch.float64)[:, None]
    angle = 2 * math.pi * (0.5 / 3 + 1 - 1.5 * x)
    turn = torch.tensor([[-0.14861, -0.29227, 1.97294], [1.78277, -0.90649, 0.0]], dtype=torch.float64)
    colours = x + x * (1 - x) / 2 * (torch.cat([angle.cos(), angle.sin()], 1) @ turn)
    return 255 * colours.clamp(0, 1).float()


def _coloured(values: Tensor, colours: Tensor) -> Image.Image:
    """Picture of values (h, w) in [0, 1]: colours (k, 3) from the first for 0 to the last for 1; NaN is grey."""
    place = values.nan_to_num(0.0).clamp(0, 1) * (len(colours) - 1)
    below = place.long().clamp_max(len(colours) - 2)
    pixels = torch.lerp(colours[below].float(), colours[below + 1].float(), (place - below)[..., None])
    pixels[values.isnan()] = 128
    return Image.fromarray(pixels.round().to(torch.uint8).numpy())


class _Fonts:
    """Fonts for captions in any script; letters that no font has are replaced by ?."""

    def __init__(self, captions: Sequence[str]) -> None:
        self.plain = ImageFont.load_default(_FONT_PIXELS)
        self._wide: _Font | None = None
        if not all(caption.isascii() for caption in captions):
            for name in _WIDE_FONTS:
                with contextlib.suppress(OSError):
                    self._wide = ImageFont.truetype(name, _FONT_PIXELS)
                    break
        #: Pixels left of a caption, for tick, rank and cosine.
        self.indent = _MARK_PIXELS + math.ceil(self.plain.getlength("999. -0.00")) + 8

    def of(self, text: str) -> _Font:
        return self.plain if self._wide is None or text.isascii() else self._wide

    def wrap(self, caption: str, width: float) -> list[str]:
        """The lines of a caption; the last one ends with ... if the caption is too long."""
        text = printable(" ".join(caption[:_LONGEST_CAPTION].split()) or "(empty)")
        if not text.isascii() and self._wide is None:
            text = _ascii(text)
        lines: list[str] = []
        while text and len(lines) < _LINES:
            end = self._fitting(text, width)
            if end < len(text) and len(lines) == _LINES - 1:
                end = self._fitting(text, width - self.plain.getlength("..."))
                return [*lines, text[:end].rstrip() + "..."]
            if end < len(text) and (space := text.rfind(" ", 0, end + 1)) > 0:
                end = space
            lines.append(text[:end].rstrip())
            text = text[end:].lstrip()
        return lines

    def _fitting(self, text: str, width: float) -> int:
        """Number of characters from the start of the text that fit into the width, at least 1."""
        font = self.of(text)
        return max(1, bisect_right(range(1, len(text) + 1), width, key=lambda end: font.getlength(text[:end])))


def _ascii(text: str) -> str:
    """The text with accents removed and ? for letters that are not ASCII."""
    plain = unicodedata.normalize("NFKD", text)
    return "".join(sign if sign.isascii() else "?" for sign in plain if not unicodedata.combining(sign))
