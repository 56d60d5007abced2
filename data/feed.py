"""The samples of a run, for one process: what it trains on, what it validates on, and what could not be read."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from .bad_samples import BadSample, BadSampleLog
from .images.sets import open_images
from .order import split
from .stream import Batch, Collate, Samples, TrainingStream, ValidationStream, collate_images


class Processes(Protocol):
    """What a feed asks of the processes that train together."""

    rank: int
    world_size: int
    device: torch.device

    def agreement(self) -> AbstractContextManager[None]: ...
    def each(self, what: str, items: Iterable[Any]) -> Iterator[Any]: ...
    def gather(self, tensor: Tensor) -> Tensor: ...
    def gather_objects(self, value: Any) -> list[Any]: ...
    def waiting_for(self, what: str) -> AbstractContextManager[None]: ...


class Feed:
    """What the feeds of all kinds of samples share: a set, split by seed, of which each process gets its part of every
    batch. Every process calls every method, in the same order.

    Args:
        open_samples: Opens the set; may raise ValueError on one process alone.
        args: batch_size, valid_fraction, seed (of the order), num_workers and on_bad_sample.
        processes: Who trains.
        split_seed: Of the split into training and validation.
        noun: What one sample is called: "image".
        collate: Makes a batch of samples.

    Raises:
        UserMistake: one line, where there are no such samples or too few.
    """

    def __init__(
        self,
        open_samples: Callable[[], Samples],
        args: argparse.Namespace,
        processes: Processes,
        *,
        split_seed: int,
        noun: str,
        collate: Collate,
    ) -> None:
        self._processes, self._seed, self._noun = processes, args.seed, noun
        with processes.agreement():
            self.samples = open_samples()
            n = len(self.samples)
            self.train_set, self.valid_set = split(n, args.valid_fraction, split_seed, at_least=args.batch_size)
        self._loading: dict[str, Any] = {
            "rank": processes.rank,
            "world_size": processes.world_size,
            "batch_size": args.batch_size,
            "num_workers": args.num_workers,
            "on_bad_sample": args.on_bad_sample,
            "pin_memory": processes.device.type == "cuda",
            "collate": collate,
            "noun": f"{noun}s",
        }
        self.bad_samples = BadSampleLog(n)
        self._unreported: list[BadSample] = []

    def start(self, start_samples: int) -> tuple[Any, Any]:
        """Begin at a position of the endless order of samples -> the first batch, and the first one of validation (the
        same once more where there is none). Ends here, on all processes, where nothing can be read."""
        self._validation = ValidationStream(self.samples, self.valid_set, **self._loading)
        stream = TrainingStream(
            self.samples, self.train_set, seed=self._seed, start_samples=start_samples, **self._loading
        )
        self._batches = iter(stream)
        with self._processes.agreement():
            batch = next(self._batches)
            self._beginning = iter(self._validation) if len(self.valid_set) else iter([batch])
            preview = next(self._beginning)
        self._unreported += batch["bad"] if preview is batch else batch["bad"] + preview["bad"]
        return batch, preview

    def further_previews(self, count: int) -> list[Any]:
        """Right after `start`, once: what follows its first batch of validation until `count` samples are there over
        all processes together; nothing where there is no validation. Ends here, on all processes, as `start` does."""
        n_steps = self._validation.steps_holding(count)
        with self._processes.agreement():
            previews = list(itertools.islice(self._beginning, max(n_steps - 1, 0)))
        self._unreported += [sample for preview in previews for sample in preview["bad"]]
        return previews

    def next(self) -> Any:
        """The next batch of the order."""
        with self._processes.waiting_for("data"):
            batch = next(self._batches)
        self._unreported += batch["bad"]
        return batch

    def validation(self) -> Iterator[Any]:
        """The validation split once, over all processes together."""
        for batch in self._processes.each("validation data", self._validation):
            self._unreported += batch["bad"]
            yield batch

    def report_bad_samples(self, say: Callable[[str], None]) -> None:
        """Say what any process could not read since the last call, each file once. Collective.

        Raises:
            UserMistake: there are too many to go on.
        """
        for sample in self.bad_samples.share(self._unreported, self._processes.gather_objects):
            say(f"cannot read {sample}; the next {self._noun} takes its place")
        self._unreported.clear()
        with self._processes.agreement():
            self.bad_samples.check()


class ImageFeed:
    """Opens an image set, splits it by seed, and gives each process its part of every batch. Every process calls
    every method, in the same order.

    Args:
        args: The shared arguments (`add_image_arguments` and `add_run_arguments`).
        processes: Who trains.
        channels: 3 (RGB) or 4 (RGBA).

    Raises:
        UserMistake: one line, where there are no such images or too few.
    """

    def __init__(self, args: argparse.Namespace, processes: Processes, channels: int = 3) -> None:
        def open_set() -> Samples:
            return open_images(
                args.image_folder, image_size=args.image_size, channels=channels, flip=args.random_flip, seed=args.seed
            )

        self._processes = processes
        self._feed = Feed(open_set, args, processes, split_seed=args.seed, noun="image", collate=collate_images)
        self.train_set, self.valid_set = self._feed.train_set, self._feed.valid_set
        self.bad_samples = self._feed.bad_samples  # a part of the checkpoint

    def start(self, start_samples: int) -> Batch:
        """Begin at a position of the endless order of samples; the first batch. Ends here, on all processes, where
        nothing can be read."""
        batch: Batch
        batch, self._preview = self._feed.start(start_samples)
        return batch

    def next(self) -> Batch:
        """The next batch of the order."""
        batch: Batch = self._feed.next()
        return batch

    def validation(self) -> Iterator[Tensor]:
        """Images (b, c, h, w) in [0, 1], on the device: the validation split once, over all processes together."""
        return (self._on_device(batch["images"]) for batch in self._feed.validation())

    def preview(self, count: int) -> Tensor:
        """Images (n, c, h, w) in [0, 1] on the device, n <= count, the same on every process: the first of the
        validation split, the same at every start, or of this start's first batch where there is none. Called right
        after `start`, once."""
        parts = []
        for batch in [self._preview, *self._feed.further_previews(count)]:
            # Those alone that are shown go around: of a large batch, the rest is many times as much.
            first = sum(position < count for position in batch["positions"])
            parts.append(self._processes.gather(self._on_device(batch["images"][:first])))
        return torch.cat(parts)

    def _on_device(self, images: Tensor) -> Tensor:
        return to_unit_range(images.to(self._processes.device, non_blocking=True))

    def report_bad_samples(self, say: Callable[[str], None]) -> None:
        """Say what any process could not read since the last call, each file once. Collective.

        Raises:
            UserMistake: there are too many to go on.
        """
        self._feed.report_bad_samples(say)


def to_unit_range(images: Tensor) -> Tensor:
    """uint8 in [0, 255] -> float32 in [0, 1], same shape and device."""
    return images.to(torch.float32).div_(255)
