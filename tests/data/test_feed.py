"""The feed of images: how many a preview holds and which, for any number of processes. Processes are threads here."""

from __future__ import annotations

import argparse
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from PIL import Image
from torch import Tensor

from data import image_feed, open_images, to_unit_range

T = TypeVar("T")
PATIENCE_SECONDS = 30  # for a process that does not enter what the others do


class Meeting:
    """Where the threads exchange values."""

    def __init__(self, world_size: int) -> None:
        self.barrier, self.values = threading.Barrier(world_size), [None] * world_size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait(PATIENCE_SECONDS)
        values = list(self.values)
        self.barrier.wait(PATIENCE_SECONDS)
        return values


class Process:
    """One of several processes, as the scripts' backends present it."""

    device = torch.device("cpu")

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.world_size, self._meeting = rank, meeting.barrier.parties, meeting
        self.rows_sent = 0

    @contextlib.contextmanager
    def agreement(self) -> Iterator[None]:
        failure = None
        try:
            yield
        except ValueError as error:
            failure = error
        failures = [error for error in self._meeting.exchange(self.rank, failure) if error]
        if failures:
            raise failures[0]

    def each(self, what: str, items: Iterable[Any]) -> Iterator[Any]:
        return iter(items)

    def gather(self, tensor: Tensor) -> Tensor:
        self.rows_sent += len(tensor)
        return torch.cat(self._meeting.exchange(self.rank, tensor))

    def gather_objects(self, value: Any) -> list[Any]:
        return self._meeting.exchange(self.rank, value)

    def waiting_for(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def on_all(world_size: int, work: Callable[[Process], T]) -> list[T | ValueError]:
    """What each process comes to, or its ValueError."""
    meeting = Meeting(world_size)

    def caught(rank: int) -> T | ValueError:
        try:
            return work(Process(rank, meeting))
        except ValueError as error:
            return error

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(caught, range(world_size)))


def arguments(**changed: Any) -> argparse.Namespace:
    """130 images, of which 26 are for validation: 4 steps of 6 and 7, where a batch has 8."""
    settings: dict[str, Any] = {
        "image_folder": "demo:shapes:130", "image_size": 16, "random_flip": False, "seed": 0, "valid_fraction": 0.2,
        "batch_size": 8, "num_workers": 0, "on_bad_sample": "replace",
    }  # fmt: skip
    return argparse.Namespace(**{**settings, **changed})


def previews(world_size: int, count: int, start: int = 0, **changed: Any) -> list[Tensor | ValueError]:
    def preview(process: Process) -> Tensor:
        feed = image_feed(arguments(**changed), process)
        feed.start(start)
        shown = feed.preview(count)
        assert shown["positions"] == list(range(len(shown["images"]))), "lists come from all processes as tensors do"
        return to_unit_range(shown["images"])

    return on_all(world_size, preview)


def split_of(args: argparse.Namespace) -> list[int]:
    """Indices of the validation split, in its order."""
    (indices,) = on_all(1, lambda process: list(image_feed(args, process).valid_set))
    assert isinstance(indices, list)
    return indices


def loaded(args: argparse.Namespace, indices: Iterable[int]) -> Tensor:
    samples = open_images(args.image_folder, image_size=args.image_size, channels=3, seed=args.seed)
    return torch.stack([to_unit_range(samples.load(index)) for index in indices])


def photos(folder: Path, n: int) -> Path:
    folder.mkdir()
    for index in range(n):
        Image.new("RGB", (16, 16), (index, 2 * index, 255 - index)).save(folder / f"{index:03d}.png")
    return folder


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 4, 6, 7, 8, 19, 20, 26, 100])
def test_preview_is_the_beginning_of_the_validation_split_on_every_process(world_size, count):
    expected = loaded(arguments(), split_of(arguments())[:count])
    assert len(expected) == min(count, 26)
    shown = previews(world_size, count)
    assert len(shown) == world_size
    for of_process in shown:
        assert torch.equal(of_process, expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_preview_is_the_same_at_every_start(world_size):
    for later in previews(world_size, 15, start=5 * 8):
        assert torch.equal(later, previews(1, 15)[0])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("count", [3, 8, 20])
def test_preview_without_validation_is_the_beginning_of_the_first_batch(world_size, count):
    (first,) = on_all(1, lambda process: image_feed(arguments(valid_fraction=0), process).start(24)["images"])
    for shown in previews(world_size, count, start=24, valid_fraction=0):
        assert torch.equal(shown, to_unit_range(first)[:count])


@pytest.mark.parametrize(("count", "n_read"), [(1, 6), (6, 6), (7, 13), (8, 13), (13, 13), (14, 19), (100, 26)])
def test_preview_reads_no_step_and_sends_no_image_more_than_needed(count, n_read, monkeypatch):
    read = []

    def preview(process: Process) -> int:
        feed = image_feed(arguments(), process)
        load, valid = feed.samples.load, set(feed.valid_set)
        monkeypatch.setattr(feed.samples, "load", lambda index, *rest: (read.append(index), load(index, *rest))[1])
        feed.start(0)
        feed.preview(count)
        assert sum(index in valid for index in read) == n_read
        return process.rows_sent

    assert on_all(1, preview) == [min(count, 26)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_validation_after_a_preview_is_the_whole_split(num_workers):
    def everything(process: Process) -> tuple[Tensor, list[Tensor]]:
        feed = image_feed(arguments(num_workers=num_workers), process)
        feed.start(0)
        shown = feed.preview(8)["images"]
        passes = [torch.cat([batch["images"] for batch in feed.validation()]) for _ in range(2)]
        return to_unit_range(shown), [to_unit_range(images) for images in passes]

    ((shown, passes),) = on_all(1, everything)
    expected = loaded(arguments(), split_of(arguments()))
    assert torch.equal(shown, expected[:8])
    assert all(torch.equal(whole, expected) for whole in passes)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_bad_image_in_a_preview_is_replaced_as_in_validation_and_told(world_size, tmp_path):
    args = arguments(image_folder=str(photos(tmp_path / "photos", 130)))
    bad = split_of(args)[9]  # of the second step
    (tmp_path / "photos" / f"{bad:03d}.png").write_bytes(b"no picture")

    def preview(process: Process) -> tuple[Tensor, list[str], int]:
        feed, said = image_feed(args, process), []
        feed.start(0)
        shown = to_unit_range(feed.preview(12)["images"])
        feed.report_bad_samples(said.append)
        return shown, said, feed.bad_samples.count

    order = split_of(args)
    for shown, said, count in on_all(world_size, preview):
        assert torch.equal(shown, loaded(args, [*order[:9], order[10], *order[10:12]]))
        assert len(said) == count == 1 and f"{bad:03d}.png" in said[0]


def test_a_preview_that_cannot_be_read_ends_all_processes(tmp_path):
    args = arguments(image_folder=str(photos(tmp_path / "photos", 130)), on_bad_sample="error")
    bad = split_of(args)[9]
    (tmp_path / "photos" / f"{bad:03d}.png").write_bytes(b"no picture")
    shown = previews(2, 12, **vars(args))
    assert all(isinstance(error, ValueError) and f"{bad:03d}.png" in str(error) for error in shown)
    assert all(isinstance(images, Tensor) for images in previews(2, 6, **vars(args)))  # a step before it
