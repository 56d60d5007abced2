"""Pictures of spectrograms beside the captions that are nearest to them, and of matrices of cosines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from tandem.devices import double

from .images import enlarge, grid, shorten_caption

_WIDTH, _HEIGHT = 320, 128  # pixels of a spectrogram's picture
_MATRIX_PIXELS = 384  # least side of the picture of the cosines

# From blue for -1 over white for 0 to red for 1.
_DIVERGING = ((33, 82, 156), (128, 172, 213), (247, 247, 247), (232, 146, 116), (166, 27, 41))


class Match(NamedTuple):
    """A caption, and how near it is to a clip."""

    caption: str
    score: float  # cosine
    is_relevant: bool  # whether it is a caption of the clip
    rank: int  # from 1, among all captions


def best_matches(
    audio: Tensor, text: Tensor, captions: Sequence[str], relevant: Sequence[Sequence[str]], count: int = 3
) -> list[list[Match]]:
    """The `count` nearest captions of each clip, nearest first. If none of them is one of the clip's own captions, the
    nearest of its own follows them.

    Args:
        audio: Unit vectors of clips (n, d).
        text: Unit vectors of captions (m, d).
        captions: Texts of the captions (m). Of several equal texts only the first is a candidate.
        relevant: The captions of each clip (n).
    """
    # For each distinct caption, the row where it occurs first: it is the last that enters the dictionary.
    rows = sorted({caption: row for row, caption in reversed(list(enumerate(captions)))}.values())
    scores = (double(audio.detach()) @ double(text[rows].detach()).T).cpu()
    lists = []
    for own_captions, clip_scores in zip(relevant, scores, strict=True):
        matches = [
            Match(captions[rows[index]], float(clip_scores[index]), captions[rows[index]] in own_captions, rank)
            for rank, index in enumerate(clip_scores.argsort(descending=True, stable=True).tolist(), start=1)
        ]
        has_relevant = any(match.is_relevant for match in matches[:count])
        farther = [] if has_relevant else [match for match in matches[count:] if match.is_relevant]
        lists.append(matches[:count] + farther[:1])
    return lists


def sounds_picture(spectrograms: Tensor, matches: Sequence[Sequence[Match]], cosines: Tensor) -> Image.Image:
    """A row for each clip, its spectrogram beside the captions that are nearest to it, its own marked by *; and the
    cosines of all clips and captions.

    Args:
        spectrograms: (n, mels, frames), n at least 1.
        matches: Those of each clip (`best_matches`).
        cosines: See `cosine_colours`.
    """
    rows = {}
    for number, (spectrogram, clip_matches) in enumerate(zip(spectrograms, matches, strict=True), start=1):
        lines = (
            f"{'*' if match.is_relevant else ' '} {match.rank}. {match.score:.2f} {shorten_caption(match.caption)}"
            for match in clip_matches
        )
        rows["\n".join([f"clip {number}", *lines])] = spectrogram_colours(spectrogram)[None]
    colours, limit = cosine_colours(cosines)
    scale = f"cosines of clips (rows) and captions (columns)\nfrom blue for -{limit:.1f} to red for {limit:.1f}"
    return grid({**rows, scale: enlarge(colours[None], _MATRIX_PIXELS)})


def spectrogram_colours(spectrogram: Tensor) -> Tensor:
    """The picture (3, 128, 320) in [0, 1] of a spectrogram (mels, frames), low frequencies at the bottom, from black
    for its smallest value to white for its largest one."""
    values = spectrogram.detach().float().cpu().flip(0)
    finite = values[values.isfinite()] if values.isfinite().any() else torch.zeros(1)
    low, high = finite.min(), finite.max()
    values = torch.where(values.isfinite(), values, low)
    # A pixel is the mean of the values in it; with fewer values than pixels, values are repeated.
    pixels = functional.interpolate(values[None, None], (_HEIGHT, _WIDTH), mode="area")[0, 0]
    return _apply_colours((pixels - low) / (high - low).clamp_min(1e-12), cubehelix())


def cosine_colours(matrix: Tensor) -> tuple[Tensor, float]:
    """The picture (3, n, m) in [0, 1] of cosines (n, m), n and m at least 1: red is positive, blue negative, white 0,
    grey NaN; and the largest absolute value, rounded up to a tenth, where the colours end."""
    values = matrix.detach().float().cpu()
    # The 1e-3 keeps the rounding error of a float32 0.3 from raising the limit to 0.4.
    limit = max(0.1, math.ceil(10 * float(values.nan_to_num(0.0).abs().max()) - 1e-3) / 10)
    return _apply_colours((values / limit + 1) / 2, torch.tensor(_DIVERGING) / 255), limit


def cubehelix(count: int = 256) -> Tensor:
    """Colours from black to white whose brightness rises evenly: float32 (count, 3) in [0, 1].

    Green 2011 (Bulletin of the Astronomical Society of India 39, 289), with his start 0.5, rotations -1.5, hue 1 and
    gamma 1: RGB = x + x (1 - x) / 2 A (cos t, sin t), t = 2 pi (start / 3 + 1 + rotations x).
    """
    x = torch.linspace(0, 1, count, dtype=torch.float64)[:, None]
    angle = 2 * math.pi * (0.5 / 3 + 1 - 1.5 * x)
    rotation = torch.tensor([[-0.14861, -0.29227, 1.97294], [1.78277, -0.90649, 0.0]], dtype=torch.float64)
    colours = x + x * (1 - x) / 2 * (torch.cat([angle.cos(), angle.sin()], 1) @ rotation)
    return colours.clamp(0, 1).float()


def _apply_colours(values: Tensor, colours: Tensor) -> Tensor:
    """Picture (3, h, w) of values (h, w) in [0, 1]: colours (k, 3) from the first for 0 to the last for 1; NaN is
    grey."""
    position = values.nan_to_num(0.0).clamp(0, 1) * (len(colours) - 1)
    below = position.long().clamp_max(len(colours) - 2)
    pixels = torch.lerp(colours[below], colours[below + 1], (position - below)[..., None])
    return torch.where(values.isnan()[..., None], 0.5, pixels).permute(2, 0, 1)
