"""--valid_folder and --split_seed: what is trained on, and what is the validation split, for each kind of samples."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import decoder_feed, image_feed, video_feed
from data.feed import Feed
from tests.data.helpers import one_line
from tests.data.images.conditions import arguments as conditioned_arguments
from tests.data.images.conditions import write_tars
from tests.data.test_feed import arguments as image_arguments
from tests.data.videos.test_feed import arguments as video_arguments
from tests.processes import Process
from tests.scripts import write_captioned, write_images, write_videos
from training.flags.parser import ArgumentParser
from training.flags.shared import add_run_arguments

N, N_VALID, BATCH = 16, 11, 4


def images(folder: Path, process: Process, **flags: Any) -> Feed:
    return image_feed(image_arguments(image_folder=str(folder), batch_size=BATCH, **flags), process)


def conditioned(folder: Path, process: Process, **flags: Any) -> Feed:
    flags = {"test_fraction": 0.0, **flags}
    return decoder_feed(conditioned_arguments(image_folder=str(folder), **flags), process, image_size=16)


def videos(folder: Path, process: Process, **flags: Any) -> Feed:
    flags = {"image_folder": None, **flags}
    return video_feed(video_arguments(video_folder=str(folder), batch_size=BATCH, **flags), process)


def test_images_between_videos_are_not_validated(tmp_path):
    train, valid = write_videos(tmp_path / "train", N), write_videos(tmp_path / "valid", N_VALID)
    beside = write_images(tmp_path / "images", 9)
    feed = videos(
        train, Process(), image_folder=str(beside), image_every=3, valid_folder=str(valid), valid_fraction=0.0,
        valid_samples=0,
    )  # fmt: skip
    batches = [feed.start(0), *(feed.next() for _ in range(11))]
    ids = {index for batch in batches for index in batch["ids"]}
    assert ids == set(range(N + 9)) and feed.samples_per_epoch == N * 3 // 2
    assert {i for batch in feed.validation() for i in batch["ids"]} == set(range(N + 9, N + 9 + N_VALID))
    assert "and 9 of the second set to train on" in feed.summary()


def test_a_set_to_test_is_still_held_out_of_the_first_set(tmp_path):
    train, valid = write_captioned(tmp_path / "train", N), write_captioned(tmp_path / "valid", N_VALID)
    feed = conditioned(train, Process(), valid_folder=str(valid), valid_fraction=0.0, test_fraction=0.25)
    assert (len(feed.train_set), len(feed.valid_set), len(feed.test_set)) == (12, N_VALID, 4)
    assert sorted([*feed.train_set, *feed.test_set]) == list(range(N))


def test_embeddings_to_validate_have_the_width_of_those_to_train_on(tmp_path):
    train, valid = write_captioned(tmp_path / "train", N), write_captioned(tmp_path / "valid", N_VALID)
    for path in valid.glob("*.npy"):
        np.save(path, np.ones(5, np.float32))
    text = one_line(conditioned, train, Process(), valid_folder=str(valid), valid_fraction=0.0)
    assert f"image embeddings of --valid_folder {valid} have 5 numbers, those to train on 6" in text


def parsed(*words: str) -> argparse.Namespace:
    parser = ArgumentParser("test.py", "", is_root=lambda: True)
    add_run_arguments(parser, output_dir="runs")
    return parser.parse(list(words))


def test_a_set_to_validate_takes_the_place_of_the_fraction(tmp_path, capsys):
    assert (parsed().valid_fraction, parsed().valid_folder) == (0.05, None)
    assert parsed("--valid_folder", "v").valid_fraction == 0.0
    assert parsed("--valid_folder", "v", "--valid_fraction", "0").valid_folder == "v"
    (tmp_path / "c.yaml").write_text("valid_fraction: 0.2\n")
    assert parsed("--config", str(tmp_path / "c.yaml"), "--valid_folder", "v").valid_fraction == 0.0
    with pytest.raises(SystemExit):
        parsed("--valid_folder", "v", "--valid_fraction", "0.1")
    assert "--valid_folder and --valid_fraction exclude one another" in capsys.readouterr().err


def test_flags_of_shards_are_about_those_to_train_on(tmp_path):
    tars, valid = write_tars(tmp_path / "tars", "npy", shards=3, each=8), write_captioned(tmp_path / "valid", N_VALID)
    feed = conditioned(tars, Process(), end_shard=1, valid_folder=str(valid), valid_fraction=0.0)
    assert (len(feed.train_set), len(feed.valid_set)) == (16, N_VALID)
