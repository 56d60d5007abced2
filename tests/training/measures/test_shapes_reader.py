"""The reader of generated pictures, on real ones whose attributes are known."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from data.images.embeddings import IMAGE
from data.images.scenes import Scenes, Triple, drawing, triples_of
from training.measures.shapes_reader import ShapesReader


@cache
def reader(size: int) -> ShapesReader:
    return ShapesReader(size, **drawing())


@cache
def real(size: int, n: int = 150) -> tuple[Tensor, list[Triple]]:
    """Pictures of one shape, uint8, and what they show."""
    scenes = Scenes(n, image_size=size, seed=size)
    wanted = triples_of(torch.stack([scenes.embeddings(IMAGE).load(i) for i in range(n)]))
    return torch.stack([scenes.load(i) for i in range(n)]), wanted


@pytest.mark.parametrize("size", [24, 32, 64])
def test_every_real_picture_is_read(size):
    images, wanted = real(size)
    assert reader(size).read(images) == wanted
    assert reader(size).read(images[:7] / 255) == wanted[:7], "in [0, 1], too"


def test_pictures_of_something_else_are_read_at_chance():
    images, wanted = real(32)
    others = [wanted[(i + 75) % 150] for i in range(150)]
    found = reader(32).accuracy(images, others)
    for name, chance in {"shape": 1 / 8, "colour": 1 / 8, "place": 1 / 9}.items():
        standard_error = (chance * (1 - chance) / 150) ** 0.5
        assert abs(found[name].mean().item() - chance) < 4 * standard_error, name
