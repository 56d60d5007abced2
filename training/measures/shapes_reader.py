"""Reads from a picture of demo:shapes which shape of which colour is where, without learning: whether a generated
picture is what it was asked to be."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_NEAR = 25  # levels of 255 in every channel; no background comes nearer than 50 to a colour in all of them
_OFFSETS = (-0.04, -0.02, 0.0, 0.02, 0.04)  # of a shape from the middle of its place, in sides of the picture
_AT_A_TIME = 64  # pictures, which bounds the memory


class Reading(NamedTuple):
    """What a picture shows, by name; "" each if no pixel has one of the colours."""

    shape: str
    colour: str
    place: str


class ShapesReader:
    """Reads pictures that show one shape.

    The colour is the one that most pixels are near to, the place the one nearest to the mean position of these pixels.
    Then each pixel gets its share of the way from the background (the median of the picture) to the colour, and the
    shape is the one whose cover, drawn at that place in some sizes and at some offsets, correlates best with these
    shares.

    Args:
        image_size: Side of the pictures in pixels.
        shapes: Names.
        colours: Red, green and blue, from 0 to 255, by name.
        places: Middle (x, y) by name, in sides of the picture.
        radii: Of the shapes, in sides of the picture.
        cover: (image_size, shape, x, y, radius) -> which part of each pixel a shape covers, (image_size, image_size).
    """

    def __init__(
        self,
        image_size: int,
        *,
        shapes: Sequence[str],
        colours: Mapping[str, Sequence[int]],
        places: Mapping[str, tuple[float, float]],
        radii: Sequence[float],
        cover: Callable[[int, str, float, float, float], npt.NDArray[np.floating]],
    ) -> None:
        self._size, self._shapes, self._radii, self._cover = image_size, list(shapes), list(radii), cover
        self._colour_names, self._place_names = list(colours), list(places)
        self._colours = torch.tensor(list(colours.values()), dtype=torch.float32)
        self._places = torch.tensor(list(places.values()), dtype=torch.float32)
        self._covers: dict[int, Tensor] = {}

    def accuracy(self, images: Tensor, wanted: Sequence[tuple[str, str, str]]) -> dict[str, Tensor]:
        """Pictures and what each was to show (shape, colour, place) -> 1 or 0 for each, float32 (b,), by attribute."""
        read = self.read(images)
        return {
            name: torch.tensor([float(a[i] == b[i]) for a, b in zip(read, wanted, strict=True)])
            for i, name in enumerate(Reading._fields)
        }

    def read(self, images: Tensor) -> list[Reading]:
        """Pictures (b, 3, image_size, image_size), uint8 or in [0, 1] -> what they show."""
        scale = 1.0 if images.dtype == torch.uint8 else 255.0
        parts = (part.cpu().float() * scale for part in images.split(_AT_A_TIME))
        return list(itertools.chain.from_iterable(map(self._read, parts)))

    def _read(self, images: Tensor) -> list[Reading]:
        distances = (images[:, None] - self._colours[:, :, None, None]).abs().amax(2)
        near = distances < _NEAR  # (b, colours, size, size)
        counts = near.flatten(2).sum(2)
        chosen = counts.argmax(1)
        rows = torch.arange(len(images))
        places = self._nearest_place(near[rows, chosen].float())
        shapes = self._shapes_at(places, self._shares(images, self._colours[chosen]))
        is_any = counts[rows, chosen] > 0
        return [
            Reading(self._shapes[shape], self._colour_names[colour], self._place_names[place])
            if found
            else Reading("", "", "")
            for shape, colour, place, found in zip(
                shapes.tolist(), chosen.tolist(), places.tolist(), is_any.tolist(), strict=True
            )
        ]

    def _nearest_place(self, mask: Tensor) -> Tensor:
        """(b, size, size) -> the place nearest to the mean position, (b,)."""
        grid = (torch.arange(self._size) + 0.5) / self._size
        total = mask.sum((1, 2)).clamp_min(1)
        x, y = (mask.sum(1) * grid).sum(1) / total, (mask.sum(2) * grid).sum(1) / total
        return torch.cdist(torch.stack([x, y], 1), self._places).argmin(1)

    @staticmethod
    def _shares(images: Tensor, colours: Tensor) -> Tensor:
        """How much of each pixel is shape, if all others are background: (b, size * size) in [0, 1]."""
        pixels = images.flatten(2)
        background = pixels.median(2, keepdim=True).values
        way = colours[:, :, None] - background
        return (((pixels - background) * way).sum(1) / way.square().sum(1).clamp_min(1)).clamp(0, 1)

    def _shapes_at(self, places: Tensor, shares: Tensor) -> Tensor:
        """The shapes whose covers at the places correlate best with the shares, (b,)."""
        shapes = torch.zeros_like(places)
        for place in places.unique().tolist():
            here = places == place
            centred = shares[here] - shares[here].mean(1, keepdim=True)
            # All covers have length 1; the length of the shares is the same for all of them.
            best = (centred @ self._covers_at(place).T).argmax(1)
            shapes[here] = best // (len(self._radii) * len(_OFFSETS) ** 2)
        return shapes

    def _covers_at(self, place: int) -> Tensor:
        """All shapes, in all sizes and at all offsets: (n, size * size), each with mean 0 and length 1."""
        if place not in self._covers:
            x, y = self._places[place].tolist()
            drawn = [
                self._cover(self._size, shape, x + dx, y + dy, radius)
                for shape, radius, dx, dy in itertools.product(self._shapes, self._radii, _OFFSETS, _OFFSETS)
            ]
            covers = torch.from_numpy(np.stack(drawn)).float().flatten(1)
            covers -= covers.mean(1, keepdim=True)
            self._covers[place] = covers / covers.norm(dim=1, keepdim=True)
        return self._covers[place]
