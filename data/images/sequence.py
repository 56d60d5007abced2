"""Images in their own order, each once, in batches of one shape."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..bad_samples import BadSample, BadSampleLog
from ..feed import Processes, to_unit_range
from ..workers import START_METHOD, become_worker, signals_held_back
from .folder import ImageFolder
from .sets import Images


class SequenceBatch(TypedDict):
    """images: uint8 (batch_size, c, h, w); rows: those that hold an image, the rest is 0; bad: what cannot be read."""

    images: Tensor
    rows: list[int]
    bad: list[BadSample]


class ImageSequence:
    """Ranges of `images`, unaugmented: of each range an iterator over its batches, to be used up before the next.

    Row i of a batch belongs to the i-th index of its part of the range, whatever else can be read, and every batch has
    `batch_size` rows: what a model makes of an image depends on nothing but the range and the batch size.

    Args:
        images: What to load from.
        ranges: Indices.
        batch_size: Rows of a batch.
        num_workers: Processes that load ahead; 0: load here.
        pin_memory: For fast copies to a GPU.
    """

    def __init__(
        self,
        images: Images,
        ranges: Sequence[range],
        *,
        batch_size: int,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        parts = [[indices[i : i + batch_size] for i in range(0, len(indices), batch_size)] for indices in ranges]
        self._batches_of_each = [len(part) for part in parts]
        self._loader = DataLoader(
            _Loader(images, batch_size),
            batch_size=None,  # one request is one batch
            sampler=list(itertools.chain(*parts)),
            collate_fn=_unchanged,
            num_workers=num_workers,
            worker_init_fn=become_worker,
            multiprocessing_context=START_METHOD if num_workers else None,
            pin_memory=pin_memory,
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[Iterator[SequenceBatch]]:
        with signals_held_back():
            batches = iter(self._loader)
        return (itertools.islice(batches, count) for count in self._batches_of_each)


class _Loader(Dataset):
    def __init__(self, images: Images, batch_size: int) -> None:
        self._images, self._batch_size = images, batch_size

    def __getitem__(self, request: range) -> SequenceBatch:
        loaded: dict[int, Tensor] = {}
        bad = []
        for row, index in enumerate(request):
            try:
                loaded[row] = self._images.load(index)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                bad.append(BadSample(index, self._images.describe(index), reason))
        shape = next((image.shape for image in loaded.values()), (0, 0, 0))
        images = torch.zeros(self._batch_size, *shape, dtype=torch.uint8)
        for row, image in loaded.items():
            images[row] = image
        return {"images": images, "rows": list(loaded), "bad": bad}


def _unchanged(batch: Any) -> Any:
    return batch


def map_images(
    batches: Iterable[SequenceBatch], function: Callable[[Tensor], Tensor], device: torch.device
) -> tuple[list[Tensor], list[BadSample]]:
    """`function` of batches of images (b, c, h, w) in [0, 1] on the device, of which row i depends on image i alone:
    its rows (n, ...) on the CPU for the images that can be read; and what cannot be read."""
    results, bad = [], []
    for batch in batches:
        bad += batch["bad"]
        if batch["rows"]:
            images = to_unit_range(batch["images"].to(device, non_blocking=True))
            results.append(function(images).cpu()[batch["rows"]])
    return results, bad


def report_left_out(
    log: BadSampleLog, bad: Iterable[BadSample], processes: Processes, say: Callable[[str], None], *, stop: bool
) -> None:
    """Say what any process could not read, each file once. Collective.

    Raises:
        UserMistake: there are too many to go on, or there is one and `stop`.
    """
    new = log.share(bad, processes.gather_objects)
    with processes.agreement():
        if new and stop:
            raise ValueError(f"cannot read {new[0]}; --on_bad_sample skip goes on without it")
    for sample in new:
        say(f"cannot read {sample}; it is left out".encode(errors="backslashreplace").decode())  # names may be no text
    with processes.agreement():
        log.check()


def relative_names(images: Images) -> list[str]:
    """The path of each image below its folder, '/' between the parts; what `describe` says where there is no folder."""
    folder = os.path.join(images.folder, "") if isinstance(images, ImageFolder) else ""
    return [images.describe(index).removeprefix(folder) for index in range(len(images))]


def names_sha256(names: Sequence[str]) -> str:
    """Hexadecimal SHA-256 of a list of paths: of each, in the file system's bytes, and a zero byte."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(os.fsencode(name) + b"\0")
    return digest.hexdigest()
