"""The feed of videos: alternation with images, short and damaged videos, for any number of processes and workers."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

import train_tokenizer
from data import open_images, open_videos, video_feed
from tests.data.helpers import assert_same, joined, one_line
from tests.data.videos.files import write_video
from tests.processes import Process, on_processes
from training.flags.parser import ArgumentParser
from training.flags.shared import add_run_arguments, add_video_arguments

N, N_VALID, N_IMAGES, EVERY, BATCH = 40, 8, 12, 3, 8


def arguments(**changed: Any) -> argparse.Namespace:
    parser = ArgumentParser("test", "", is_root=lambda: True)
    add_video_arguments(parser, image_size=16, image_size_help="")
    add_run_arguments(parser, output_dir="runs", batch_size=BATCH, num_workers=0, valid_fraction=0.2)
    args = parser.parse([])
    settings = {
        "video_folder": f"demo:moving:{N}", "num_frames": 3, "random_flip": True,
        "image_folder": f"demo:shapes:{N_IMAGES}", "image_every": EVERY,
    }  # fmt: skip
    for name, value in {**settings, **changed}.items():
        setattr(args, name, value)
    return args


def batches(n: int, world_size: int = 1, start: int = 0, **changed: Any) -> list[dict]:
    """The first n batches from sample `start`, those of all processes put together."""

    def take(process: Process) -> list[dict]:
        feed = video_feed(arguments(**changed), process)
        first = feed.start(start)
        return [{**batch, "bad": []} for batch in (first, *(feed.next() for _ in range(n - 1)))]

    return [joined(parts) for parts in zip(*on_processes(world_size, take), strict=True)]


@pytest.mark.parametrize("world_size, workers", [(1, 0), (2, 0), (4, 0), (1, 2)])
def test_every_nth_update_is_of_images_whatever_the_processes_workers_and_the_start(world_size, workers):
    expected = batches(8)
    assert [batch["videos"].shape[2] for batch in expected] == [3, 3, 1, 3, 3, 1, 3, 3]
    assert_same(expected, batches(8, world_size, num_workers=workers))
    assert_same(expected[5:], batches(3, world_size, start=5 * BATCH, num_workers=workers))
    assert_same(expected[2:4], batches(2, world_size, start=2 * BATCH, num_workers=workers))


def test_images_and_videos_go_through_their_own_epochs_and_ids_tell_them_apart():
    taken = batches(12)
    images = [index for batch in taken[2::3] for index in batch["ids"]]
    videos = [index for i, batch in enumerate(taken) if i % 3 != 2 for index in batch["ids"]]
    assert all(N <= index < N + N_IMAGES for index in images) and all(index < N for index in videos)
    assert sorted(images[:N_IMAGES]) == [*range(N, N + N_IMAGES)] == sorted(images[N_IMAGES : 2 * N_IMAGES])
    n_train = N - N_VALID
    assert sorted(videos[:n_train]) == sorted(videos[n_train : 2 * n_train]) and len({*videos}) == n_train
    assert_same([taken[0]], batches(1, image_folder=None))
    plain = batches(8, image_folder=None)
    assert [index for batch in plain for index in batch["ids"]] == videos


def test_batches_hold_the_clips_and_images_of_their_ids():
    args = arguments()
    moving = open_videos(args.video_folder, image_size=16, num_frames=3, flip=True)
    images = open_images(args.image_folder, image_size=16, flip=True)
    for number, batch in enumerate(batches(3)):
        for clip, index in zip(batch["videos"], batch["ids"], strict=True):
            sample = images.load(index - N, 0, True)[:, None] if number == 2 else moving.load(index, 0, True)
            assert torch.equal(clip, sample)


def test_short_videos_are_left_out_silently_and_damaged_ones_counted(tmp_path):
    for i in range(24):
        write_video(tmp_path / f"{i:02d}.mp4", 2 if i % 3 == 0 else 4)
    (tmp_path / "05.mp4").write_text("no video")
    files = {"video_folder": str(tmp_path), "image_folder": None, "valid_fraction": 0.0, "short_clips": "skip"}
    feed, said = video_feed(arguments(**files), Process()), []
    taken = [feed.start(0), *(feed.next() for _ in range(2))]
    feed.report_bad_samples(said.append)
    assert all(index % 3 and index != 5 for batch in taken for index in batch["ids"])
    assert len(said) == 1 and "05.mp4" in said[0] and "FFmpeg cannot read it" in said[0] and "the next clip" in said[0]
    (tmp_path / "05.mp4").unlink()
    strict = video_feed(arguments(**files, on_bad_sample="error"), Process())
    assert len(strict.start(0)["ids"]) == BATCH, "leaving out is no error"


def test_a_folder_whose_videos_are_all_too_short_says_so(tmp_path):
    for i in range(8):
        write_video(tmp_path / f"{i}.mkv", 1)
    files = {"video_folder": str(tmp_path), "image_folder": None, "valid_fraction": 0.0, "short_clips": "skip"}
    feed = video_feed(arguments(**files), Process())
    text = one_line(feed.start, 0)
    assert "none of 8 clips could be read" in text and "it has 1 frame for a clip of 3" in text


def test_flags_have_their_public_names():
    parser = train_tokenizer.build_parser()
    args = parser.parse_args(["--dataset_folder", "a", "--short_clips", "HOLD", "--fps", "7.5"])
    assert (args.video_folder, args.short_clips, args.fps, args.frame_stride) == ("a", "hold", 7.5, 1)
