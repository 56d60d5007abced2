"""The sides of pictures: a number of pixels for squares, or height and width."""

from __future__ import annotations

from typing import Any

Sides = int | tuple[int, int]


def height_and_width(sides: Any) -> tuple[int, int]:
    """256 -> (256, 256); (256, 384), or such a list of a config.json, -> (256, 384). Raises ValueError, in one line,
    for anything else."""
    pair = tuple(sides) if isinstance(sides, (list, tuple)) else (sides, sides)
    if len(pair) != 2 or not all(type(side) is int for side in pair):
        raise ValueError(f"image_size {str(sides)[:80]} is neither a number of pixels nor a height and a width")
    return pair


def sides_text(sides: Any) -> str:
    """256 -> "256 x 256"; (256, 384) -> "256 x 384", height x width."""
    return "{} x {}".format(*height_and_width(sides))
