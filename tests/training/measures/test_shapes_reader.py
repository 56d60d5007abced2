"""The reader of generated pictures, on real ones whose attributes are known."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from data.hashing import Draws
from data.images.embeddings import IMAGE
from data.images.scenes import Scenes, Triple, drawing, triples_of
from data.images.shapes import SHAPES, Item, draw_scene
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


def accuracy(size: int, images: Tensor) -> dict[str, float]:
    values = reader(size).accuracy(images, real(size)[1])
    return {name: value.mean().item() for name, value in values.items()}


def noisy(images: Tensor) -> Tensor:
    """With noise of 16 levels of 255."""
    noise = 16 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images.float() + noise).clamp(0, 255) / 255


def blurred(images: Tensor) -> Tensor:
    """By 1-2-1, across and down."""
    weights = torch.tensor([1.0, 2.0, 1.0]) / 4
    kernel = (weights[:, None] * weights).expand(3, 1, 3, 3)
    return F.conv2d(F.pad(images / 255, (1, 1, 1, 1), mode="replicate"), kernel, groups=3)


@pytest.mark.parametrize("size", [24, 32, 64])
def test_every_real_picture_is_read(size):
    images, wanted = real(size)
    assert reader(size).read(images) == wanted
    assert reader(size).read(images[:7] / 255) == wanted[:7], "in [0, 1], too"


def test_a_shape_that_lies_beside_the_middle_of_its_place_is_read():
    items = [
        Item(shape, "blue", "", "top left", 0.25 + dx, 0.25 + dy, radius, 0.0)
        for shape in SHAPES for dx in (-0.04, 0.04) for dy in (-0.04, 0.04) for radius in (0.13, 0.17)
    ]  # fmt: skip
    pictures = torch.stack([draw_scene(24, [item], Draws("test", i)) for i, item in enumerate(items)])
    assert reader(24).read(pictures) == [(item.shape, item.colour, item.place) for item in items]


def test_blur_does():
    """At 24 pixels, small shapes have no pixel of their colour left, and their outlines are alike."""
    found = accuracy(24, blurred(real(24)[0]))
    assert 0.85 < found["colour"] < 0.97 and 0.85 < found["place"] < 0.97 and 0.7 < found["shape"] < found["colour"]


def test_pictures_of_something_else_are_read_at_chance():
    images, wanted = real(32)
    others = [wanted[(i + 75) % 150] for i in range(150)]
    found = reader(32).accuracy(images, others)
    for name, chance in {"shape": 1 / 8, "colour": 1 / 8, "place": 1 / 9}.items():
        standard_error = (chance * (1 - chance) / 150) ** 0.5
        assert abs(found[name].mean().item() - chance) < 4 * standard_error, name
