"""A folder of images or videos, decoded from codes, at the relative paths of the originals; an image, and a video of
one frame, become a PNG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.files.writing import create, replacing

from .codes import StoredCodes
from .output import explained_write
from .pngs import output_names, pixels_of, save_missing
from .shards import COUNT, LINES_FILE, explained

FRAME_FOLDER = ".frames"  # ending of the folder of a video's frames
_PIECE_CODES = 4  # frames of codes that are decoded at once

Frames = Iterator[npt.NDArray[np.uint8]]
Decode = Callable[[Tensor], Tensor]


class Write(Protocol):
    """Writes frames (h, w, 3), of which `fps` are shown in a second, to a file."""

    def __call__(self, file: BinaryIO, frames: Frames, fps: float) -> None: ...


def decoded_files(folder: Path, codes: StoredCodes, ending: str, frames_per_code: int | None) -> list[list[Path]]:
    """By shard and item, the file below the folder: with this ending (FRAME_FOLDER: a folder of PNGs), or .png if the
    item is an image or has one frame. See `output_names`.

    Raises ValueError, in one line, if the index is damaged. `frames_per_code`: of the model of videos; None: of images.
    """
    lines = [line for of_shard in codes.by_shard for line in of_shard]
    with explained(codes.folder / LINES_FILE):
        if frames_per_code is not None:
            for line in lines:
                _check(line, frames_per_code)
        endings = [".png" if line.get("frames", 1) == 1 else ending for line in lines]
    names = iter(output_names([line["path"] for line in lines], endings))
    return [[folder / next(names) for _ in of_shard] for of_shard in codes.by_shard]


def _check(line: Mapping[str, Any], frames_per_code: int) -> None:
    """Raise ValueError or KeyError if a line of the index cannot be of a video."""
    frames, fps = line["frames"], line["fps"]
    if type(frames) is not int or line[COUNT] != 1 + -(-(frames - 1) // frames_per_code):
        raise ValueError(f"{line['path']!r} has {frames!r} frames and {line[COUNT]} frames of codes")
    is_image = frames == 1 and fps is None
    if not is_image and not (type(fps) in (int, float) and 0 < fps < math.inf):
        raise ValueError(f"{line['path']!r} has {fps!r} frames per second")


def decode_images(
    codes: StoredCodes, shard: int, files: Sequence[Path], decode: Decode, *, batch_size: int, num_threads: int
) -> None:
    """Write those images of a shard that do not exist or are incomplete; `num_threads` threads compress them.

    `decode` maps codes int64 (batch_size, h', w'), padded with 0, to images (batch_size, c, h, w) in [0, 1], on any
    device. Raises ValueError, in one line, if the codes are damaged.
    """
    rows = torch.from_numpy(codes.load(shard).astype(np.int64))
    for first in range(0, len(rows), batch_size):
        batch = rows.new_zeros(batch_size, *rows.shape[1:])
        batch[: len(rows) - first] = rows[first : first + batch_size]
        save_missing(files[first : first + batch_size], pixels_of([batch], decode), num_threads)


def decode_videos(
    codes: StoredCodes,
    shard: int,
    files: Sequence[Path],
    open_stream: Callable[[], Decode],
    write: Write,
    *,
    num_threads: int,
) -> None:
    """Write those videos of a shard that do not exist or are incomplete, frame by frame.

    `open_stream` begins a video. It returns a function that is called with the next codes, int64 (n, h', w'), and
    returns their frames (f, 3, h, w) in [0, 1], on any device. `num_threads` threads compress PNGs. Raises ValueError,
    in one line, if the codes are damaged or a file cannot be written.
    """
    rows, first = torch.from_numpy(codes.load(shard).astype(np.int64)), 0
    for line, path in zip(codes.by_shard[shard], files, strict=True):
        of_video, first = rows[first : first + line[COUNT]], first + line[COUNT]
        frames = itertools.islice(pixels_of(of_video.split(_PIECE_CODES), open_stream()), line["frames"])
        if path.suffix == ".png":
            save_missing([path], frames, 1)
        elif path.suffix == FRAME_FOLDER:
            save_missing([path / f"{number:06d}.png" for number in range(line["frames"])], frames, num_threads)
        elif not path.exists():
            with explained_write(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path) as temporary, create(temporary) as file:
                    write(file, (frame.numpy() for frame in frames), line["fps"])
