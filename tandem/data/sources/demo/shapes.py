"""Shapes: their attributes, and how they are painted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tandem.hashing import Draws
from tandem.sides import Sides, height_and_width

Array = npt.NDArray[np.floating]

COLOURS = {
    "red": (214, 40, 44), "orange": (242, 135, 30), "yellow": (250, 222, 60), "green": (40, 175, 70),
    "cyan": (70, 210, 220), "blue": (40, 84, 210), "purple": (128, 58, 180), "pink": (236, 88, 160),
}  # fmt: skip
SIZES = {"small": 0.13, "": 0.17, "large": 0.215}  # radius; captions do not mention the middle size
POSITIONS = {
    "top left": (0.25, 0.25), "at the top": (0.5, 0.25), "top right": (0.75, 0.25),
    "on the left": (0.25, 0.5), "in the centre": (0.5, 0.5), "on the right": (0.75, 0.5),
    "bottom left": (0.25, 0.75), "at the bottom": (0.5, 0.75), "bottom right": (0.75, 0.75),
}  # fmt: skip
BACKGROUNDS = ("light", "dark")


def _star(x: Array, y: Array) -> Array:
    """A star (see SHAPES) with five points at radius 1 and notches between them at radius 0.45."""
    fifth = 2 * math.pi / 5
    # The angle from the nearest point suffices, because the two halves of a point are mirror images.
    angle = np.abs((np.arctan2(x, -y) + fifth / 2) % fifth - fifth / 2)
    along, across = np.hypot(x, y) * np.cos(angle), np.hypot(x, y) * np.sin(angle)
    notch_along, notch_across = 0.45 * math.cos(fifth / 2), 0.45 * math.sin(fifth / 2)
    edge = math.hypot(1 - notch_along, notch_across)
    return ((along - 1) * notch_across + across * (1 - notch_along)) / edge


# (x, y) from the centre, y downwards -> distance to the outline, positive outside, negative inside; all in radii
SHAPES: dict[str, Callable[[Array, Array], Array]] = {
    "circle": lambda x, y: np.hypot(x, y) - 1,
    "ring": lambda x, y: np.abs(np.hypot(x, y) - 0.72) - 0.28,
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) - 0.82,
    "diamond": lambda x, y: (1.4 * np.abs(x) + np.abs(y) - 1) / math.hypot(1.4, 1),
    "triangle": lambda x, y: np.maximum(y - 0.75, (2 * np.abs(x) - y - 1) / math.hypot(2, 1)),
    "star": _star,
    "cross": lambda x, y: np.minimum(
        np.maximum(np.abs(x) - 0.95, np.abs(y) - 0.32), np.maximum(np.abs(y) - 0.95, np.abs(x) - 0.32)
    ),
    "crescent": lambda x, y: np.maximum(np.hypot(x, y) - 1, 0.85 - np.hypot(x - 0.55, y)),
}


class Figure(NamedTuple):
    """A shape in a picture. x, y, radius in [0, 1] of the picture's side (x to the right, y down); angle in radians."""

    shape: str
    colour: str
    size: str
    position: str
    x: float
    y: float
    radius: float
    angle: float

    def __str__(self) -> str:
        words = " ".join(word for word in (self.size, self.colour, self.shape) if word)
        return f"{'an' if words[0] in 'aeiou' else 'a'} {words} {self.position}"


def paint(picture: Array, figure: Figure) -> None:
    """Lay one shape over picture (3, size, size), in place; its edge is one pixel wide."""
    size = picture.shape[-1]
    reach = 1.05 * figure.radius + 1 / size
    columns, rows = (slice(max(0, int((c - reach) * size)), int((c + reach) * size) + 1) for c in (figure.x, figure.y))
    grid = pixel_centers(size)
    x, y = (grid[None, columns] - figure.x) / figure.radius, (grid[rows, None] - figure.y) / figure.radius
    cos, sin = math.cos(figure.angle), math.sin(figure.angle)
    distance = SHAPES[figure.shape](cos * x + sin * y, cos * y - sin * x)
    cover = np.clip(0.5 - distance * (figure.radius * size), 0, 1)  # which part of each pixel the shape covers
    region = picture[:, rows, columns]
    region += cover * (np.array(COLOURS[figure.colour], np.float32)[:, None, None] - region)


def pixel_centers(size: int) -> Array:
    return (np.arange(size, dtype=np.float32) + 0.5) / size


def dull_colour(draws: Draws) -> Array:
    """float32 (3, 1, 1) in [0, 255]. In at least one channel it differs by 50 or more from each of COLOURS, even after
    waves of brightness change it by up to 30. The first of `draws` determines whether it is dark."""
    level = draws.uniform(50, 75) if draws.choice(BACKGROUNDS) == "dark" else draws.uniform(185, 205)
    return np.array([level + draws.uniform(-12, 12) for _ in range(3)], np.float32)[:, None, None]


def cut_out(square: Tensor, image_size: Sides) -> Tensor:
    """The middle of a square scene (..., n, n), of which one side is n: (..., height, width)."""
    height, width = height_and_width(image_size)
    top, left = (square.shape[-2] - height) // 2, (square.shape[-1] - width) // 2
    return square[..., top : top + height, left : left + width].contiguous()
