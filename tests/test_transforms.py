"""Images and latents that are shrunk and turned, against NumPy and closed forms."""

import numpy as np
import pytest
import torch

from tandem.transforms import Transform, possible_sizes


def pictures(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def test_each_sample_is_turned_by_its_own_number_of_quarter_turns():
    x = pictures(4, 3, 6, 6)
    turned = Transform(4, torch.tensor([0, 1, 2, 3]))(x)
    for turns in range(4):
        np.testing.assert_array_equal(turned[turns], np.rot90(x[turns].numpy(), turns, (1, 2)))


def test_half_a_side_is_the_mean_of_four_places_and_a_quarter_that_of_the_four_in_the_middle_of_sixteen():
    x = pictures(2, 3, 8, 8)
    half = Transform(2, torch.tensor([0, 0]))(x)
    torch.testing.assert_close(half, x.unflatten(3, (4, 2)).unflatten(2, (4, 2)).mean((3, 5)))
    quarter = Transform(1, torch.tensor([0, 0]))(x)
    middles = x.unflatten(3, (2, 4)).unflatten(2, (2, 4))[:, :, :, 1:3, :, 1:3]
    torch.testing.assert_close(quarter, middles.mean((3, 5)))


def test_three_quarters_keep_a_slope():
    slope = torch.arange(8.0).expand(1, 1, 8, 8)
    shrunk = Transform(3, torch.tensor([0]))(slope)
    expected = (torch.arange(6) + 0.5) * 8 / 6 - 0.5  # where the places of the smaller grid are on the larger one
    torch.testing.assert_close(shrunk, expected.expand(1, 1, 6, 6))


def test_what_is_not_square_is_turned_by_halves_alone():
    x = pictures(2, 3, 8, 12)
    turned = Transform(4, torch.tensor([0, 2]))(x)
    assert torch.equal(turned, torch.stack([x[0], x[1].flip((-2, -1))]))
    half = Transform(2, torch.tensor([0, 2]))(x)
    torch.testing.assert_close(half, turned.unflatten(3, (6, 2)).unflatten(2, (4, 2)).mean((3, 5)))
    assert possible_sizes(8, 12) == [4, 3, 2, 1] and possible_sizes(8, 6) == [4, 2] and possible_sizes(1, 4) == [4]


@pytest.mark.parametrize("quarters", [4, 3, 2, 1])
def test_every_frame_of_a_video_is_changed_as_an_image(quarters):
    videos, transform = pictures(2, 3, 5, 8, 8), Transform(quarters, torch.tensor([1, 3]))
    changed = transform(videos)
    for frame in range(5):
        torch.testing.assert_close(changed[:, :, frame], transform(videos[:, :, frame]))


@pytest.mark.parametrize(
    ("side", "sizes"), [(8, [4, 3, 2, 1]), (6, [4, 2]), (7, [4]), (4, [4, 3, 2]), (2, [4]), (1, [4])]
)
def test_a_size_leaves_a_whole_number_of_places(side, sizes):
    assert possible_sizes(side) == sizes
