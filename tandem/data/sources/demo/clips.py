"""Clips: one or two shapes that glide over a soft background and bounce off its edges."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.data.sources.record import Record
from tandem.hashing import Draws, Key
from tandem.sides import Sides, height_and_width

from .shapes import COLOURS, SHAPES, Figure, cut_out, dull_colour, paint, pixel_centers

FRAMES_PER_SECOND = 24  # of a scene; with --fps N, a clip has N frames for 24 of the scene
_MARGIN = 0.22  # the least distance of a shape's centre from an edge, in sides


class _Mover(NamedTuple):
    """A shape as it is in frame 0, with its speeds: sides per frame (x to the right, y down), radians per frame."""

    figure: Figure
    speed_x: float
    speed_y: float
    spin: float

    def at(self, time: float) -> Figure:
        """The shape at a time, in frames."""
        return self.figure._replace(
            x=_bounce(self.figure.x + self.speed_x * time),
            y=_bounce(self.figure.y + self.speed_y * time),
            angle=self.figure.angle + self.spin * time,
        )


def _bounce(position: float) -> float:
    """A position on an endless line -> the position between the margins of a shape that bounces off them."""
    width = 1 - 2 * _MARGIN
    return _MARGIN + width - abs((position - _MARGIN) % (2 * width) - width)


def draw_moving(seed: int, index: int, _: int | str) -> Record:
    draws = Draws("moving", seed, index)
    movers = [_draw_mover(draws) for _ in range(1 + draws.below(2))]
    return {"clip": partial(_paint_clip, movers, ("moving background", seed, index))}


def _draw_mover(draws: Draws) -> _Mover:
    shape, colour = draws.choice(SHAPES), draws.choice(COLOURS)
    x, y = (draws.uniform(_MARGIN, 1 - _MARGIN) for _ in range(2))
    direction, speed = draws.uniform(0, 2 * math.pi), draws.uniform(0.04, 0.07)
    figure = Figure(shape, colour, "", "", x, y, draws.uniform(0.2, 0.3), draws.uniform(0, 2 * math.pi))
    return _Mover(figure, speed * math.cos(direction), speed * math.sin(direction), draws.uniform(-0.06, 0.06))


def _paint_clip(
    movers: list[_Mover], key: Key, image_size: Sides, num_frames: int, frames_per_step: float = 1.0
) -> Tensor:
    """Shapes, painted in order, on a dull colour with drifting long waves of brightness, which depend on `key`."""
    side = max(height_and_width(image_size))
    draws, grid = Draws(*key), pixel_centers(side)
    colour, waves = dull_colour(draws), []
    for _ in range(2):
        direction, n_waves, phase = draws.uniform(0, math.pi), draws.uniform(0.5, 1.5), draws.uniform(0, 2 * math.pi)
        k, drift = 2 * math.pi * n_waves, draws.uniform(-0.1, 0.1)
        along = (k * math.cos(direction) * grid)[None, :] + (k * math.sin(direction) * grid)[:, None]
        waves.append((along, phase, drift))
    clip = np.empty((3, num_frames, side, side), np.uint8)
    for frame in range(num_frames):  # one by one, so that no frame's bits depend on the number of frames
        time = frame * frames_per_step
        brightness = np.zeros((side, side), np.float32)
        for along, phase, drift in waves:
            brightness += 10 * np.sin(along + np.float32(phase + drift * time))
        picture = colour + brightness
        for mover in movers:
            paint(picture, mover.at(time))
        clip[:, frame] = np.rint(picture)
    return cut_out(torch.from_numpy(clip), image_size)
