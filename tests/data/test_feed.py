"""The feed of images: how many a preview holds and which, for any number of processes, which all have to see the same
images."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from data import image_feed, open_images, open_sounds, open_videos, to_unit_range, video_feed
from data.images.captioned import open_captioned
from data.images.conditioned import open_conditioned
from tests.data.helpers import write_tar
from tests.data.videos.test_feed import arguments as video_arguments
from tests.processes import Process, on_processes


def arguments(**changed: Any) -> argparse.Namespace:
    """130 images, of which 26 are for validation: 4 steps of 6 and 7, where a batch has 8."""
    settings: dict[str, Any] = {
        "image_folder": "demo:shapes:130", "image_size": 16, "random_flip": False, "seed": 0, "valid_fraction": 0.2,
        "batch_size": 8, "num_workers": 0, "on_bad_sample": "replace", "valid_samples": 0, "crop": "center",
        "crop_area": None, "valid_folder": None, "split_seed": None,
    }  # fmt: skip
    return argparse.Namespace(**{**settings, **changed})


def previews(world_size: int, count: int, start: int = 0, **changed: Any) -> list[Tensor | ValueError]:
    def preview(process: Process) -> Tensor:
        feed = image_feed(arguments(**changed), process)
        feed.start(start)
        shown = feed.preview(count)
        assert shown["positions"] == list(range(len(shown["images"]))), "lists come from all processes as tensors do"
        return to_unit_range(shown["images"])

    return on_processes(world_size, preview, catches=ValueError)


def split_of(args: argparse.Namespace) -> list[int]:
    """Indices of the validation split, in its order."""
    return list(image_feed(args, Process()).valid_set)


def loaded(args: argparse.Namespace, indices: Iterable[int]) -> Tensor:
    samples = open_images(args.image_folder, image_size=args.image_size, channels=3, seed=args.seed)
    return torch.stack([to_unit_range(samples.load(index)) for index in indices])


@pytest.fixture
def damaged(tmp_path) -> tuple[argparse.Namespace, list[int], str]:
    """130 images of which one in the second step of validation cannot be read: flags, order of validation, its name."""
    for index in range(130):
        Image.new("RGB", (16, 16), (index, 2 * index, 255 - index)).save(tmp_path / f"{index:03d}.png")
    args = arguments(image_folder=str(tmp_path))
    order = split_of(args)
    Path(tmp_path, f"{order[9]:03d}.png").write_bytes(b"no picture")
    return args, order, f"{order[9]:03d}.png"


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 4, 6, 7, 8, 19, 20, 26, 100])
def test_preview_is_the_beginning_of_the_validation_split_on_every_process_and_at_every_start(world_size, count):
    expected = loaded(arguments(), split_of(arguments())[:count])
    assert len(expected) == min(count, 26)
    shown = [*previews(world_size, count), *previews(world_size, count, start=5 * 8)]
    assert len(shown) == 2 * world_size
    assert all(torch.equal(of_process, expected) for of_process in shown)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("count", [3, 8, 20])
def test_preview_without_validation_is_the_beginning_of_the_first_batch(world_size, count):
    first = image_feed(arguments(valid_fraction=0), Process()).start(24)["images"]
    for shown in previews(world_size, count, start=24, valid_fraction=0):
        assert torch.equal(shown, to_unit_range(first)[:count])


@pytest.mark.parametrize(("count", "n_read"), [(1, 6), (6, 6), (7, 13), (8, 13), (13, 13), (14, 19), (100, 26)])
def test_preview_reads_no_step_and_sends_no_image_more_than_needed(count, n_read, monkeypatch):
    read, sent, process = [], [], Process()
    process.gather = lambda tensor: (sent.append(len(tensor)), tensor)[1]
    feed = image_feed(arguments(), process)
    load, valid = feed.samples.load, set(feed.valid_set)
    monkeypatch.setattr(feed.samples, "load", lambda index, *rest: (read.append(index), load(index, *rest))[1])
    feed.start(0)
    feed.preview(count)
    assert sum(index in valid for index in read) == n_read
    assert sum(sent) == min(count, 26)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_validation_after_a_preview_is_the_whole_split(num_workers):
    feed = image_feed(arguments(num_workers=num_workers), Process())
    feed.start(0)
    expected = loaded(arguments(), split_of(arguments()))
    assert torch.equal(to_unit_range(feed.preview(8)["images"]), expected[:8])
    for _ in range(2):
        assert torch.equal(to_unit_range(torch.cat([batch["images"] for batch in feed.validation()])), expected)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_validation_sees_the_same_few_samples_on_any_number_of_processes_and_the_whole_split_if_asked(
    world_size: int,
) -> None:
    def validated(process: Process) -> tuple[list[int], list[int], int]:
        feed = image_feed(arguments(valid_samples=10), process)
        feed.start(0)
        some = [index for batch in feed.validation() for index in batch["ids"]]
        with feed.whole_validation():
            everything = [index for batch in feed.validation() for index in batch["ids"]]
        again = [index for batch in feed.validation() for index in batch["ids"]]
        assert again == some and len(feed.validated) == 10
        return some, everything, len(feed.preview(4)["ids"])

    some, everything, n_shown = zip(*on_processes(world_size, validated), strict=True)
    assert sorted(itertools.chain(*some)) == sorted(split_of(arguments())[:10])
    assert sorted(itertools.chain(*everything)) == sorted(split_of(arguments())) and set(n_shown) == {4}


@pytest.mark.parametrize(
    ("said", "every", "seen"), [(None, 10, 8), (None, 20, 16), (None, 1000, 26), (None, 0, 26), (3, 20, 8), (0, 20, 26)]
)
def test_a_validation_sees_a_tenth_of_what_is_trained_on_before_it_and_at_least_a_batch(said, every, seen):
    feed = image_feed(arguments(valid_samples=said, validate_every_n_steps=every), Process())
    assert len(feed.validated) == seen
    assert (f"26 images to validate ({seen} at each validation, all at the end)" in feed.summary()) is (seen < 26)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_bad_image_in_a_preview_is_replaced_as_in_validation_and_told(world_size, damaged):
    args, order, bad = damaged

    def preview(process: Process) -> tuple[Tensor, list[str], int]:
        feed, said = image_feed(args, process), []
        feed.start(0)
        shown = to_unit_range(feed.preview(12)["images"])
        feed.report_bad_samples(said.append)
        return shown, said, feed.bad_samples.count

    for shown, said, count in on_processes(world_size, preview):
        assert torch.equal(shown, loaded(args, [*order[:9], order[10], *order[10:12]]))
        assert len(said) == count == 1 and bad in said[0]


def test_a_preview_that_cannot_be_read_ends_all_processes(damaged):
    args, _, bad = damaged
    args.on_bad_sample = "error"
    shown = previews(2, 12, **vars(args))
    assert all(isinstance(error, ValueError) and bad in str(error) for error in shown)
    assert all(isinstance(images, Tensor) for images in previews(2, 6, **vars(args)))  # a step before it


def folder_of(path: Path, names: Iterable[str]) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"a set is opened without its files")
    return path


def picture_in_a_tar(path: Path, name: str, text: bool = False) -> None:
    write_tar(path, {name: {"png": b"", **({"txt": b""} if text else {})}, "other": {"png": b""}})


def opened_videos(path: Path) -> Any:
    return open_videos(str(path), image_size=8, num_frames=1)


def opened_sounds(path: Path) -> Any:
    return open_sounds(str(path), sample_rate=8000, clip_seconds=1)


def opened_conditioned(path: Path) -> Any:
    return open_conditioned(str(path), image_size=8, takes_image=True, takes_text=False)


def beside(path: Path, key: str = "b", width: int = 3) -> None:
    folder_of(path, ["a.png", f"{key}.png"])
    for name in ("a", key):
        np.save(path / f"{name}.img_emb.npy", np.ones(width, np.float32))


# What opens a set; what writes it; what writes one with another order, other names, or other things beside a sample.
SETS: dict[str, tuple[Any, Any, list[Any]]] = {
    "folder": (lambda path: open_images(str(path), image_size=8), lambda path: folder_of(path, ["a.png", "b/c.png"]),
               [lambda path: folder_of(path, ["a.png", "c/b.png"]), lambda path: folder_of(path, ["a", "b/c.png"])]),
    "tars": (lambda path: open_images(str(path), image_size=8), lambda path: picture_in_a_tar(path / "0.tar", "a"),
             [lambda path: picture_in_a_tar(path / "0.tar", "b")]),
    "captioned tars": (lambda path: open_captioned(str(path), image_size=8),
                       lambda path: picture_in_a_tar(path / "0.tar", "a", text=True),
                       [lambda path: picture_in_a_tar(path / "0.tar", "a")]),
    "embeddings": (opened_conditioned, beside, [lambda path: beside(path, "c"), lambda path: beside(path, width=2)]),
    "videos": (opened_videos, lambda path: folder_of(path, ["a.mp4"]), [lambda path: folder_of(path, ["b.mp4"])]),
    "manifest of videos": (lambda path: opened_videos(path / "m.csv"),
                           lambda path: (path / "m.csv").write_text("path,end_seconds\na.mp4,1\nb.mp4,1\n"),
                           [lambda path: (path / "m.csv").write_text("path,end_seconds\nb.mp4,1\na.mp4,1\n"),
                            lambda path: (path / "m.csv").write_text("path,end_seconds\na.mp4,1\nb.mp4,2\n")]),
    "sounds": (opened_sounds, lambda path: folder_of(path, ["a.wav", "a.txt", "b.wav", "b.json"]),
               [lambda path: folder_of(path, ["a.wav", "a.txt", "b.wav", "b.txt"])]),
    "manifest of sounds": (lambda path: opened_sounds(path / "m.csv"),
                           lambda path: (path / "m.csv").write_text("path,caption\na.wav,one\n"),
                           [lambda path: (path / "m.csv").write_text("path,caption\na.wav,two\n")]),
}  # fmt: skip


@pytest.mark.parametrize("kind", SETS)
def test_the_fingerprint_of_a_set_is_that_of_a_copy_and_of_no_other_set(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    opened, write, others = SETS[kind]
    found = []
    for number, written in enumerate((write, write, *others)):
        (tmp_path / str(number)).mkdir()
        written(tmp_path / str(number))
        found.append(opened(tmp_path / str(number)).fingerprint)
    assert found[0] == found[1] and len({*found}) == 1 + len(others)


def test_the_second_set_is_compared_too(tmp_path):
    folders = folder_of(tmp_path / "one", ["1.png"]), folder_of(tmp_path / "two", ["2.png"])

    def look(process: Process) -> Any:
        return video_feed(video_arguments(image_folder=str(folders[process.rank])), process)

    errors = on_processes(2, look, catches=ValueError)
    assert all("rank 1 (on " in str(error) and "sees 41 clips in demo:moving:40 and " in str(error) for error in errors)
