"""Captioned pictures of shapes on a soft background.

For pictures of one shape ("scenes"), one in ten combinations of shape, colour and position is held out: no picture has
it, though every pair of two of these attributes occurs. The pictures that a model generates for held-out captions show
whether it can combine attributes that it has not seen together. Scenes also have exact embeddings of their captions, so
that no text encoder has to be trained.
"""

from __future__ import annotations

import functools
import itertools
import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tandem.data.sources.record import Record
from tandem.hashing import Draws, Key
from tandem.sides import Sides, height_and_width

from .shapes import (
    BACKGROUNDS,
    COLOURS,
    POSITIONS,
    SHAPES,
    SIZES,
    Figure,
    cut_out,
    dull_colour,
    paint,
    pixel_centers,
)


def _are_far_apart(positions: tuple[str, ...]) -> bool:
    """Whether any two positions are half a picture apart in x or y, so that not even large shapes touch."""
    pairs = itertools.combinations((POSITIONS[position] for position in positions), 2)
    return all(max(abs(ax - bx), abs(ay - by)) >= 0.5 for (ax, ay), (bx, by) in pairs)


_ARRANGEMENTS = [[c for c in itertools.combinations(POSITIONS, n) if _are_far_apart(c)] for n in (1, 2, 3)]
TRIPLES = list(itertools.product(SHAPES, COLOURS, POSITIONS))


def is_held_out(shape: str, colour: str, position: str) -> bool:
    """True for 58 of the 576 triples, of which no two have two attributes in common."""
    return (list(SHAPES).index(shape) + 3 * list(COLOURS).index(colour) + 7 * list(POSITIONS).index(position)) % 10 == 0


_TRAINING_TRIPLES = [triple for triple in TRIPLES if not is_held_out(*triple)]


def draw_shapes(seed: int, index: int, _: int | str) -> Record:
    draws = Draws("shapes", seed, index)
    figures = [
        _make_figure(draws.choice(SHAPES), draws.choice(COLOURS), draws.choice(SIZES), position, draws)
        for position in draws.choice(draws.choice(_ARRANGEMENTS))
    ]
    *others, last = map(str, figures)
    caption = f"{', '.join(others)} and {last}" if others else last
    return {"image": partial(_paint_picture, figures, ("background", seed, index)), "texts": {"captions": [caption]}}


def draw_scene(seed: int, index: int, _: int | str) -> Record:
    # "seen" has no meaning: without it, the pictures would be others than those of earlier versions.
    draws, key = Draws("scene", "seen", seed, index), ("scene background", "seen", seed, index)
    shape, colour, position = draws.choice(_TRAINING_TRIPLES)
    figure = _make_figure(shape, colour, draws.choice(SIZES), position, draws)
    background = Draws(*key).choice(BACKGROUNDS)  # `dull_colour` draws the same from this key
    caption = f"{figure}, on {background}"
    return {
        "image": partial(_paint_picture, [figure], key), "texts": {"captions": [caption]},
        "image_embed": partial(_encode_figure, figure, background), "text_encodings": partial(_encode_text, caption),
    }  # fmt: skip


def _make_figure(shape: str, colour: str, size: str, position: str, draws: Draws) -> Figure:
    """A shape near the middle of its position, with slight random changes of size and angle."""
    x, y = (centre + draws.uniform(-0.02, 0.02) for centre in POSITIONS[position])
    return Figure(
        shape, colour, size, position, x, y, SIZES[size] * draws.uniform(0.96, 1.04), draws.uniform(-0.15, 0.15)
    )


def _paint_picture(figures: list[Figure], key: Key, image_size: Sides, channels: int = 3) -> Tensor:
    """Shapes on a dull colour with a gradient and two long waves of brightness, which depend on `key`."""
    draws, grid = Draws(*key), pixel_centers(max(height_and_width(image_size)))
    colour, x, y = dull_colour(draws), grid[None, :], grid[:, None]
    brightness = draws.uniform(-16, 16) * (x - 0.5) + draws.uniform(-16, 16) * (y - 0.5)
    for _ in range(2):
        direction, n_waves, phase = draws.uniform(0, math.pi), draws.uniform(1, 3), draws.uniform(0, 2 * math.pi)
        k = 2 * math.pi * n_waves
        brightness = brightness + 7 * np.sin(k * math.cos(direction) * x + k * math.sin(direction) * y + phase)
    picture = colour + brightness
    for figure in figures:
        paint(picture, figure)
    image = cut_out(torch.from_numpy(np.rint(picture).astype(np.uint8)), image_size)
    if channels == 4:
        return torch.cat([image, torch.full_like(image[:1], 255)])
    return image[[channel % 3 for channel in range(channels)]]


# Embeddings of the caption of a scene.

_TABLES = [list(table) for table in (POSITIONS, SHAPES, COLOURS, SIZES, ("dark", "light"))]
TOKENS, TOKEN_DIM = 9, 32  # of an encoded caption: "a small red circle on the left, on dark" has 9 words


def _encode_figure(figure: Figure, background: str) -> Tensor:
    """A shape and its background -> float32 (30,), one-hot codes of the 9 positions, 8 shapes, 8 colours, 3 sizes and 2
    backgrounds.

    The code of a shape's looks does not depend on its position, so they need not be learned for each position.
    """
    names = (figure.position, figure.shape, figure.colour, figure.size, background)
    return torch.cat([torch.eye(len(table))[table.index(name)] for table, name in zip(_TABLES, names, strict=True)])


def _encode_text(caption: str) -> Tensor:
    """A caption in the form of a text encoder's output: float32 (9, 32), for each word the sum of a fixed random vector
    of the word and one of its position, with variance 1; zeros after the end."""
    rows = [
        [(a + b) / 2**0.5 for a, b in zip(_vector("word", word), _vector("position", position), strict=True)]
        for position, word in enumerate(caption.replace(",", "").split())
    ]
    return torch.tensor(rows + [[0.0] * TOKEN_DIM] * (TOKENS - len(rows)))


@functools.lru_cache(maxsize=256)
def _vector(*key: int | str) -> list[float]:
    """Uniform numbers with mean 0 and variance 1."""
    draws = Draws("caption", *key)
    return [draws.uniform(-(3**0.5), 3**0.5) for _ in range(TOKEN_DIM)]


def condition_of(text: str) -> dict[str, Tensor]:
    """A caption of a scene, such as "a small red circle on the left, on dark" -> its "image_embed" (30,) and
    "text_encodings" (9, 32). The default background is light. Raises ValueError, in one line, for another sentence."""
    words = text.lower().strip().rstrip(".").removeprefix("an ").removeprefix("a ")
    words, _, background = words.partition(", on ")
    background = background or "light"
    for names in itertools.product(SHAPES, COLOURS, SIZES, POSITIONS):
        figure = Figure(*names, x=0.5, y=0.5, radius=0.0, angle=0.0)
        if str(figure).split(" ", 1)[1] == words and background in BACKGROUNDS:
            caption = f"{figure}, on {background}"
            return {"image_embed": _encode_figure(figure, background), "text_encodings": _encode_text(caption)}
    raise ValueError(
        f"{text!r} is no caption of demo:shapes: write 'a', perhaps small or large, then one of {', '.join(COLOURS)}, "
        f"one of {', '.join(SHAPES)}, and one of {', '.join(POSITIONS)}; then perhaps ', on dark'"
    )
