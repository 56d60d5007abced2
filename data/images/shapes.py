"""demo:shapes, a generated set of captioned images: coloured shapes on softly textured backgrounds.

Everything is drawn in units of the picture's side, so that one index shows the same scene at every image_size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..hashing import Draws
from .decoding import randomly_flipped

Array = npt.NDArray[np.floating]

COLOURS = {
    "red": (214, 40, 44), "orange": (242, 135, 30), "yellow": (250, 222, 60), "green": (40, 175, 70),
    "cyan": (70, 210, 220), "blue": (40, 84, 210), "purple": (128, 58, 180), "pink": (236, 88, 160),
}  # fmt: skip
SIZES = {"small": 0.13, "": 0.17, "large": 0.215}  # radius; captions do not mention the middle size
PLACES = {
    "top left": (0.25, 0.25), "at the top": (0.5, 0.25), "top right": (0.75, 0.25),
    "on the left": (0.25, 0.5), "in the centre": (0.5, 0.5), "on the right": (0.75, 0.5),
    "bottom left": (0.25, 0.75), "at the bottom": (0.5, 0.75), "bottom right": (0.75, 0.75),
}  # fmt: skip


def _far_apart(places: tuple[str, ...]) -> bool:
    """Whether any two places are half a picture apart, across or down, so that not even large shapes touch."""
    pairs = itertools.combinations((PLACES[place] for place in places), 2)
    return all(max(abs(ax - bx), abs(ay - by)) >= 0.5 for (ax, ay), (bx, by) in pairs)


_ARRANGEMENTS = {n: [c for c in itertools.combinations(PLACES, n) if _far_apart(c)] for n in (1, 2, 3)}


def _star(x: Array, y: Array) -> Array:
    """A star (see SHAPES) with five points at radius 1 and notches between them at radius 0.45."""
    fifth = 2 * math.pi / 5
    angle = np.abs((np.arctan2(x, -y) + fifth / 2) % fifth - fifth / 2)  # by symmetry, all ten half points map to one
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


@dataclass(frozen=True)
class Item:
    """One shape of a scene. x, y, radius in [0, 1] of the picture's side (x to the right, y down); angle in radians."""

    shape: str
    colour: str
    size: str
    place: str
    x: float
    y: float
    radius: float
    angle: float

    def __str__(self) -> str:
        words = " ".join(word for word in (self.size, self.colour, self.shape) if word)
        return f"{'an' if words[0] in 'aeiou' else 'a'} {words} {self.place}"


class Shapes:
    """`n` scenes of one to three shapes, with captions; each depends only on (seed, index). Methods: see `Images`."""

    fingerprint = ""

    def __init__(self, n: int, *, image_size: int, channels: int = 3, flip: bool = False, seed: int = 0) -> None:
        self.n, self.image_size, self.channels, self.flip, self.seed = n, image_size, channels, flip, seed

    def __len__(self) -> int:
        return self.n

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        image = draw_scene(self.image_size, self.items(index), Draws("background", self.seed, index))
        if self.channels == 4:
            image = torch.cat([image, torch.full_like(image[:1], 255)])
        return randomly_flipped(image, self.seed, epoch, index) if self.flip and augment else image

    def describe(self, index: int) -> str:
        return f"demo:shapes[{index}]"

    name = describe

    def caption(self, index: int) -> str:
        """What the picture (not mirrored) shows: "a red circle top left and a small blue star bottom right"."""
        *others, last = map(str, self.items(index))
        return f"{', '.join(others)} and {last}" if others else last

    def items(self, index: int) -> list[Item]:
        """The shapes of scene `index`."""
        if not 0 <= index < self.n:
            raise IndexError(index)
        draws = Draws("shapes", self.seed, index)
        arrangements = _ARRANGEMENTS[1 + draws.below(3)]
        return [_item(place, draws) for place in arrangements[draws.below(len(arrangements))]]


def draw_scene(size: int, items: list[Item], draws: Draws) -> Tensor:
    """Shapes on a background that `draws` determines, uint8 (3, size, size)."""
    picture = _background(size, draws)
    for item in items:
        paint(picture, item)
    return torch.from_numpy(np.rint(picture).astype(np.uint8))


def _item(place: str, draws: Draws) -> Item:
    shape, colour, size = (list(choices)[draws.below(len(choices))] for choices in (SHAPES, COLOURS, SIZES))
    return placed(shape, colour, size, place, draws)


def placed(shape: str, colour: str, size: str, place: str, draws: Draws) -> Item:
    """A shape near the middle of its place, about as large as its size says, turned a little."""
    x, y = (centre + draws.uniform(-0.02, 0.02) for centre in PLACES[place])
    return Item(shape, colour, size, place, x, y, SIZES[size] * draws.uniform(0.96, 1.04), draws.uniform(-0.15, 0.15))


def is_dark(draws: Draws) -> bool:
    """Whether the background that `draws` determines is dark; otherwise it is light. This is the first that it says."""
    return bool(draws.below(2))


def _background(size: int, draws: Draws) -> Array:
    """float32 (3, size, size) in [0, 255]: a dull colour, dark or light, with a slope and two long waves of brightness.

    In at least one channel it stays 50 or more away from every one of COLOURS.
    """
    level = draws.uniform(50, 75) if is_dark(draws) else draws.uniform(185, 205)
    colour = np.array([level + draws.uniform(-12, 12) for _ in range(3)], np.float32)
    grid = (np.arange(size, dtype=np.float32) + 0.5) / size
    x, y = grid[None, :], grid[:, None]
    brightness = draws.uniform(-16, 16) * (x - 0.5) + draws.uniform(-16, 16) * (y - 0.5)
    for _ in range(2):
        direction, waves, phase = draws.uniform(0, math.pi), draws.uniform(1, 3), draws.uniform(0, 2 * math.pi)
        k = 2 * math.pi * waves
        brightness = brightness + 7 * np.sin(k * math.cos(direction) * x + k * math.sin(direction) * y + phase)
    return colour[:, None, None] + brightness


def paint(picture: Array, item: Item) -> None:
    """Lay one shape over picture (3, size, size), in place; its edge is one pixel wide."""
    rows, columns, cover = _cover(picture.shape[-1], item)
    colour = np.array(COLOURS[item.colour], np.float32)[:, None, None]
    region = picture[:, rows, columns]
    region += cover * (colour - region)


def _cover(size: int, item: Item) -> tuple[slice, slice, Array]:
    """The rows and columns that a shape reaches, and which part of each pixel there it covers."""
    reach = 1.05 * item.radius + 1 / size
    columns, rows = (slice(max(0, int((c - reach) * size)), int((c + reach) * size) + 1) for c in (item.x, item.y))
    grid = (np.arange(size, dtype=np.float32) + 0.5) / size
    x, y = (grid[None, columns] - item.x) / item.radius, (grid[rows, None] - item.y) / item.radius
    cos, sin = math.cos(item.angle), math.sin(item.angle)
    distance = SHAPES[item.shape](cos * x + sin * y, cos * y - sin * x)
    return rows, columns, np.clip(0.5 - distance * (item.radius * size), 0, 1)
