"""Batches for one rank, loaded by worker processes; each sample depends only on its position in the order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from PIL import ImageFile
from torch import Tensor

from tandem.data.bad_samples import (
    BadDatasetItem,
    BadSample,
    SampleIncomplete,
    SampleSkipped,
    UserCodeError,
    collect_partial_reads,
)
from tandem.data.fields import SampleDataset
from tandem.io.reading import error_text

from .order import Indices, Order, ValidationOrder
from .workers import Loader

OnBadSample = Literal["replace", "accept", "error"]
_Request = tuple[int, range]  # position of a batch's first sample in the order; positions in the batch to load
_MAX_TRIES = 100  # samples in place of one that cannot be read


def collate_entries(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Samples with equal keys -> the entries of a batch: tensors are stacked, other values become lists."""
    columns = {key: [sample[key] for sample in samples] for key in samples[0]}
    return {key: torch.stack(column) if isinstance(column[0], Tensor) else column for key, column in columns.items()}


class _Stream(Loader):
    """The batches of the requests, in their order.

    A sample that cannot be read is replaced by the next readable one in the order ("replace"), or stops the run with
    `UserCodeError`, a ValueError ("error"). "accept" decodes truncated images as far as Pillow can, and replaces other
    bad samples. Raises `UserCodeError` if none of min(n, 100) successive samples can be read.

    Yields the entries of the samples (`collate_entries`); "positions", those of the samples in the global batch; "ids",
    the dataset indices of the loaded samples; "bad", the samples that could not be read; and "partial", if there are
    any, a mapping of the indices of partly read samples to path and reason. `first` is the position of the stream's
    first sample in the order; `noun` is the word for samples in messages; `loading`: see `Loader`.
    """

    def __init__(
        self,
        samples: SampleDataset,
        order: Order,
        requests: Iterable[_Request],
        *,
        augment: bool,
        first: int = 0,
        on_bad_sample: OnBadSample = "replace",
        noun: str = "images",
        **loading: Any,
    ) -> None:
        self._first, self._load = first, _BatchLoader(samples, order, augment, on_bad_sample, noun)
        super().__init__(self._load, requests, **loading)

    def load(self, positions: range) -> dict[str, Any]:
        """The batch of the samples at these positions from the first sample of the stream, loaded in this process."""
        return self._load((self._first, positions))


class TrainingStream(_Stream):
    """This rank's part of every global batch of an order, endlessly.

    batch_size (B) is global and a multiple of world_size (W); rank r holds positions r*B/W .. (r+1)*B/W-1. Begins at
    sample `start` of the endless order, in O(1). `options`: see `_Stream`.
    """

    def __init__(
        self, samples: SampleDataset, order: Order, *,
        batch_size: int, rank: int, world_size: int, start: int = 0, **options: Any,
    ) -> None:  # fmt: skip
        assert batch_size % world_size == 0, (batch_size, world_size)
        share = batch_size // world_size
        requests = _EndlessRequests(start, batch_size, range(rank * share, (rank + 1) * share))
        super().__init__(samples, order, requests, augment=True, first=start, **options)


class ValidationStream(_Stream):
    """This rank's part of the validation set, without augmentation; the parts of all ranks hold every sample once.

    batch_size is the global number of samples per step. Every rank makes the same number of steps, `len(stream)`, with
    at least one sample in each; the sizes of the steps may differ. "positions" are those in the whole set; substitutes
    behind its end are taken from its start. `options`: see `_Stream`; `keep_workers` is true by default.
    """

    def __init__(
        self, samples: SampleDataset, subset: Indices, *, batch_size: int, rank: int, world_size: int, **options: Any
    ) -> None:
        n = len(subset)
        assert n == 0 or n >= world_size, (n, world_size)
        self._n_steps = min(math.ceil(n / batch_size), n // world_size)
        n_parts = self._n_steps * world_size
        parts = [range(n * i // n_parts, n * (i + 1) // n_parts) for i in range(rank, n_parts, world_size)]
        requests = [(0, part) for part in parts]
        super().__init__(samples, ValidationOrder(subset), requests, augment=False, **{"keep_workers": True, **options})

    def __len__(self) -> int:
        return self._n_steps


@dataclass(frozen=True)
class _EndlessRequests:
    """A request for each global batch of an endless order, for this rank's positions in it."""

    start: int
    batch_size: int
    positions: range

    def __iter__(self) -> Iterator[_Request]:
        return ((first, self.positions) for first in itertools.count(self.start, self.batch_size))


@dataclass(frozen=True)
class _BatchLoader:
    """Loads the batch of a request."""

    samples: SampleDataset
    order: Order
    augment: bool
    on_bad_sample: OnBadSample
    noun: str

    def __call__(self, request: _Request) -> dict[str, Any]:
        first, positions = request
        ImageFile.LOAD_TRUNCATED_IMAGES = self.on_bad_sample == "accept"  # of this process, which may be a worker
        bad: dict[int, BadSample] = {}
        partial: dict[int, str] = {}
        samples = [self._load(first + position, bad, partial) for position in positions]
        return {
            **collate_entries([sample for sample, _ in samples]),
            "positions": list(positions),
            "ids": [index for _, index in samples],
            "bad": list(bad.values()),
            **({"partial": partial} if partial else {}),
        }

    def _load(self, position: int, bad: dict[int, BadSample], partial: dict[int, str]) -> tuple[Any, int]:
        """The sample at `position` of the order, or the next one that can be read, and its index."""
        n_tries = min(len(self.order), _MAX_TRIES)
        failures: list[BadSample] = []
        for skip in range(n_tries):
            epoch, index = self.order(position, skip)
            try:
                with collect_partial_reads() as reasons:
                    sample = self.samples.load(index, epoch, self.augment)
                if reasons:
                    partial[index] = f"{self.samples.describe(index)}: {reasons[0]}"
                return sample, index
            except BadDatasetItem:
                raise
            except (OSError, ValueError) as error:
                details = self.samples.describe(index), error_text(error), isinstance(error, SampleIncomplete)
                failure = BadSample(index, *details, traceback=getattr(error, "traceback", ""))
                is_bad = not isinstance(error, SampleSkipped)  # an incomplete one is reported, but stops no run
            if is_bad or failure.is_incomplete:
                bad[index] = failure
            if is_bad and self.on_bad_sample == "error":
                raise UserCodeError(f"{failure} (--on_bad_sample replace goes on without it)", failure.traceback)
            failures.append(failure)
        raise UserCodeError(f"none of {n_tries} {self.noun} could be read: {failures[0]}", failures[0].traceback)
