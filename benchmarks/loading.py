"""The loader's images per second over those of a plain Pillow loop in the same number of processes."""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tandem.data.sampling.order import TrainingOrder, split_samples
from tandem.data.sampling.stream import TrainingStream
from tandem.data.sets import open_images

from . import machine
from .report import Row, comparison

_IMAGE_SIZE = 128
_BATCH_SIZE = 8  # the script's default
_TURN_SECONDS = 3.0
_N_GENERATED = 96
_WIDTH, _HEIGHT, _QUALITY = 500, 375, 95  # typical of ImageNet's photographs


def loading(rounds: int, image_folder: str | None) -> Iterator[Row]:
    """Images per second at 128 pixels: ``TrainingStream`` with one worker per core, against as many processes
    that each decode their share of the files and keep nothing.

    The stream also hands batches to the main process, which the reference does not do. Each turn starts new processes
    and measures them after their start (for the stream: after the batches that it prefetches at its start).

    Raises:
        ValueError: the folder cannot be used; the text is one line.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        if image_folder is None:
            write_photos(Path(folder))
        images = open_images(image_folder or folder, image_size=_IMAGE_SIZE)
        paths = [images.describe(index) for index in range(len(images))]
        n_bytes = [len(Path(path).read_bytes()) for path in paths]  # this also fills the page cache
        workers = machine.cores()
        ours, reference = [], []
        for _ in range(rounds):
            ours.append(stream_rate(images, workers))
            reference.append(plain_rate(paths, workers))
        source = image_folder or "generated"
        note = f"{len(paths)} {source} images of {sum(n_bytes) / len(n_bytes) / 1000:.0f} kB, {workers} processes"
        yield comparison(f"loader, {_IMAGE_SIZE} px", "images/s", ours, reference, note, goal=1.5)


def write_photos(folder: Path) -> None:
    """Write JPEGs of 500 x 375 pixels and about 100 kB, typical of photographs: shapes with grain of two sizes."""
    shapes = open_images(f"demo:shapes:{_N_GENERATED}", image_size=512)
    rng = np.random.default_rng(0)
    for index in range(_N_GENERATED):
        picture = shapes.load(index)["images"][:, :_HEIGHT, :_WIDTH].permute(1, 2, 0).numpy().astype(np.float32)
        coarse = rng.normal(0, 18, (_HEIGHT // 3, _WIDTH // 3 + 1, 1)).repeat(3, axis=0).repeat(3, axis=1)
        fine = rng.normal(0, 6, (_HEIGHT, _WIDTH, 1))
        noisy = (picture + coarse[:_HEIGHT, :_WIDTH] + fine).clip(0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"{index:03d}.jpg", quality=_QUALITY)


def stream_rate(samples: Any, workers: int) -> float:
    """Samples per second that come out of the training stream."""
    order = TrainingOrder(split_samples(len(samples), 0.0, 0.0, 0, batch_size=1).train, seed=0)
    stream = TrainingStream(samples, order, batch_size=_BATCH_SIZE, rank=0, world_size=1, num_workers=workers)
    batches = iter(stream)
    for _ in range(3 * workers):  # PyTorch's DataLoader prefetches two batches per worker
        next(batches)
    return _samples_per_second(batch["positions"] for batch in batches)


def plain_rate(paths: Sequence[str], workers: int) -> float:
    """Files per second of ``workers`` processes together, each running a plain loop over its share of the files."""
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return sum(pool.map(_plain_process, [paths[rank::workers] or paths for rank in range(workers)], chunksize=1))


def _plain_process(paths: Sequence[str]) -> float:
    torch.set_num_threads(1)
    plain_decode(paths[0])
    return _samples_per_second(plain_decode(path)[None] for path in itertools.cycle(paths))


def _samples_per_second(batches: Iterator[Any]) -> float:
    """Samples per second of an endless iterator over batches, measured for a turn."""
    start = now = time.perf_counter()
    total = 0
    while now - start < _TURN_SECONDS:
        total += len(next(batches))
        now = time.perf_counter()
    return total / (now - start)


def plain_decode(path: str, size: int = _IMAGE_SIZE) -> Tensor:
    """What torchvision's ``Resize(size)``, ``CenterCrop(size)`` and ``PILToTensor()`` do by default:
    bilinear with antialiasing, shorter side first; uint8 (3, size, size)."""
    image = Image.open(path).convert("RGB")
    width, height = image.size
    scale = size / min(width, height)
    image = image.resize((int(width * scale), int(height * scale)), Image.Resampling.BILINEAR)
    left, top = round((image.width - size) / 2), round((image.height - size) / 2)
    image = image.crop((left, top, left + size, top + size))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
