"""The feed of videos where some are too short for a clip."""

from __future__ import annotations

from tests.data.decoding.films import write_video
from tests.data.helpers import ids, one_line
from tests.data.sources import BATCH, VIDEOS, training

SKIPPED = {"valid_fraction": 0, "short_clips": "skip"}


def test_short_videos_are_left_out_silently_and_damaged_ones_counted(tmp_path):
    for i in range(24):
        write_video(tmp_path / f"{i:02d}.mp4", 2 if i % 3 == 0 else 4)
    (tmp_path / "05.mp4").write_text("no video")
    feed, said = VIDEOS.feed(**SKIPPED, video_folder=tmp_path), []
    assert all(index % 3 and index != 5 for index in ids(training(feed, 3)))
    feed.report_bad_samples(said.append)
    assert len(said) == 1 and "05.mp4" in said[0]
    (tmp_path / "05.mp4").unlink()
    strict = VIDEOS.feed(**SKIPPED, video_folder=tmp_path, on_bad_sample="error")
    assert len(strict.start(0)["ids"]) == BATCH, "leaving out is no error"


def test_a_folder_whose_videos_are_all_too_short_says_so(tmp_path):
    for i in range(8):
        write_video(tmp_path / f"{i}.mkv", 1)
    assert "it has 1 frame for a clip of 3" in one_line(VIDEOS.feed(**SKIPPED, video_folder=tmp_path).start, 0)
