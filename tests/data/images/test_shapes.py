"""demo:shapes: the pictures are what their captions say, everywhere the same."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from data.images.shapes import COLOURS, SHAPES, SIZES
from data.sets import open_images

# of an outline of radius 1, from elementary geometry; of the crescent see below
AREAS = {
    "circle": math.pi, "ring": math.pi * (1 - 0.44**2), "square": 1.64**2, "diamond": 2 / 1.4,
    "triangle": 1.75**2 / 2, "star": 5 * 0.45 * math.sin(math.pi / 5), "cross": 2 * 1.9 * 0.64 - 0.64**2,
}  # fmt: skip
PLACES = {
    "top left": (0.25, 0.25), "at the top": (0.5, 0.25), "top right": (0.75, 0.25),
    "on the left": (0.25, 0.5), "in the centre": (0.5, 0.5), "on the right": (0.75, 0.5),
    "bottom left": (0.25, 0.75), "at the bottom": (0.5, 0.75), "bottom right": (0.75, 0.75),
}  # fmt: skip
PHRASE = re.compile(rf"an? (?:(small|large) )?({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) ({'|'.join(PLACES)})")


def crescent_area() -> float:
    """A circle of radius 1 less its lens with one of radius r at distance d."""
    r, d = 0.85, 0.55
    a, b = math.acos((d**2 + 1 - r**2) / (2 * d)), math.acos((d**2 + r**2 - 1) / (2 * d * r))
    lens = a + r**2 * b - 0.5 * math.sqrt((-d + 1 + r) * (d + 1 - r) * (d - 1 + r) * (d + 1 + r))
    return math.pi - lens


def test_captions_are_true():
    """The pixels of the named colour lie at the named place, and their area is that of the named shape and size."""
    size = 192
    images = open_images("demo:shapes", image_size=size)
    areas = AREAS | {"crescent": crescent_area()}
    y, x = np.mgrid[0:size, 0:size] / size
    seen = set()
    for index in range(120):
        picture = images.load(index).numpy().astype(int)
        phrases = PHRASE.findall(images.caption(index))
        assert 1 <= len(phrases) <= 3
        for size_name, colour, shape, place in phrases:
            near = np.maximum(abs(x - PLACES[place][0]), abs(y - PLACES[place][1])) < 0.25
            distance = np.abs(picture - np.array(COLOURS[colour])[:, None, None]).max(0)
            area = ((distance < 50) & near).sum() / size**2
            # sizes vary by 4%, so areas by 8%; the next size is 26% away; pixels on the outline are of mixed colours
            assert area / (areas[shape] * SIZES[size_name] ** 2) == pytest.approx(1, abs=0.16), images.caption(index)
            seen.update([size_name, colour, shape, place])
    assert seen == {*SIZES, *COLOURS, *SHAPES, *PLACES}
