"""The codes of a folder of images or videos on the disk: shards of a fixed number of items, and an index of the rows.

    codes/codes-00000.safetensors    "codes" (n, h, w), uint8, uint16 or int32: the smallest that holds the codebook
    codes/index.jsonl                {"path": "cats/1.jpg", "shard": 0, "row": 0}, a line per image, in order
    codes/index.json                 settings, shards and unreadable files; see shards.py

Loading needs no code of this repository:

    codes = safetensors.numpy.load_file("codes/codes-00000.safetensors")["codes"]  # with npy: numpy.load("....npy")
    paths = [json.loads(line)["path"] for line in open("codes/index.jsonl")]       # row by row, shard after shard

A row is the codes of an image, or of a frame of codes of a video, which has several rows; its line says how many, and
further the number of frames before encoding and how many are shown in a second (null: an image):

    {"path": "a.mp4", "shard": 0, "row": 12, "code_frames": 5, "frames": 17, "fps": 25.0}
    line = json.loads(open("codes/index.jsonl").readline()); of_video = codes[line["row"]:][:line["code_frames"]]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .shards import COUNT, LINES_FILE, Array, Stored, explained

CODES = "codes"
_DTYPES = (np.uint8, np.uint16, np.int32)


def code_dtype(num_codes: int) -> np.dtype:
    """The smallest of uint8, uint16 and int32 that holds the codes 0 to num_codes - 1."""
    return next(np.dtype(dtype) for dtype in _DTYPES if num_codes - 1 <= np.iinfo(dtype).max)


class StoredCodes(Stored):
    """A complete folder of codes. The constructor and the methods raise ValueError, in one line, if there are no codes,
    or not all of them yet, or a file is not what the index says.

    by_shard: the lines of index.jsonl.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder, CODES)
        shards = self.index["shards"]
        self.by_shard: list[list[Mapping[str, Any]]] = [[] for _ in shards]
        rows = [0] * len(shards)
        with explained(self.folder / LINES_FILE):
            for line in self.lines():
                shard, count = line["shard"], line.get(COUNT, 1)
                if not isinstance(line["path"], str):
                    raise ValueError(f"it names {str(line['path'])[:40]!r}, which is no path")
                if type(shard) is not int or not 0 <= shard < len(rows) or line["row"] != rows[shard]:
                    raise ValueError(f"it is not in order at {line['path']!r}")
                if type(count) is not int or count < 1:
                    raise ValueError(f"{line['path']!r} has {count!r} rows")
                self.by_shard[shard].append(line)
                rows[shard] += count
            if rows != [entry["rows"] for entry in shards]:
                raise ValueError("its numbers of rows are not those of the index")

    def counts(self, shards: Iterable[int]) -> npt.NDArray[np.int64]:
        """How often each code occurs in shards, (num_codes,)."""
        counts = np.zeros(self.index["num_codes"], np.int64)
        for shard in shards:
            counts += np.bincount(self.load(shard).ravel(), minlength=len(counts))
        return counts

    def load(self, shard: int) -> Array:
        """Codes (n, h, w) of a shard, checked against its checksum, the index and the size of the codebook."""
        with self.rows_of(shard, self.index["grid"], _DTYPES) as codes:
            if codes.size and not 0 <= int(codes.min()) <= int(codes.max()) < self.index["num_codes"]:
                raise ValueError(f"it holds codes outside [0, {self.index['num_codes']})")
            return codes
