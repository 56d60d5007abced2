"""The codes of an image folder on the disk: shards of a fixed number of images, and an index of what is in which row.

    codes/codes-00000.safetensors    "codes" (n, h, w), uint8, uint16 or int32: the smallest that holds the codebook
    codes/codes-00000.json           rows, checksum, and what could not be read; written when the shard is
    codes/index.jsonl                {"path": "cats/1.jpg", "shard": 0, "row": 0}, a line per image, in order
    codes/index.json                 settings, shards and unreadable images; written last: where it is, all is complete

Loading needs nothing of this repository:

    codes = safetensors.numpy.load_file("codes/codes-00000.safetensors")["codes"]  # or numpy.load("codes-00000.npy")
    paths = [json.loads(line)["path"] for line in open("codes/index.jsonl")]       # row by row, shard after shard
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as safetensors_load
from safetensors.numpy import save as safetensors_save

from ..bad_samples import BadSample
from .resumable import WriteFile, json_bytes, sha256_of

FORMATS = ("safetensors", "npy")
INDEX_FILE, LINES_FILE = "index.json", "index.jsonl"
_DTYPES = (np.uint8, np.uint16, np.int32)
_OF_A_DAMAGED_STORE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError)

Codes = npt.NDArray[Any]


def code_dtype(num_codes: int) -> np.dtype:
    """The smallest of uint8, uint16 and int32 that holds the codes 0 to num_codes - 1."""
    return next(np.dtype(dtype) for dtype in _DTYPES if num_codes - 1 <= np.iinfo(dtype).max)


class CodeWriter:
    """Fills a folder of codes, a shard at a time, in any order and by any number of processes.

    Shard k holds the images k x images_per_shard and on, in order, without those that could not be read.

    Args:
        folder: Claimed for these settings (`claim_folder`).
        names: Paths of all images, relative and in order.
        settings: Become the head of the index. Among them "num_codes", "grid" ([h, w]), "images_per_shard"
            and "format" (`FORMATS`).
        write: Writes a file whole or not at all.
    """

    def __init__(self, folder: Path, names: Sequence[str], settings: Mapping[str, Any], write: WriteFile) -> None:
        assert settings["format"] in FORMATS, settings["format"]
        self._folder, self._names, self._settings, self._write = folder, names, settings, write
        self._format, self._size = settings["format"], settings["images_per_shard"]
        self._dtype, self._grid = code_dtype(settings["num_codes"]), settings["grid"]
        self.n_shards = math.ceil(len(names) / self._size)

    def images_of(self, shard: int) -> range:
        """Indices of a shard's images."""
        return range(shard * self._size, min((shard + 1) * self._size, len(self._names)))

    def write_shard(self, shard: int, parts: Sequence[npt.ArrayLike], bad: Sequence[BadSample]) -> None:
        """Codes (n, h, w), in parts, of the images of a shard that could be read, and those that could not."""
        codes = np.concatenate([np.zeros((0, *self._grid), np.int64), *parts])
        assert len(codes) + len(bad) == len(self.images_of(shard)), (len(codes), len(bad), shard)
        content = _to_bytes(codes.astype(self._dtype), self._format)
        self._write(self._path(shard), content)
        record = {
            "rows": len(codes),
            "sha256": hashlib.sha256(content).hexdigest(),
            "bad": [[sample.index, sample.reason] for sample in bad],
        }
        self._write(self._record_path(shard), json_bytes(record))

    def unfinished(self) -> list[int]:
        """Shards without a record, or whose file is not what the record says. Reads all that there is."""
        return [shard for shard in range(self.n_shards) if not self._is_finished(shard)]

    def bad(self, shard: int) -> list[BadSample]:
        """What could not be read for a finished shard, by relative path."""
        return [BadSample(index, self._names[index], reason) for index, reason in self._record(shard)["bad"]]

    def write_index(self) -> None:
        """index.jsonl, then index.json, which makes the codes complete. All shards are finished."""
        lines, shards, bad = [], [], []
        for shard in range(self.n_shards):
            record, unreadable = self._record(shard), self.bad(shard)
            left_out = {sample.index for sample in unreadable}
            paths = [self._names[index] for index in self.images_of(shard) if index not in left_out]
            lines += [json.dumps({"path": path, "shard": shard, "row": row}) + "\n" for row, path in enumerate(paths)]
            shards.append({"file": self._path(shard).name, "rows": record["rows"], "sha256": record["sha256"]})
            bad += [{"path": sample.path, "reason": sample.reason} for sample in unreadable]
        text = "".join(lines).encode()
        self._write(self._folder / LINES_FILE, text)
        index = {
            **self._settings,
            "coded_images": len(lines),
            "lines_sha256": hashlib.sha256(text).hexdigest(),
            "shards": shards,
            "bad": bad,
        }
        self._write(self._folder / INDEX_FILE, json_bytes(index))

    def _is_finished(self, shard: int) -> bool:
        try:
            record = self._record(shard)
            is_whole = record["rows"] + len(record["bad"]) == len(self.images_of(shard))
            return is_whole and record["sha256"] == sha256_of([self._path(shard)])
        except _OF_A_DAMAGED_STORE:
            return False

    def _record(self, shard: int) -> Any:
        return json.loads(self._record_path(shard).read_text())

    def _path(self, shard: int) -> Path:
        return self._folder / f"codes-{shard:05d}.{self._format}"

    def _record_path(self, shard: int) -> Path:
        return self._folder / f"codes-{shard:05d}.json"


