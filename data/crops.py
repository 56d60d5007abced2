"""Which square of a picture becomes a sample: crops of images and of the frames of clips are computed here alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from .hashing import Draws

RATIO = 4 / 3  # the widest region, as width over height; the tallest is its inverse
_TRIES = 10


class Square(NamedTuple):
    """A square of a picture, in its pixels."""

    left: float
    top: float
    side: float


Cut = Callable[[int, int], Square]  # width and height of a picture -> the square that becomes the sample


@dataclass(frozen=True)
class Crop:
    """How training cuts pictures. Everything is drawn by (seed, epoch, index).

    Args:
        place: Where the largest square lies that is cut: "center", or at a "random" place.
        area: The least and the greatest share of the picture's area that a region has out of which the square is cut;
            None: that region is the whole picture. Area and shape of the region are drawn as torchvision's
            RandomResizedCrop documents it: the area evenly, the logarithm of width over height evenly from 3/4 to 4/3,
            then the place evenly; after ten draws that do not fit into the picture, the largest region in its middle
            that has such a shape.
        least: Pixels that both sides of the region have at least; the picture has to have as many.
    """

    place: str = "center"
    area: tuple[float, float] | None = None
    seed: int = 0
    least: int = 1

    def cut(self, epoch: int, index: int) -> Cut | None:
        """The square of one sample in one epoch, equal for pictures of one size; None for the middle of the whole
        picture, which decoders cut by themselves."""
        is_plain = self.place == "center" and self.area is None
        return None if is_plain else functools.partial(self._square, epoch, index)

    def _square(self, epoch: int, index: int, width: int, height: int) -> Square:
        draws = Draws("square", self.seed, epoch, index)
        left, top, across, down = self.region(width, height, draws)
        side = min(across, down)
        if self.place == "random":
            return Square(left + draws.below(across - side + 1), top + draws.below(down - side + 1), side)
        return Square(left + (across - side) / 2, top + (down - side) / 2, side)

    def region(self, width: int, height: int, draws: Draws) -> tuple[int, int, int, int]:
        """Left, top, width and height."""
        if self.area is None:
            return 0, 0, width, height
        for _ in range(_TRIES):
            pixels = draws.uniform(*self.area) * width * height
            ratio = math.exp(draws.uniform(-math.log(RATIO), math.log(RATIO)))
            across, down = (max(round(math.sqrt(x)), self.least) for x in (pixels * ratio, pixels / ratio))
            if across <= width and down <= height:
                return draws.below(width - across + 1), draws.below(height - down + 1), across, down
        across, down = min(width, round(height * RATIO)), min(height, round(width * RATIO))
        return (width - across) // 2, (height - down) // 2, across, down


CENTER = Crop()
