"""Pictures of sounds and captions show what they were given, where it belongs."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from training.pictures.sounds import best_matches, similarity_picture, spectrogram_grid

GAP, WIDTH, HEIGHT = 14, 320, 128


def pixels(picture: Image.Image) -> np.ndarray:
    assert picture.mode == "RGB"
    return np.asarray(picture).astype(int)


def test_low_frequencies_are_at_the_bottom_and_time_runs_to_the_right():
    spectrogram = torch.zeros(1, 64, 320)
    spectrogram[0, 0, :160] = 1  # the lowest band, in the first half
    picture = pixels(spectrogram_grid(spectrogram, [[]]))[GAP : GAP + HEIGHT, GAP : GAP + WIDTH]
    assert (picture[-2:, :160] == 255).all(), "two pixels per band"
    assert (picture[:-2] == 0).all() and (picture[:, 160:] == 0).all()


def test_brightness_grows_with_the_value_and_long_clips_are_averaged():
    ramp = torch.linspace(-80, 0, 3200).expand(1, 64, -1)
    row = pixels(spectrogram_grid(ramp, [[]]))[GAP + 60, GAP : GAP + WIDTH]
    luma = row @ np.array([0.3, 0.59, 0.11])
    assert (np.diff(luma) > -1.0).all() and luma[0] < 2 and luma[-1] > 253
    assert luma[WIDTH // 2] == pytest.approx(127, abs=3)
    stripes = torch.tensor([0.0, 1.0]).repeat(320).expand(1, 64, -1)
    row = pixels(spectrogram_grid(stripes, [[]]))[GAP + 60, GAP : GAP + WIDTH]
    assert (row.std(0) == 0).all() and row[0] @ np.array([0.3, 0.59, 0.11]) == pytest.approx(127, abs=3)


def test_a_logarithm_of_zero_is_dark_and_does_not_spoil_the_rest():
    spectrogram = torch.zeros(1, 64, 320)
    spectrogram[0, 32:] = 1.0
    spectrogram[0, 0], spectrogram[0, 1], spectrogram[0, 2] = -math.inf, math.nan, math.inf
    picture = pixels(spectrogram_grid(spectrogram, [[]]))[GAP : GAP + HEIGHT, GAP : GAP + WIDTH]
    assert (picture[-64:] == 0).all() and (picture[:64] == 255).all()
    assert pixels(spectrogram_grid(torch.full((1, 4, 4), math.nan), [[]])).shape


def test_best_matches_are_ranked_and_the_right_one_is_shown_however_far_behind():
    audio = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    angles = torch.tensor([0.3, 0.1, 0.2, 0.25, 1.0])  # the second reading of a does not count
    text = torch.stack([angles.cos(), angles.sin()], 1)
    texts = ["c", "a", "b", "a", "d"]
    first, second = best_matches(audio, text, texts, [["d", "c"], ["d", "a"]], count=2)
    assert [(m.caption, m.is_right, m.rank) for m in first] == [("a", False, 1), ("b", False, 2), ("c", True, 3)]
    assert first[0].score == pytest.approx(math.cos(0.1))
    assert [(m.caption, m.is_right, m.rank) for m in second] == [("d", True, 1), ("c", False, 2)]
    assert [len(matches) for matches in best_matches(audio, text, texts, [[], ["not there"]], count=9)] == [4, 4]


def cell(picture: np.ndarray, row: int, column: int, side: int) -> list[int]:
    """Colour in the middle of a cell."""
    return picture[47 + row * side + side // 2, 47 + column * side + side // 2].tolist()


def test_similarities_are_red_above_zero_and_blue_below_on_the_scale_that_is_drawn():
    matrix = torch.tensor([[0.8, -0.8, 0.0], [0.4, -0.4, math.nan]])
    picture = pixels(similarity_picture(matrix))
    side = 512 // 3
    assert cell(picture, 0, 0, side) == [166, 27, 41] and cell(picture, 0, 1, side) == [33, 82, 156]
    assert cell(picture, 0, 2, side) == [247, 247, 247] and cell(picture, 1, 2, side) == [128, 128, 128]
    assert cell(picture, 1, 0, side) == [232, 146, 116] and cell(picture, 1, 1, side) == [128, 172, 213]
    scale = 47 + 3 * side + 2 * GAP + GAP // 2
    assert picture[47, scale].tolist() == [166, 27, 41]
    assert picture[47 + 2 * side - 1, scale].tolist() == [33, 82, 156]
    assert (picture[47 : 47 + 2 * side, scale] >= 0).all() and picture.shape[1] > scale + GAP
