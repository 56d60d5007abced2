"""Long sounds are heard by clips that are spread over them."""

import numpy as np
import pytest
import soundfile

from data.decoding.sounds import ClipDecoder
from data.long_sounds import clip_starts, read_clips
from data.records.record import Entry


@pytest.mark.parametrize(
    ("frames", "max_clips", "starts"),
    [
        (50, 6, [0]), (100, 6, [0]), (101, 6, [0, 1]), (200, 6, [0, 100]), (250, 6, [0, 75, 150]), (101, 1, [0]),
        (301, 1, [100]), (10_100, 6, [0, 2000, 4000, 6000, 8000, 10_000]), (1_000, 3, [0, 450, 900]),
    ],
)  # fmt: skip
def test_clips_hear_all_of_a_sound_or_are_spread_evenly(frames, max_clips, starts):
    assert clip_starts(frames, 100, max_clips) == starts


def test_clips_of_another_sample_rate_are_whole_and_stand_where_they_should(tmp_path):
    times = np.arange(44100 * 3) / 44100
    soundfile.write(tmp_path / "x.wav", np.sin(2 * np.pi * 440 * times) * times / 3, 44100)
    clips = read_clips(Entry(str(tmp_path / "x.wav")), ClipDecoder(16000, 16000), 6)
    assert clips.shape == (3, 16000)
    expected = np.sin(2 * np.pi * 440 * np.arange(48000) / 16000) * np.arange(48000) / 48000
    for clip, start in zip(clips, (0, 16000, 32000), strict=True):
        inner = slice(100, -100)
        np.testing.assert_allclose(clip[inner], expected[start:][:16000][inner], atol=2e-3)
