"""A folder of videos, decoded from codes, at the relative paths of the originals; one frame becomes a PNG."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.files.writing import create, replacing

from .codes import StoredCodes
from .output import explained_write
from .pngs import is_complete, output_names, save, to_pixels
from .shards import COUNT, LINES_FILE, explained

FRAME_FOLDER = ".frames"  # ending of the folder of a video's frames
_PIECE_CODES = 4  # frames of codes that are decoded at once

Frames = Iterator[npt.NDArray[np.uint8]]


class Write(Protocol):
    """Writes frames (h, w, 3), of which `fps` are shown in a second, to a file."""

    def __call__(self, file: BinaryIO, frames: Frames, fps: float) -> None: ...


def film_files(folder: Path, codes: StoredCodes, ending: str, frames_per_code: int) -> list[list[Path]]:
    """By shard and video, the file below the folder: with this ending (FRAME_FOLDER: a folder of PNGs), or .png if the
    video has one frame. See `output_names`. Raises ValueError, in one line, if the index is damaged."""
    with explained(codes.folder / LINES_FILE):
        lines = [line for of_shard in codes.lines for line in of_shard]
        for line in lines:
            _check(line, frames_per_code)
        endings = [".png" if line["frames"] == 1 else ending for line in lines]
    names = iter(output_names([line["path"] for line in lines], endings))
    return [[folder / next(names) for _ in of_shard] for of_shard in codes.lines]


def _check(line: Mapping[str, Any], frames_per_code: int) -> None:
    """Raise ValueError or KeyError if a line of the index cannot be of a video."""
    frames, fps = line["frames"], line["fps"]
    if type(frames) is not int or line[COUNT] != 1 + -(-(frames - 1) // frames_per_code):
        raise ValueError(f"{line['path']!r} has {frames!r} frames and {line[COUNT]} frames of codes")
    is_image = frames == 1 and fps is None
    if not is_image and not (type(fps) in (int, float) and 0 < fps < math.inf):
        raise ValueError(f"{line['path']!r} has {fps!r} frames per second")


def decode_films(
    codes: StoredCodes,
    shard: int,
    files: Sequence[Path],
    open_stream: Callable[[], Callable[[Tensor], Tensor]],
    write: Write,
    *,
    num_threads: int,
) -> None:
    """Write those videos of a shard that do not exist or are incomplete, frame by frame.

    `open_stream` begins a video. It returns a function that is called with the next codes, int64 (n, h', w'), and
    returns their frames (3, f, h, w) in [0, 1], on any device. `num_threads` threads compress PNGs. Raises ValueError,
    in one line, if the codes are damaged or a file cannot be written.
    """
    rows, first = codes.load(shard), 0
    for line, path in zip(codes.lines[shard], files, strict=True):
        of_video, first = rows[first : first + line[COUNT]], first + line[COUNT]
        frames = itertools.islice(_decoded(of_video, open_stream()), line["frames"])
        if path.suffix == ".png":
            _write_pngs([path], frames, 1)
        elif path.suffix == FRAME_FOLDER:
            _write_pngs([path / f"{number:06d}.png" for number in range(line["frames"])], frames, num_threads)
        elif not path.exists():
            _write_whole(path, functools.partial(write, frames=frames, fps=line["fps"]))


def _decoded(codes: npt.NDArray[Any], decode: Callable[[Tensor], Tensor]) -> Frames:
    """The frames (h, w, 3) of codes (n, h', w'), one by one."""
    for first in range(0, len(codes), _PIECE_CODES):
        piece = torch.from_numpy(codes[first : first + _PIECE_CODES].astype(np.int64))
        yield from to_pixels(decode(piece).transpose(0, 1)).numpy()


def _write_pngs(paths: Sequence[Path], frames: Frames, num_threads: int) -> None:
    """Write those PNGs that do not exist or are incomplete."""
    missing = [not is_complete(path) for path in paths]
    if not any(missing):
        return
    with ThreadPoolExecutor(num_threads) as pool:
        todo = itertools.compress(zip(paths, frames, strict=True), missing)
        while some := list(itertools.islice(todo, 4 * num_threads)):
            list(pool.map(save, *zip(*((path, torch.from_numpy(frame)) for path, frame in some), strict=True)))


def _write_whole(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write a file whole or not at all, and sync it."""
    with explained_write(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, create(temporary) as file:
            write(file)