@dataclass(frozen=True)
class StoredCodes:
    """A complete folder of codes.

    Args:
        folder: Where it is.
        index: Content of index.json.
        paths: Relative paths of the images, by shard and row.
    """

    folder: Path
    index: Mapping[str, Any]
    paths: Sequence[Sequence[str]]

    @property
    def sha256(self) -> str:
        """Of index.json, which holds the checksums of everything else."""
        return sha256_of([self.folder / INDEX_FILE])

    def counts(self, shards: Iterable[int]) -> npt.NDArray[np.int64]:
        """How often each code occurs in shards, (num_codes,). Raises what `load` raises."""
        counts = np.zeros(self.index["num_codes"], np.int64)
        for shard in shards:
            counts += np.bincount(self.load(shard).ravel(), minlength=len(counts))
        return counts

    def batches(self, shard: int, batch_size: int) -> Iterator[tuple[range, npt.NDArray[np.int64]]]:
        """Rows of a shard and their codes (batch_size, h, w), padded with 0. Raises what `load` raises."""
        codes = self.load(shard)
        for first in range(0, len(codes), batch_size):
            rows = range(first, min(first + batch_size, len(codes)))
            batch = np.zeros((batch_size, *codes.shape[1:]), np.int64)
            batch[: len(rows)] = codes[rows.start : rows.stop]
            yield rows, batch

    def load(self, shard: int) -> Codes:
        """Codes (n, h, w) of a shard, checked against its checksum, the index and the size of the codebook.

        Raises:
            ValueError: one line, where the file is missing, damaged or not what the index says.
        """
        entry = self.index["shards"][shard]
        path = self.folder / entry["file"]
        try:
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() != entry["sha256"]:
                raise ValueError("its checksum is not that of the index")
            codes = _from_bytes(content, path.suffix)
            expected = (len(self.paths[shard]), *self.index["grid"])
            if codes.shape != expected or codes.dtype not in _DTYPES:
                raise ValueError(f"it holds {codes.dtype} {codes.shape}, not codes {expected}")
            if codes.size and not 0 <= int(codes.min()) <= int(codes.max()) < self.index["num_codes"]:
                raise ValueError(f"it holds codes outside [0, {self.index['num_codes']})")
            return codes
        except _OF_A_DAMAGED_STORE as error:
            raise ValueError(f"cannot read the codes in {path}: {_reason(error)}; encode again") from None


def read_codes(folder: str | Path) -> StoredCodes:
    """Open what was encoded.

    Raises:
        ValueError: one line, where there are no such codes, or not all yet, or an index is damaged.
    """
    folder = Path(folder)
    if not (folder / INDEX_FILE).exists():
        what = "its encoding did not finish: start it again" if any(folder.glob("codes-*")) else "it holds no codes"
        raise ValueError(
            f"there is no {INDEX_FILE} in {str(folder)!r}: {what if folder.is_dir() else 'no such folder'}"
        )
    try:
        index = json.loads((folder / INDEX_FILE).read_text())
        text = (folder / LINES_FILE).read_bytes()
        if hashlib.sha256(text).hexdigest() != index["lines_sha256"]:
            raise ValueError(f"the checksum of {LINES_FILE} is not that of {INDEX_FILE}")
        paths: list[list[str]] = [[] for _ in index["shards"]]
        for path, shard, row in _lines(text):
            if row != len(paths[shard]):
                raise ValueError(f"{LINES_FILE} is not in order at {path!r}")
            paths[shard].append(path)
        if odd := [str(entry["file"]) for entry in index["shards"] if not stays_inside(entry["file"], parts=1)]:
            raise ValueError(f"it names {odd[0]!r}, which is no file in the folder")
        return StoredCodes(folder, index, paths)
    except (*_OF_A_DAMAGED_STORE, IndexError) as error:
        raise ValueError(f"cannot read the index of the codes in {folder}: {_reason(error)}; encode again") from None


def stays_inside(path: Any, parts: int | None = None) -> bool:
    """Whether a path, of so many parts, leads to a file below any folder that it is appended to."""
    if not isinstance(path, str) or not path or "\0" in path:
        return False
    pure = PurePosixPath(path)
    fits = parts is None or len(pure.parts) == parts
    return fits and not pure.is_absolute() and bool(pure.name) and ".." not in pure.parts


def _lines(text: bytes) -> Iterator[tuple[str, int, int]]:
    for line in text.decode().splitlines():
        entry = json.loads(line)
        yield entry["path"], entry["shard"], entry["row"]


def _to_bytes(codes: Codes, file_format: str) -> bytes:
    if file_format == "safetensors":
        return safetensors_save({"codes": codes})
    content = io.BytesIO()
    np.save(content, codes, allow_pickle=False)
    return content.getvalue()


def _from_bytes(content: bytes, suffix: str) -> Codes:
    if suffix == ".npy":
        return np.load(io.BytesIO(content), allow_pickle=False)
    return safetensors_load(content)["codes"]


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:200] or type(error).__name__
