"""Batches of one shape that hold each image of a set once, in the order of the set, for models that encode images."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypedDict

import torch
from torch import Tensor

from ..bad_samples import BadSample, reason_of
from ..feed import to_unit_range
from ..workers import load_groups
from .sets import Images


class SequenceBatch(TypedDict):
    """images: uint8 (batch_size, c, h, w); rows: those that hold an image, others are 0; bad: the unreadable images."""

    images: Tensor
    rows: list[int]
    bad: list[BadSample]


def image_batches(
    images: Images, ranges: Sequence[range], *, batch_size: int, num_workers: int = 0, pin_memory: bool = False
) -> Iterator[Iterator[SequenceBatch]]:
    """Ranges of indices -> for each range an iterator over its batches, to be exhausted before the next; unaugmented.

    Row i of a batch belongs to the i-th index of its part of the range, even if other images cannot be read, and every
    batch has `batch_size` rows. So a model's output for an image depends only on the image, the range and the batch
    size.
    """
    parts = [[indices[i : i + batch_size] for i in range(0, len(indices), batch_size)] for indices in ranges]
    load = functools.partial(_load_batch, images, batch_size)
    return load_groups(load, parts, num_workers, pin_memory=pin_memory)


def _load_batch(images: Images, batch_size: int, indices: range) -> SequenceBatch:
    loaded: dict[int, Tensor] = {}
    bad = []
    for row, index in enumerate(indices):
        try:
            loaded[row] = images.load(index)
        except (OSError, ValueError) as error:
            bad.append(BadSample(index, images.describe(index), reason_of(error)))
    shape = next((image.shape for image in loaded.values()), (0, 0, 0))
    batch = torch.zeros(batch_size, *shape, dtype=torch.uint8)
    for row, image in loaded.items():
        batch[row] = image
    return {"images": batch, "rows": list(loaded), "bad": bad}


def map_images(
    batches: Iterable[SequenceBatch], function: Callable[[Tensor], Tensor], device: torch.device
) -> tuple[list[Tensor], list[BadSample]]:
    """Apply `function` to batches of images (b, c, h, w) in [0, 1] on the device -> for each batch the
    results (n, ...) of its readable images, on the CPU; and the unreadable images. Row i of the output of `function`
    must depend only on image i."""
    results, bad = [], []
    for batch in batches:
        bad += batch["bad"]
        if batch["rows"]:
            images = to_unit_range(batch["images"].to(device, non_blocking=True))
            results.append(function(images).cpu()[batch["rows"]])
    return results, bad
