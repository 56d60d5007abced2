"""Stored codes of images or videos: shards of a fixed number of items, and an index of the rows.

    codes/codes-00000.safetensors    "codes" (n, h, w), uint8, uint16 or int32: the smallest that holds the codebook
    codes/index.jsonl                {"path": "cats/1.jpg", "shard": 0, "row": 0, "label": 0}, a line per image in order
    codes/index.json                 settings, shards and unreadable files; see shards.py

Loading needs no code of this repository:

    codes = safetensors.numpy.load_file("codes/codes-00000.safetensors")["codes"]  # or numpy.load of its .npy
    paths = [json.loads(line)["path"] for line in open("codes/index.jsonl")]       # row by row, shard after shard

The label of an image is the number of its class, as in latents.py. Images whose class is no number and no name of the
table's classes, and videos, have no label.

A row is the codes of an image, or one frame of codes of a video, which has several rows; its line states their number,
the number of frames before encoding, and the frames per second (null: an image):

    {"path": "a.mp4", "shard": 0, "row": 12, "code_frames": 5, "frames": 17, "fps": 25.0}
    line = json.loads(open("codes/index.jsonl").readline()); of_video = codes[line["row"]:][:line["code_frames"]]

A part of a file, by a manifest, has the path of the file and "start_seconds" and "end_seconds", as far as the manifest
states them. If members of several tars share a name, paths begin with that of the tar, "0001.tar/cats/1.jpg".

Videos encoded with --keep_aspect, which differ in shape from one another, have rows of a single code, (n,), in the
order of frames, lines and columns; then "grid" in index.json, the shape of a row, is [], and each line has the shape of
its frames, (h, w):

    {"path": "b.mp4", "shard": 0, "row": 480, "code_frames": 5, "frames": 17, "fps": 25.0, "grid": [8, 14]}
    of_video = codes[line["row"]:][:5 * 8 * 14].reshape(5, 8, 14)

Decoding writes a folder of images or videos, at the relative paths of the originals (for absolute paths, and those with
.., see `make_relative`); an image, and a video of one frame, become a PNG. Files are written whole.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from tandem.devices import has_pinned_memory, on_host, start_copy_to_host
from tandem.hashing import derive_key
from tandem.io.reading import open_regular, parse_json, read_lines

from .names import PART_KEYS, all_differ
from .output import create_file
from .shards import COUNT, GRID, LINES_FILE, Column, StoredArrays, explain_errors, row_blocks, row_count, stays_inside

CODES = "codes"
_DTYPES = ("uint8", "uint16", "int32")
FRAME_FOLDER = ".frames"  # ending of the folder of a video's frames
_CODE_FRAMES_AT_ONCE = 4  # of a video, that are decoded in one call
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"

Decode = Callable[[Tensor], Tensor]
# (first, end, sides) -> what the model decodes: the rows first to end, whose frames have these sides if they have one
# of their own, else ().
Read = Callable[[int, int, Sequence[int]], Tensor]
# (file, frames (h, w, 3), frames per second, path of the encoded video) -> None: writes a video.
Write = Callable[[BinaryIO, Iterator[npt.NDArray[np.uint8]], float, str], None]


def code_dtype(num_codes: int) -> np.dtype:
    """The smallest of uint8, uint16 and int32 that holds the codes 0 to num_codes - 1."""
    return next(np.dtype(dtype) for dtype in _DTYPES if num_codes - 1 <= np.iinfo(dtype).max)


class StoredCodes(StoredArrays):
    """A complete folder of codes. The constructor and the methods raise ValueError, in one line, if there are no codes,
    or they are incomplete, or a file does not agree with the index.

    counts: the number of items of each shard.
    """

    name: ClassVar[str] = CODES

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder, self.name)
        shards, n_bytes, last = self.index["shards"], 0, 0
        self.counts = [0] * len(shards)
        self._first_bytes = [0] * len(shards)  # of the lines of each shard in index.jsonl
        rows = [0] * len(shards)
        with explain_errors(self.folder / LINES_FILE):
            for text in self._line_texts():
                line = parse_json(text)
                shard, count = line["shard"], line.get(COUNT, 1)
                if not isinstance(line["path"], str):
                    raise ValueError(f"it names {str(line['path'])[:40]!r}, which is no path")
                if type(shard) is not int or not last <= shard < len(rows) or line["row"] != rows[shard]:
                    raise ValueError(f"it is not in order at {line['path']!r}")
                if type(count) is not int or count < 1:
                    raise ValueError(f"{line['path']!r} has {count!r} rows")
                grid = line.get(GRID)
                if not (_is_grid(grid) if self.has_own_shapes else grid is None):
                    raise ValueError(f"{line['path']!r} has a grid of {str(grid)[:40]}")
                if not self.counts[shard]:
                    self._first_bytes[shard] = n_bytes
                self.counts[shard] += 1
                rows[shard] += row_count(line)
                n_bytes, last = n_bytes + len(text), shard
            if rows != [entry["rows"] for entry in shards]:
                raise ValueError("its numbers of rows are not those of the index")

    def lines_of(self, shard: int) -> list[Mapping[str, Any]]:
        """The lines of index.jsonl of a shard, which the constructor has checked."""
        with explain_errors(self.folder / LINES_FILE):
            texts = read_lines(self.folder / LINES_FILE, self._first_bytes[shard])
            return [parse_json(text) for text in itertools.islice(texts, self.counts[shard])]

    @property
    def has_own_shapes(self) -> bool:
        """Whether each item has its own sides, and a row is of one position: videos with --keep_aspect."""
        return len(self.index[GRID]) < 2

    def open_shard(self, shard: int) -> Read:
        """A function that reads from a shard, which is compared with the index first, what the model decodes: codes,
        int64 (n, h, w)."""
        rows = self.stored_rows(shard)

        def read(first: int, end: int, sides: Sequence[int]) -> Tensor:
            with self.explain_errors(shard):
                return self._decodable(rows[first:end], sides)

        return read

    def stored_rows(self, shard: int) -> Column:
        """The rows of a shard as the module describes them, compared with the index."""
        return self.open_rows(shard, self.index[GRID], _DTYPES)

    def count_codes(self, shards: Iterable[int]) -> npt.NDArray[np.int64]:
        """How often each code occurs in these shards, (num_codes,)."""
        counts = np.zeros(self.index["num_codes"], np.int64)
        for shard in shards:
            for block in row_blocks(self.stored_rows(shard)):
                with self.explain_errors(shard):
                    counts += np.bincount(self._decodable(block, ()).numpy().ravel(), minlength=len(counts))
        return counts

    def _decodable(self, rows: Tensor, sides: Sequence[int]) -> Tensor:
        """See `Read`. Raises ValueError for codes beyond the codebook."""
        codes = rows.to(torch.int64)
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < self.index["num_codes"]:
            raise ValueError(f"it holds codes outside [0, {self.index['num_codes']})")
        return codes.reshape(-1, *sides, *codes.shape[1:])


class DecodedFiles:
    """The output paths of the items of each shard, each with this ending (FRAME_FOLDER: a folder of PNGs), or .png for
    a video of one frame; see `OutputNames`. Only two numbers for each item are in memory.

    `frames_per_code` is None for a model of images. Raises ValueError, in one line, if the index is damaged.
    """

    def __init__(self, folder: Path, codes: StoredCodes, ending: str, frames_per_code: int | None) -> None:
        self._folder, self._codes, self._ending, self._frames_per_code = folder, codes, ending, frames_per_code
        with explain_errors(codes.folder / LINES_FILE):
            if frames_per_code is None and codes.has_own_shapes:
                raise ValueError("its lines have shapes of their own, as videos have, and the model is one of images")
            self._names = OutputNames(map(self._path_and_ending, codes.lines()))

    def of_shard(self, shard: int) -> list[Path]:
        first = sum(self._codes.counts[:shard])
        pairs = map(self._path_and_ending, self._codes.lines_of(shard))
        return [self._folder / self._names.name(number, *pair) for number, pair in enumerate(pairs, first)]

    def share_originals(self) -> bool:
        """Whether some items are parts of one file."""
        is_part = any(not line.keys().isdisjoint(PART_KEYS) for line in self._codes.lines())
        return is_part or not all_differ(line["path"] for line in self._codes.lines())

    def _path_and_ending(self, line: Mapping[str, Any]) -> tuple[str, str]:
        if self._frames_per_code is None:
            return line["path"], self._ending
        _check_line(line, self._frames_per_code)
        return line["path"], ".png" if line["frames"] == 1 else self._ending


def _is_grid(grid: Any) -> bool:
    return isinstance(grid, list) and len(grid) == 2 and all(type(side) is int and side >= 1 for side in grid)


def _check_line(line: Mapping[str, Any], frames_per_code: int) -> None:
    """Raise ValueError or KeyError if a line of the index cannot belong to a video."""
    frames, fps = line["frames"], line["fps"]
    if type(frames) is not int or line[COUNT] != 1 + -(-(frames - 1) // frames_per_code):
        raise ValueError(f"{line['path']!r} has {frames!r} frames and {line[COUNT]} frames of codes")
    is_image = frames == 1 and fps is None
    if not is_image and not (type(fps) in (int, float) and 0 < fps < math.inf):
        raise ValueError(f"{line['path']!r} has {fps!r} frames per second")


def decode_images(
    codes: StoredCodes, shard: int, files: Sequence[Path], decode: Decode, *, batch_size: int, num_threads: int
) -> None:
    """Write the images of a shard that are missing or incomplete; `num_threads` threads compress them.

    `decode` maps rows of `codes` (batch_size, ...), padded with 0, to images (batch_size, c, h, w) in [0, 1], on any
    device. Raises ValueError, in one line, if the codes are damaged.
    """
    read = codes.open_shard(shard)
    all_slices = (slice(first, min(first + batch_size, len(files))) for first in range(0, len(files), batch_size))
    batch_slices = [batch_slice for batch_slice in all_slices if not all(map(is_complete, files[batch_slice]))]

    def padded_batches() -> Iterator[Tensor]:
        for batch_slice in batch_slices:
            rows = read(batch_slice.start, batch_slice.stop, ())
            batch = rows.new_zeros(batch_size, *rows.shape[1:])
            batch[: len(rows)] = rows
            yield batch

    paths = [path for batch_slice in batch_slices for path in files[batch_slice]]
    is_float = any(path.suffix == ".npy" for path in paths)
    save_missing(paths, pixels_of(padded_batches(), decode, is_float), num_threads)


def decode_videos(
    codes: StoredCodes,
    shard: int,
    files: Sequence[Path],
    open_stream: Callable[[], Decode],
    write: Write,
    lacks_sound: Callable[[Path, str], bool],
    *,
    num_threads: int,
) -> None:
    """Write the videos of a shard that are missing or incomplete, or that `lacks_sound` of its path and that of the
    encoded video, frame by frame.

    `open_stream` begins a video: it returns a function from the next codes, int64 (n, h', w'), or latents, fp32
    (n, d, h', w'), to their frames (f, 3, h, w) in [0, 1], on any device. `num_threads` threads compress PNGs. Raises
    ValueError, in one line, if the codes are damaged or a file cannot be written.
    """
    read = codes.open_shard(shard)
    for line, path in zip(codes.lines_of(shard), files, strict=True):
        frames = itertools.islice(pixels_of(_read_video(read, line), open_stream()), line["frames"])
        if path.suffix == ".png":
            save_missing([path], frames, 1)
        elif path.suffix == FRAME_FOLDER:
            save_missing([path / f"{number:06d}.png" for number in range(line["frames"])], frames, num_threads)
        elif not path.exists() or lacks_sound(path, make_relative(line["path"])):
            with create_file(path) as file:
                write(file, (frame.numpy() for frame in frames), line["fps"], make_relative(line["path"]))


def _read_video(read: Read, line: Mapping[str, Any]) -> Iterator[Tensor]:
    """What the model decodes of a video, some frames at a time."""
    sides = line.get(GRID, ())
    ends = [*range(0, line[COUNT], _CODE_FRAMES_AT_ONCE), line[COUNT]]
    for first, end in itertools.pairwise(line["row"] + number * math.prod(sides) for number in ends):
        yield read(first, end, sides)


def save_missing(paths: Sequence[Path], pictures: Iterable[Tensor], num_threads: int) -> None:
    """Write the missing or incomplete PNGs of pictures uint8 (h, w, c), or arrays of them, .npy of any shape;
    `num_threads` threads compress them. If none is missing, `pictures` is not iterated; it may have more items than
    `paths`."""
    is_missing = [not is_complete(path) for path in paths]
    if any(is_missing):
        with ThreadPoolExecutor(num_threads) as pool:
            missing_pictures = itertools.compress(zip(paths, pictures, strict=False), is_missing)
            while chunk := list(itertools.islice(missing_pictures, 4 * num_threads)):
                list(pool.map(_save_image, *zip(*chunk, strict=True)))


def _save_image(path: Path, pixels: Tensor) -> None:
    """Write an image without fsync, which would take most of the time; after a loss of power `is_complete` finds an
    incomplete PNG."""
    is_array = path.suffix == ".npy"
    with create_file(path, is_synced=is_array) as file:
        if is_array:
            np.save(file, pixels.numpy())
        else:
            Image.fromarray(pixels.squeeze(-1).numpy()).save(file, "png")


def pixels_of(inputs: Iterable[Any], decode: Callable[[Any], Tensor], is_float: bool = False) -> Iterator[Tensor]:
    """The pictures uint8 (h, w, c), round(255 x) after clamping, or with `is_float` fp32 (c, h, w), clamped, of the
    images (b, c, h, w) in [0, 1] to which `decode` maps each input. `decode` is called when the first picture of an
    input is requested; on an accelerator, one input earlier. Raises ValueError, in one line, if one is not finite."""

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in inputs:
            images = decode(batch).float()
            is_finite = images.isfinite().all()
            if has_pinned_memory(images.device):  # read there, it would wait for the images of the next input, too
                is_finite, _ = start_copy_to_host(is_finite)
            images = images.clamp(0, 1)
            yield is_finite, images if is_float else (images * 255).round().byte().permute(0, 2, 3, 1).contiguous()

    for is_finite, images in on_host(batches()):
        if not is_finite:
            raise ValueError(
                "the model makes values that are not finite: its inputs may not be, or, with fp16, try --precision bf16"
            )
        yield from images


def make_relative(path: str) -> str:
    """A path of an index without its root and without "..", so that it stays below any folder to which it is appended:
    a manifest may name files anywhere. Raises ValueError, in one line, if nothing remains."""
    relative = str(PurePosixPath(*(part for part in PurePosixPath(path).parts if part.strip("/") not in ("", ".."))))
    if not stays_inside(relative):
        raise ValueError(f"the index names {path!r}, which is no path of a file")
    return relative


class OutputNames:
    """The output names of paths, each with an ending that replaces its own. If two names were equal (a.jpg and a.webp),
    the new ending is appended instead; if they are still equal, as for two parts of one file, the position in the list
    is inserted before it. Raises what `make_relative` raises. Of each name only a number of 64 bits is in memory."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        keys = (derive_key(name) for pair in pairs for name in _possible_names(*pair))
        replaced, appended = np.fromiter(keys, np.uint64).reshape(-1, 2).T
        _, places, counts = np.unique(replaced, return_inverse=True, return_counts=True)
        is_replaced = counts[places] == 1
        are_unique = len(np.unique(np.where(is_replaced, replaced, appended))) == len(replaced)
        self._is_replaced = is_replaced & are_unique
        self._is_numbered = not are_unique and len(np.unique(appended)) < len(appended)

    def name(self, position: int, path: str, ending: str) -> str:
        """The output name of the pair at a position."""
        replaced, appended = _possible_names(path, ending)
        if self._is_numbered:
            return f"{appended.removesuffix(ending)}-{position}{ending}"
        return replaced if self._is_replaced[position] else appended


def _possible_names(path: str, ending: str) -> tuple[str, str]:
    relative = make_relative(path)
    return str(PurePosixPath(relative).with_suffix(ending)), relative + ending


def is_complete(path: Path) -> bool:
    """Whether a PNG exists and ends with its end mark; or a file of another kind exists."""
    if path.suffix != ".png":
        return path.exists()
    try:
        with open_regular(path) as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(max(0, size - len(_PNG_END)))
            return file.read() == _PNG_END
    except (FileNotFoundError, ValueError):  # there is no file, or a pipe, which the picture then replaces
        return False
