"""Pictures of sounds and captions show what they were given, where it belongs."""

import math

import numpy as np
import pytest
import torch

from tandem.training.visuals.images import to_pixels
from tandem.training.visuals.sounds import (
    Match,
    best_matches,
    cosine_colours,
    cubehelix,
    sounds_picture,
    spectrogram_colours,
)

WIDTH = 320


def pixels(colours: torch.Tensor) -> np.ndarray:
    return to_pixels(colours[None])[0].numpy().astype(int)


def test_low_frequencies_are_at_the_bottom_and_time_runs_to_the_right():
    spectrogram = torch.full((64, 320), -80.0)
    spectrogram[0, :160] = 0  # the lowest band, in the first half
    picture = pixels(spectrogram_colours(spectrogram))
    assert (picture[-2:, :160] == 255).all(), "two pixels per band"
    assert (picture[:-2] == 0).all() and (picture[:, 160:] == 0).all()


def test_long_clips_are_averaged():
    stripes = torch.tensor([-80.0, 0.0]).repeat(320).expand(64, -1)
    row = pixels(spectrogram_colours(stripes))[60]
    assert (row.std(0) == 0).all() and row[0] @ np.array([0.3, 0.59, 0.11]) == pytest.approx(127, abs=3)


def test_a_logarithm_of_zero_is_dark_and_does_not_spoil_the_rest():
    spectrogram = torch.zeros(64, 320)
    spectrogram[32:] = 1.0
    spectrogram[0], spectrogram[1], spectrogram[2] = -math.inf, math.nan, math.inf
    picture = pixels(spectrogram_colours(spectrogram))
    assert (picture[-64:] == 0).all() and (picture[:64] == 255).all()
    assert (spectrogram_colours(torch.full((4, 4), math.nan)) == 0).all()


def test_cubehelix_runs_from_black_to_white_in_even_steps_of_brightness():
    colours = cubehelix().double()
    assert colours[0].tolist() == [0, 0, 0] and colours[-1].tolist() == [1, 1, 1]
    luma = 255 * colours @ torch.tensor([0.3, 0.59, 0.11], dtype=torch.float64)
    assert (luma.diff() > 0).all() and (luma - torch.linspace(0, 255, 256)).abs().max() < 2.0


def test_best_matches_are_ranked_and_the_right_one_is_shown_however_far_behind():
    audio = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    angles = torch.tensor([0.3, 0.1, 0.2, 0.25, 1.0])  # the second reading of a does not count
    text = torch.stack([angles.cos(), angles.sin()], 1)
    texts = ["c", "a", "b", "a", "d"]
    first, second = best_matches(audio, text, texts, [["d", "c"], ["d", "a"]], count=2)
    assert [(m.caption, m.is_relevant, m.rank) for m in first] == [("a", False, 1), ("b", False, 2), ("c", True, 3)]
    assert first[0].score == pytest.approx(math.cos(0.1))
    assert [(m.caption, m.is_relevant, m.rank) for m in second] == [("d", True, 1), ("c", False, 2)]
    assert [len(matches) for matches in best_matches(audio, text, texts, [[], ["not there"]], count=9)] == [4, 4]


def test_cosines_are_red_above_zero_and_blue_below_on_the_scale_that_is_named():
    colours, limit = cosine_colours(torch.tensor([[0.8, -0.8, 0.0], [0.4, -0.4, math.nan]]))
    assert limit == 0.8
    expected = [[166, 27, 41], [33, 82, 156], [247, 247, 247]], [[232, 146, 116], [128, 172, 213], [128, 128, 128]]
    assert pixels(colours).tolist() == list(expected)


def test_the_picture_has_a_row_for_each_clip_and_the_cosines_below():
    spectrograms = torch.rand(2, 64, 320)
    matches = [[Match("a dog, \u72ac", 0.5, True, 1)], [Match("rain " * 40, 0.1, False, 1)]]
    picture = np.asarray(sounds_picture(spectrograms, matches, torch.eye(2))).astype(int)
    left = picture.shape[1] - 2 - 384  # of the cosines, and of the spectrograms, which are narrower
    for clip, spectrogram in enumerate(spectrograms):
        rows = slice(2 + 130 * clip, 130 + 130 * clip)
        assert (picture[rows, left : left + WIDTH] == pixels(spectrogram_colours(spectrogram))).all()
        assert picture[rows, :left].min() < 64, "there is ink beside it"
    assert picture[262, [left, left + 383]].tolist() == [[166, 27, 41], [247, 247, 247]]
