"""Grids show pixels as they are."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from tandem.training.visuals.images import code_histogram, grid, to_pixels, to_png


def gradient(channels: int) -> torch.Tensor:
    """Every byte value once: (2, channels, 16, 8)."""
    return (torch.arange(256).float() / 255).reshape(2, 1, 16, 8).expand(-1, channels, -1, -1)


@pytest.mark.parametrize("channels", [1, 3])
def test_every_byte_comes_back_as_it_was_in_three_channels(channels):
    pixels = to_pixels(gradient(channels))
    assert pixels.shape == (2, 16, 8, 3) and pixels.dtype == torch.uint8
    assert all(pixels[..., channel].flatten().tolist() == list(range(256)) for channel in range(3))


def test_of_other_numbers_of_channels_the_first_three_are_shown_and_of_two_the_first():
    images = torch.rand(2, 7, 4, 6)
    assert torch.equal(to_pixels(images), to_pixels(images[:, :3]))
    assert torch.equal(to_pixels(images[:, :2]), to_pixels(images[:, :1]))


def test_brightness_is_not_normalised_to_the_images_own_range():
    assert to_pixels(torch.full((1, 3, 4, 4), 0.25)).unique().tolist() == [64]
    assert to_pixels(torch.tensor([-0.5, 0.1, 1.7]).reshape(1, 1, 1, 3))[..., 0].flatten().tolist() == [0, 26, 255]


def test_transparent_places_show_a_checkerboard_and_opaque_ones_the_colour():
    image = torch.ones(1, 4, 16, 16) * 0.5
    image[:, 3] = 0
    assert to_pixels(image)[0, :, :, 0].unique().tolist() == [204, 255]
    assert to_pixels(image)[0, 0, [0, 7, 8], 0].tolist() == [255, 255, 204]
    image[:, 3] = 1
    assert to_pixels(image).unique().tolist() == [128]
    image[:, 3] = 0.5
    assert to_pixels(image)[0, 0, 0].tolist() == [191, 191, 191]


def test_grid_holds_each_image_to_the_byte_in_labelled_rows():
    rows = {"original": torch.rand(3, 3, 24, 32), "hard": torch.rand(3, 3, 24, 32)}
    shown = grid(rows, least_side=24)
    picture = np.asarray(Image.open(io.BytesIO(to_png(shown))))
    assert np.array_equal(picture, np.asarray(shown))
    width, height = shown.size
    left = width - 3 * 34
    for row, images in enumerate(rows.values()):
        for column, pixels in enumerate(to_pixels(images).numpy()):
            x, y = left + column * 34, 2 + row * 26
            assert np.array_equal(picture[y : y + 24, x : x + 32], pixels)
    assert height == 2 + 2 * 26
    for top in (2, 28):
        label = picture[top : top + 24, : left - 2]
        assert label.min() < 64, "there is ink in the margin"


def test_small_images_are_drawn_larger_pixel_by_pixel():
    images = torch.rand(2, 3, 32, 40)
    picture = np.asarray(grid({"original": images}))
    assert picture.shape[0] == 2 + 128 + 2 and picture.shape[1] > 2 * 160
    left = picture.shape[1] - 2 * 162
    shown = picture[2:130:4, left : left + 160 : 4]
    assert np.array_equal(shown, to_pixels(images)[0].numpy())
    assert grid({"large": torch.rand(1, 3, 200, 200)}).height == 204


def test_code_histogram_is_sorted_and_relative_to_the_most_used_code():
    counts = torch.tensor([0, 5, 10, 0])
    ink = (np.asarray(code_histogram(counts, width=4, height=101)) == 0).all(-1).sum(0)
    assert ink.tolist() == [101, 51, 0, 0]
    assert (np.asarray(code_histogram(torch.zeros(8, dtype=torch.int64))) == 255).all()
    assert code_histogram(torch.arange(8192)).size == (512, 128)
