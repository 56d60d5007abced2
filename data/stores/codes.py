"""The codes of a folder of images or videos on the disk: shards of a fixed number of items, and an index of the rows.

    codes/codes-00000.safetensors    "codes" (n, h, w), uint8, uint16 or int32: the smallest that holds the codebook
    codes/index.jsonl                {"path": "cats/1.jpg", "shard": 0, "row": 0}, a line per image, in order
    codes/index.json                 settings, shards and unreadable files; for the other files see shards.py

Loading needs no code of this repository:

    codes = safetensors.numpy.load_file("codes/codes-00000.safetensors")["codes"]  # or numpy.load("codes-00000.npy")
    paths = [json.loads(line)["path"] for line in open("codes/index.jsonl")]       # row by row, shard after shard

A row is the codes of an image, or of a frame of codes of a video, which has several rows; its line says how many, and
further the number of frames before encoding and how many are shown in a second (null: an image):

    {"path": "a.mp4", "shard": 0, "row": 12, "code_frames": 5, "frames": 17, "fps": 25.0}
    line = json.loads(open("codes/index.jsonl").readline()); of_video = codes[line["row"]:][:line["code_frames"]]
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.files.reading import parse_json, read_lines

from .output import OutputFolder
from .shards import COUNT, LINES_FILE, Array, ShardWriter, explained, read_index, read_shard, shard_sizes

CODES = "codes"
_DTYPES = (np.uint8, np.uint16, np.int32)


def code_dtype(num_codes: int) -> np.dtype:
    """The smallest of uint8, uint16 and int32 that holds the codes 0 to num_codes - 1."""
    return next(np.dtype(dtype) for dtype in _DTYPES if num_codes - 1 <= np.iinfo(dtype).max)


def code_shards(output: OutputFolder, names: Sequence[str]) -> ShardWriter:
    """A writer of the shards of the codes (n, h, w) of images or videos; `names` are the relative paths of all files,
    in order. The settings hold "num_codes", "grid" ([h, w]), "images_per_shard" or "videos_per_shard", and "format"
    ("safetensors" or "npy")."""
    settings = output.settings
    empty = np.zeros((0, *settings["grid"]), code_dtype(settings["num_codes"]))
    sizes = shard_sizes(len(names), settings.get("images_per_shard") or settings["videos_per_shard"])
    return ShardWriter(output, empty, sizes, names, name=CODES, ending=settings["format"], paths_in_records=False)


def write_code_index(shards: ShardWriter) -> None:
    """Write index.jsonl, then index.json, which marks the codes as complete. All shards must exist."""
    lines = shards.lines()
    coded = "coded_images" if "images_per_shard" in shards.output.settings else "coded_videos"
    head = {coded: len(lines), "lines_sha256": shards.write_lines(LINES_FILE, lines)}
    shards.write_index({**head, "shards": shards.entries(), "bad": shards.bad()})


@dataclass(frozen=True)
class StoredCodes:
    """A complete folder of codes. Methods raise ValueError, in one line, if a file is not what the index says."""

    folder: Path
    index: Mapping[str, Any]  # index.json
    sha256: str  # of index.json, which holds the checksums of everything else
    lines: Sequence[Sequence[Mapping[str, Any]]]  # index.jsonl, by shard

    @property
    def paths(self) -> list[list[str]]:
        """Relative paths of the originals, by shard."""
        return [[line["path"] for line in of_shard] for of_shard in self.lines]

    def require_model(self, weights_sha256: str, folder: str) -> None:
        """Raise ValueError, in one line, unless the codes were made by these weights, those in `folder`."""
        if self.index.get("weights_sha256") != weights_sha256:
            raise ValueError(f"the codes in {self.folder} are not those of {folder}: give the model that made them")

    def counts(self, shards: Iterable[int]) -> npt.NDArray[np.int64]:
        """How often each code occurs in shards, (num_codes,)."""
        counts = np.zeros(self.index["num_codes"], np.int64)
        for shard in shards:
            counts += np.bincount(self.load(shard).ravel(), minlength=len(counts))
        return counts

    def batches(self, shard: int, batch_size: int) -> Iterator[tuple[range, npt.NDArray[np.int64]]]:
        """Rows of a shard and their codes (batch_size, h, w), padded with 0."""
        codes = self.load(shard)
        for first in range(0, len(codes), batch_size):
            rows = range(first, min(first + batch_size, len(codes)))
            batch = np.zeros((batch_size, *codes.shape[1:]), np.int64)
            batch[: len(rows)] = codes[rows.start : rows.stop]
            yield rows, batch

    def load(self, shard: int) -> Array:
        """Codes (n, h, w) of a shard, checked against its checksum, the index and the size of the codebook."""
        entry = self.index["shards"][shard]
        with explained(self.folder / entry["file"]):
            expected = (sum(line.get(COUNT, 1) for line in self.lines[shard]), *self.index["grid"])
            codes = read_shard(self.folder, entry, CODES, expected)
            if codes.shape != expected or codes.dtype not in _DTYPES:
                raise ValueError(f"it holds {codes.dtype} {codes.shape}, not codes {expected}")
            if codes.size and not 0 <= int(codes.min()) <= int(codes.max()) < self.index["num_codes"]:
                raise ValueError(f"it holds codes outside [0, {self.index['num_codes']})")
        return codes


def read_codes(folder: str | Path) -> StoredCodes:
    """Open a folder of codes. Raises ValueError, in one line, if there are no codes, or not all of them yet, or an
    index file is damaged."""
    folder = Path(folder)
    index, sha256 = read_index(folder, CODES)
    with explained(folder / LINES_FILE):
        lines: list[list[dict[str, Any]]] = [[] for _ in index["shards"]]
        rows, digest = [0] * len(lines), hashlib.sha256()
        for text in read_lines(folder / LINES_FILE):
            digest.update(text)
            line = parse_json(text)
            shard = line["shard"]
            if not isinstance(line["path"], str):
                raise ValueError(f"it names {str(line['path'])[:40]!r}, which is no path")
            if type(shard) is not int or not 0 <= shard < len(lines) or line["row"] != rows[shard]:
                raise ValueError(f"it is not in order at {line['path']!r}")
            lines[shard].append(line)
            rows[shard] += _count(line)
        if digest.hexdigest() != index["lines_sha256"]:
            raise ValueError("its checksum is not that of the index")
    return StoredCodes(folder, index, sha256, lines)


def _count(line: Mapping[str, Any]) -> int:
    """The number of rows of a line. Raises ValueError if that cannot be."""
    count = line.get(COUNT, 1)
    if type(count) is not int or count < 1:
        raise ValueError(f"{line['path']!r} has {count!r} rows")
    return count
