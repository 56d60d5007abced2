"""--valid_folder and --split_seed: what is trained on, and what is the validation split, for each kind of samples."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from data import decoder_feed, image_feed, open_tokenizer, sound_feed, video_feed
from data.feed import Feed
from tests.data.helpers import one_line
from tests.data.images.conditions import arguments as conditioned_arguments
from tests.data.images.conditions import write_tars
from tests.data.test_feed import arguments as image_arguments
from tests.data.videos.test_feed import arguments as video_arguments
from tests.processes import Process, on_processes
from tests.scripts import TOKENIZER, write_captioned, write_images, write_sounds, write_videos
from training.flags.parser import ArgumentParser
from training.flags.shared import add_run_arguments

N, N_VALID, BATCH = 16, 11, 4


class Kind(NamedTuple):
    """write: makes a folder of n samples; open: the feed of a folder with flags."""

    write: Callable[[Path, int], Path]
    open: Callable[..., Feed]


def images(folder: Path, process: Process, **flags: Any) -> Feed:
    return image_feed(image_arguments(image_folder=str(folder), batch_size=BATCH, **flags), process)


def conditioned(folder: Path, process: Process, **flags: Any) -> Feed:
    flags = {"test_fraction": 0.0, **flags}
    return decoder_feed(conditioned_arguments(image_folder=str(folder), **flags), process, image_size=16)


def videos(folder: Path, process: Process, **flags: Any) -> Feed:
    flags = {"image_folder": None, **flags}
    return video_feed(video_arguments(video_folder=str(folder), batch_size=BATCH, **flags), process)


def sounds(folder: Path, process: Process, **flags: Any) -> Feed:
    args = parsed("--batch_size", str(BATCH), "--num_workers", "0")
    for name, value in {"audio_data": str(folder), "sample_rate": 8000, "clip_seconds": 0.25, **flags}.items():
        setattr(args, name, value)
    return sound_feed(args, process, open_tokenizer(str(TOKENIZER), 8))


def write_some_sounds(folder: Path, n: int) -> Path:
    return write_sounds(folder, ["a bell"] * n)


KINDS = {
    "images": Kind(write_images, images), "conditioned images": Kind(write_captioned, conditioned),
    "videos": Kind(write_videos, videos), "sounds": Kind(write_some_sounds, sounds),
}  # fmt: skip


@pytest.fixture(params=KINDS, scope="module")
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def folders(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("sets")
    return kind.write(root / "train", N), kind.write(root / "valid", N_VALID)


def passes(feed: Feed) -> tuple[list[int], list[int], list[int]]:
    """Indices of two epochs of training, of a validation, and of the preview."""
    batches = [feed.start(0), *(feed.next() for _ in range(2 * N // BATCH - 1))]
    shown = feed.preview(3)["ids"]
    validated = [index for batch in feed.validation() for index in batch["ids"]]
    return [index for batch in batches for index in batch["ids"]], validated, shown


@pytest.mark.parametrize("world_size", [1, 2])
def test_all_of_the_first_set_is_trained_on_and_all_of_the_second_is_validated(kind, folders, world_size):
    train, valid = folders
    flags = {"valid_folder": str(valid), "valid_fraction": 0.0, "valid_samples": 0}
    found = on_processes(world_size, lambda process: passes(kind.open(train, process, **flags)))
    trained, validated, _ = ([index for ids in part for index in ids] for part in zip(*found, strict=True))
    assert sorted(trained) == sorted([*range(N), *range(N)])
    assert sorted(validated) == list(range(N, N + N_VALID)), "their indices follow those to train on"
    feed = kind.open(train, Process(), **flags)
    assert feed.samples_per_epoch == N and len(feed.test_set) == 0
    assert all(shown == list(feed.valid_set)[:3] for *_, shown in found)
    assert list(feed.valid_set) != sorted(feed.valid_set), "the pictures are not the first ones of a folder"
    assert feed.samples.describe(N).startswith(str(valid)) and feed.samples.describe(N - 1).startswith(str(train))
    said = feed.summary()
    assert f"{train}: {N} {feed.noun}s to train on, {N_VALID} {feed.noun}s to validate in {valid}" in said
    assert "a batch is the least" not in said


def test_a_sample_to_validate_that_cannot_be_read_is_named_and_counted(kind, tmp_path):
    train, valid = kind.write(tmp_path / "train", N), kind.write(tmp_path / "valid", N_VALID)
    (broken,) = (path for path in valid.glob("03.*") if path.suffix not in (".txt", ".npy"))
    broken.write_bytes(b"nothing")
    feed, said = kind.open(train, Process(), valid_folder=str(valid), valid_fraction=0.0, valid_samples=0), []
    passes(feed)
    feed.report_bad_samples(said.append)
    assert feed.bad_samples.counts == {"bad_samples": 1} and len(said) == 1 and str(broken) in said[0]


def test_files_that_are_skipped_are_said_of_both_sets(kind, tmp_path):
    train, valid = kind.write(tmp_path / "train", N), kind.write(tmp_path / "valid", N_VALID)
    (valid / "notes.pdf").write_bytes(b"")
    skipped = kind.open(train, Process(), valid_folder=str(valid), valid_fraction=0.0).skipped()
    assert "pdf" in skipped and str(valid) in skipped


def test_every_process_has_to_see_the_same_set_to_validate(kind, folders, tmp_path):
    train, valid = folders
    other = kind.write(tmp_path / "other", N_VALID)
    for path in other.glob("00.*"):
        path.rename(path.with_name(path.name.replace("00", "99")))
    errors = on_processes(
        2,
        lambda p: kind.open(train, p, valid_folder=str((valid, other)[p.rank]), valid_fraction=0.0),
        catches=ValueError,
    )
    assert all("rank 1 (on " in str(error) and "of other names" in str(error) for error in errors), errors


def test_fewer_samples_than_a_batch_are_refused_on_any_number_of_processes(kind, folders, tmp_path):
    few = kind.write(tmp_path / "few", BATCH - 1)
    for world_size in (1, 2):
        errors = on_processes(
            world_size,
            lambda process: kind.open(folders[0], process, valid_folder=str(few), valid_fraction=0.0),
            catches=ValueError,
        )
        assert all("--valid_folder holds 3 samples" in str(e) and "one batch of 4" in str(e) for e in errors), errors


def test_the_split_depends_on_the_split_seed_and_without_it_on_the_seed(kind, folders):
    def split(**flags: Any) -> list[int]:
        return list(kind.open(folders[0], Process(), **{"valid_fraction": 0.3, "split_seed": None, **flags}).valid_set)

    assert split(seed=5) == split(split_seed=5, seed=1) == split(split_seed=5, seed=2) != split(seed=1)


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


def test_a_set_of_just_a_batch_is_not_called_the_least_of_a_fraction(tmp_path):
    train, valid = write_images(tmp_path / "train", N), write_images(tmp_path / "valid", BATCH)
    said = images(train, Process(), valid_folder=str(valid), valid_fraction=0.0).summary()
    assert f"{BATCH} images to validate in {valid}" in said and "least" not in said


def test_flags_of_shards_are_about_those_to_train_on(tmp_path):
    tars, valid = write_tars(tmp_path / "tars", "npy", shards=3, each=8), write_captioned(tmp_path / "valid", N_VALID)
    feed = conditioned(tars, Process(), end_shard=1, valid_folder=str(valid), valid_fraction=0.0)
    assert (len(feed.train_set), len(feed.valid_set)) == (16, N_VALID)
