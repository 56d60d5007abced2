"""demo:moving, a generated set of clips: one or two shapes that glide over a soft background and bounce off its edges.

Everything is drawn in units of the picture's side and of frames, so that one index shows the same scene at every
image_size, and a longer clip begins with the frames of a shorter one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..hashing import Draws
from ..images.decoding import randomly_flipped
from ..images.shapes import COLOURS, SHAPES, Item, paint

Array = npt.NDArray[np.floating]

FRAMES_PER_SECOND = 24  # nominal, for those who ask for other frames per second
_MARGIN = 0.22  # no shape's centre comes closer to an edge, in sides
_WAVES = 2


@dataclass(frozen=True)
class Mover:
    """A shape as it is in frame 0, with its speeds: sides per frame (x to the right, y down), radians per frame."""

    item: Item
    speed_x: float
    speed_y: float
    spin: float

    def at(self, time: float) -> Item:
        """The shape at a time, in frames."""
        return replace(
            self.item,
            x=_bounced(self.item.x + self.speed_x * time),
            y=_bounced(self.item.y + self.speed_y * time),
            angle=self.item.angle + self.spin * time,
        )


class Moving:
    """`n` scenes, each depending only on (seed, index). See `Videos` for the methods.

    frames_per_step: how much time passes between two frames of a clip, in frames of the scene.
    """

    fingerprint = ""

    def __init__(
        self,
        n: int,
        *,
        image_size: int,
        num_frames: int,
        frames_per_step: float = 1.0,
        flip: bool = False,
        seed: int = 0,
    ) -> None:
        self.n, self.image_size, self.num_frames, self.flip, self.seed = n, image_size, num_frames, flip, seed
        self.frames_per_step = frames_per_step

    def __len__(self) -> int:
        return self.n

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        movers, background = self.movers(index), _Background(Draws("moving background", self.seed, index))
        clip = np.empty((3, self.num_frames, self.image_size, self.image_size), np.uint8)
        for frame in range(self.num_frames):  # one by one, so that no frame's bits depend on the number of frames
            time = frame * self.frames_per_step
            picture = background.at(time, self.image_size)
            for mover in movers:
                paint(picture, mover.at(time))
            clip[:, frame] = np.rint(picture)
        video = torch.from_numpy(clip)
        return randomly_flipped(video, self.seed, epoch, index) if self.flip and augment else video

    def describe(self, index: int) -> str:
        return f"demo:moving[{index}]"

    name = describe

    def movers(self, index: int) -> list[Mover]:
        """The shapes of scene `index`, the hindmost first."""
        if not 0 <= index < self.n:
            raise IndexError(index)
        draws = Draws("moving", self.seed, index)
        return [_mover(draws) for _ in range(1 + draws.below(2))]


def _mover(draws: Draws) -> Mover:
    shape, colour = (list(choices)[draws.below(len(choices))] for choices in (SHAPES, COLOURS))
    x, y = (draws.uniform(_MARGIN, 1 - _MARGIN) for _ in range(2))
    direction, speed = draws.uniform(0, 2 * math.pi), draws.uniform(0.04, 0.07)
    item = Item(shape, colour, "", "", x, y, draws.uniform(0.2, 0.3), draws.uniform(0, 2 * math.pi))
    return Mover(item, speed * math.cos(direction), speed * math.sin(direction), draws.uniform(-0.06, 0.06))


def _bounced(place: float) -> float:
    """A place on an endless line -> the place between the margins of one that bounces off them."""
    width = 1 - 2 * _MARGIN
    return _MARGIN + width - abs((place - _MARGIN) % (2 * width) - width)


class _Background:
    """A dull colour, dark or light, with long waves of brightness that drift.

    In at least one channel it stays 50 or more away from every one of COLOURS.
    """

    def __init__(self, draws: Draws) -> None:
        level = draws.uniform(50, 75) if draws.below(2) else draws.uniform(185, 205)
        self._colour = np.array([level + draws.uniform(-12, 12) for _ in range(3)], np.float32)
        self._waves = [
            (
                draws.uniform(0, math.pi),
                draws.uniform(0.5, 1.5),
                draws.uniform(0, 2 * math.pi),
                draws.uniform(-0.1, 0.1),
            )
            for _ in range(_WAVES)
        ]

    def at(self, time: float, size: int) -> Array:
        """float32 (3, size, size) in [0, 255] at a time, in frames."""
        grid = (np.arange(size, dtype=np.float32) + 0.5) / size
        brightness = np.zeros((size, size), np.float32)
        for direction, waves, phase, drift in self._waves:
            k = 2 * math.pi * waves
            along = (k * math.cos(direction) * grid)[None, :] + (k * math.sin(direction) * grid)[:, None]
            brightness += 10 * np.sin(along + np.float32(phase + drift * time))
        return self._colour[:, None, None] + brightness
