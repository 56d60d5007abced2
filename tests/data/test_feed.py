"""What a feed gives beside batches: previews and parts of validations, a second set to train on or to validate on."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tandem.data.feed import TrainingData, to_unit_range
from tests.data.conditions import write_tars
from tests.data.helpers import assert_same, ids, one_line
from tests.data.source_table import CONDITIONED, IMAGES, VIDEOS, N, in_folder, training
from tests.processes import Process, on_processes


def feed(process: Process | None = None, **flags: Any) -> TrainingData:
    """130 images, of which 26 are for validation: 4 steps of 6 and 7, where a batch has 8."""
    return IMAGES.feed(process, **{"image_folder": "demo:shapes:130", "crop": None, "crop_area": None, **flags})


def test_preview_without_validation_is_the_beginning_of_the_first_batch():
    def preview(process: Process) -> tuple[torch.Tensor, torch.Tensor]:
        opened = feed(process, valid_fraction=0)
        return opened.start(24)["images"], opened.preview(3)["images"]

    firsts, shown = zip(*on_processes(2, preview), strict=True)
    assert all(torch.equal(images, torch.cat(firsts)[:3]) for images in shown)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_of_which_a_part_is_read_are_counted_over_processes_and_said_when_they_have_doubled(
    num_workers, tmp_path
):
    for number in range(16):
        image = Image.new("RGB", (8, 8), (number, 0, 0))
        image.save(tmp_path / f"{number:02d}.tiff", save_all=True, append_images=[image] * (number % 4 > 0))

    def said(process: Process) -> list[str]:
        lines: list[str] = []
        flags = {"image_folder": str(tmp_path), "batch_size": 4, "valid_fraction": 0, "num_workers": num_workers}
        opened = feed(process, **flags)
        batches = itertools.chain([opened.start(0)], (opened.next() for _ in range(7)))
        for batch in batches:
            assert "partial" not in batch and not opened.bad_samples.count
            opened.report_bad_samples(lines.append)
        return lines

    of_rank = on_processes(2, said)
    assert of_rank[0] == of_rank[1] and 1 <= len(of_rank[0]) <= 4  # in two epochs
    pattern = r"read only in part so far: (\d+) images?, such as (.*)/\d\d\.tiff: it holds several pictures, .*"
    found = [re.fullmatch(pattern, line) for line in of_rank[0]]
    counts = [int(match[1]) for match in found if match]
    assert len(counts) == len(found) and counts[-1] <= 12
    assert all(later >= 2 * earlier for earlier, later in itertools.pairwise(counts))


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_validation_sees_the_same_few_samples_on_any_number_of_processes_and_the_whole_split_if_asked(world_size):
    def validated(process: Process) -> tuple[list[int], list[int], int]:
        opened = feed(process, valid_samples=10)
        opened.start(0)
        some = ids(opened.validation())
        everything = ids(opened.validation(whole=True))
        assert ids(opened.validation()) == some and opened.validation().n_samples == 10
        return some, everything, len(opened.preview(4)["ids"])

    some, everything, n_shown = zip(*on_processes(world_size, validated), strict=True)
    valid = list(feed().valid_set)
    assert sorted(itertools.chain(*some)) == sorted(valid[:10])
    assert sorted(itertools.chain(*everything)) == sorted(valid) and set(n_shown) == {4}


@pytest.mark.parametrize(
    ("said", "every", "seen"), [(None, 10, 8), (None, 20, 16), (None, 1000, 26), (None, 0, 26), (3, 20, 8), (0, 20, 26)]
)
def test_a_validation_sees_a_tenth_of_what_is_trained_on_before_it_and_at_least_a_batch(said, every, seen):
    opened = feed(valid_samples=said, validate_every_n_steps=every)
    assert len(opened.valid_part) == seen
    assert (f"({seen} at each validation" in opened.summary()) is (seen < 26)


def test_a_preview_that_cannot_be_read_ends_all_processes(tmp_path):
    files = {"image_folder": folder(tmp_path / "set", IMAGES, N)}
    bad = IMAGES.feed(**files).valid_set[6]
    [path] = (tmp_path / "set").glob(f"{bad:03d}.*")
    path.write_bytes(b"no picture")

    def preview(process: Process, count: int = 8) -> int:
        opened = IMAGES.feed(process, **files, on_bad_sample="error", batch_size=4)
        opened.start(0)
        return len(opened.preview(count)["images"])

    assert all(path.name in str(error) for error in on_processes(2, preview, catches=ValueError))
    assert on_processes(2, lambda process: preview(process, 4)) == [4, 4], "a step before it"


def test_white_is_one():
    images = torch.tensor([[0, 51, 255]], dtype=torch.uint8)
    assert to_unit_range(images).tolist() == [[0.0, pytest.approx(0.2), 1.0]]
    assert to_unit_range(images).dtype == torch.float32


# A second set to train on: images between videos.

BESIDE = {"image_folder": "demo:shapes:12", "image_every": 3}


def test_every_nth_batch_is_of_images_with_epochs_and_ids_of_their_own():
    opened = VIDEOS.feed(**BESIDE)
    taken, plain = training(opened, 12), training(VIDEOS.feed(), 8)
    assert [batch["videos"].shape[2] for batch in taken] == [3, 3, 1] * 4
    images, videos = ids(taken[2::3]), ids(batch for place, batch in enumerate(taken) if place % 3 != 2)
    assert sorted(images[:12]) == [*range(N, N + 12)] == sorted(images[12:24])
    assert videos == ids(plain) and opened.samples_per_epoch == len(opened.train_set) * 3 // 2
    assert_same([taken[0]], plain[:1])
    for batch in taken[:3]:
        for clip, index in zip(batch["videos"], batch["ids"], strict=True):
            assert torch.equal(clip, opened.samples.load(index, 0, True)["videos"])


# A second folder to validate on.


def folder(path: Path, kind: Any, n: int) -> Path:
    return in_folder(path, {number: kind.record(number) for number in range(n)})


def test_images_between_videos_are_not_validated(tmp_path):
    opened = VIDEOS.feed(**BESIDE, valid_folder=folder(tmp_path / "valid", VIDEOS, 11))
    assert set(ids(training(opened, 12))) <= set(range(N + 12))
    assert set(ids(opened.validation())) == set(range(N + 12, N + 12 + 11))


def test_a_set_to_test_is_still_held_out_of_the_first_set_which_flags_of_shards_are_about(tmp_path):
    tars, valid = write_tars(tmp_path / "tars", "npy", shards=3, each=20), folder(tmp_path / "valid", CONDITIONED, 11)
    flags = {"image_folder": tars, "end_shard": 1, "valid_folder": valid, "test_fraction": 0.25}
    opened = CONDITIONED.feed(**flags)
    assert (len(opened.train_set), len(opened.valid_set), len(opened.test_set)) == (30, 11, 10)
    assert sorted([*opened.train_set, *opened.test_set]) == list(range(40))
    for path in valid.glob("*.npy"):
        np.save(path, np.ones(5, np.float32))
    assert f"{valid} have 5 numbers, those to train on 6" in one_line(CONDITIONED.feed, **flags)


def test_shards_in_order_need_shards_and_some_to_train_on(tmp_path):
    text = one_line(feed, shuffle="shards")
    assert "--shuffle shards" in text and "'demo:shapes:130'" in text and "--shuffle samples" in text
    tars = write_tars(tmp_path / "tars", "npy", shards=3, each=8)
    assert "--shuffle samples" in one_line(CONDITIONED.feed, image_folder=tars, shuffle="shards", valid_fraction=0.9)
