"""Stored arrays: shards of a fixed number of items, and an index that is written last.

codes-00000.safetensors   the rows of the items that could be read, in order. It gets this name once it is
                          complete. The metadata hold, as JSON with the key "about", its checksum "sha256" and the
                          items' index entries, "notes"
index.jsonl               {"path": "cats/1.jpg", "shard": 0, "row": 0}, a line per item, in order; row: its first
index.json                settings, checksums and unreadable items; if it exists, all other files are complete
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tandem.io.reading import READ_ERRORS, check_regular, error_text, parse_json, read_bytes, read_lines
from tandem.io.renamed import rename_settings

INDEX_FILE, LINES_FILE = "index.json", "index.jsonl"
COUNT = "code_frames"  # key of the number of rows of an item that has several
PARTIAL = "partial"  # key of the reason why only a part of an item's file is read
GRID = "grid"  # key of an item's own sides: then a row is of a single position
SHARD_ERRORS: tuple[type[Exception], ...] = (*READ_ERRORS, SafetensorError)
_MOST_NUMBERS = 1 << 29  # of a row
_BLOCK_NUMBERS = 1 << 20  # of rows that are read at once
# The names of dtypes in safetensors files.
_FORMAT_DTYPES = {
    "uint8": "U8", "uint16": "U16", "int32": "I32", "float16": "F16", "bfloat16": "BF16", "float32": "F32",
}  # fmt: skip

Array = npt.NDArray[Any]


class StoredArrays:
    """A complete folder of shards; `index` is the content of index.json, and `sha256` its checksum. All methods raise
    ValueError, in one line, if there is no such folder, it is incomplete, or a file does not agree with the index."""

    def __init__(self, folder: str | Path, name: str) -> None:
        self.folder, self._name = Path(folder), name
        path = self.folder / INDEX_FILE
        if not path.exists():
            reason = f"it holds no index of {name}"
            if not self.folder.is_dir():
                reason = "there is no such folder"
            elif any(self.folder.glob(f"{name}-*")):
                reason = "the command that fills it did not finish: start it again; or another program made it"
            raise ValueError(f"there is no {INDEX_FILE} in {str(folder)!r}: {reason}")
        with explain_errors(path):
            content = read_bytes(path)
            self.index: Mapping[str, Any] = rename_settings(parse_json(content))
            self.sha256 = hashlib.sha256(content).hexdigest()
            for entry in self.index["shards"]:
                if not stays_inside(entry["file"], parts=1):
                    raise ValueError(f"it names {str(entry['file'])!r}, which is no file in the folder")

    def open_rows(self, shard: int, shape: Sequence[int], dtypes: Sequence[str], **others: Sequence[int]) -> Column:
        """The rows of a shard, checked against the index; `others`: the shapes of the rows of its other columns."""
        entry = self.index["shards"][shard]
        with self.explain_errors(shard):
            shapes = {name: (entry["rows"], *row_shape) for name, row_shape in {self._name: shape, **others}.items()}
            return open_columns(self.folder / entry["file"], shapes, dtypes, entry["sha256"])[self._name]

    def explain_errors(self, shard: int) -> contextlib.AbstractContextManager[None]:
        """`explain_errors` for the file of a shard."""
        return explain_errors(self.folder / self.index["shards"][shard]["file"])

    def lines(self) -> Iterator[Mapping[str, Any]]:
        """The lines of index.jsonl, one at a time. Their checksum is compared at the end."""
        return map(parse_json, self._line_texts())

    def _line_texts(self) -> Iterator[bytes]:
        digest = hashlib.sha256()
        for text in read_lines(self.folder / LINES_FILE):
            digest.update(text)
            yield text
        if digest.hexdigest() != self.index["lines_sha256"]:
            raise ValueError("its checksum is not that of the index")


class Column:
    """A column of a shard, slices [first:end] of which are tensors. Each slice maps the file anew: otherwise everything
    that was read would count as memory of this process, as long as the system has room for it."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name

    @property
    def shape(self) -> list[int]:
        shape: list[int] = self._open().get_shape()
        return shape

    def __getitem__(self, rows: slice) -> Tensor:
        tensor: Tensor = self._open()[rows]
        return tensor

    def _open(self) -> Any:
        with safe_open(self._path, "pt") as file:
            return file.get_slice(self._name)


def shard_bytes(columns: Mapping[str, Tensor], **metadata: Any) -> bytes:
    """The content of a shard. A single entry holds all metadata: several would have no fixed order."""
    text = json.dumps({"sha256": _hash_columns(columns), **metadata})
    return save({name: column.contiguous() for name, column in columns.items()}, {"about": text})


def streamed_shard(
    name: str, empty: Tensor, blocks: Callable[[], Iterable[bytes]], *, notes: Sequence[Any], **metadata: Any
) -> Iterator[bytes]:
    """What `shard_bytes` gives for a single column, block by block, by the specification of the format: the length of
    the header, the header, the numbers. `blocks`, which is called twice, gives the numbers of the rows of the items
    with the entries `notes`; a row is like one of `empty` (0, ...)."""
    digest, n_bytes = hashlib.sha256(), 0
    for block in blocks():
        digest.update(block)
        n_bytes += len(block)
    dtype, shape = _FORMAT_DTYPES[dtype_name(empty)], [count_rows(notes), *empty.shape[1:]]
    assert n_bytes == math.prod(shape) * empty.element_size(), (n_bytes, shape)
    text = json.dumps({"sha256": digest.hexdigest(), "notes": notes, **metadata})
    described = {
        "__metadata__": {"about": text}, name: {"dtype": dtype, "shape": shape, "data_offsets": [0, n_bytes]}
    }  # fmt: skip
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    yield from blocks()


def open_columns(path: Path, shapes: Mapping[str, Any], dtypes: Sequence[str], sha256: str) -> dict[str, Column]:
    """The columns of a shard, of these shapes, each of one of these types. They are read once, in blocks, to compare
    the checksum, and are not kept. Raises one of `SHARD_ERRORS` if the shard is damaged."""
    columns = {name: Column(check_regular(path), name) for name in shapes}
    for name, shape in shapes.items():
        if not all(type(side) is int and side >= 0 for side in shape) or math.prod(shape[1:]) > _MOST_NUMBERS:
            limit = f"and a row can have {_MOST_NUMBERS} numbers at most"
            raise ValueError(f"the index claims a shape of {tuple(shape)} for it, {limit}")
        if (stored_shape := columns[name].shape) != list(shape):  # compared before a row is read
            raise ValueError(f"it holds a shape of {tuple(stored_shape)}, not {tuple(shape)}")
        if (dtype := dtype_name(columns[name][:0])) not in dtypes:
            raise ValueError(f"it holds {dtype}, not {' or '.join(dtypes)}")
    digest = hashlib.sha256()
    for name in sorted(columns):
        for block in row_blocks(columns[name]):
            digest.update(numbers_of(block))
    if digest.hexdigest() != sha256:
        raise ValueError("its checksum is not that of the index")
    return columns


def row_blocks(column: Column) -> Iterator[Tensor]:
    """The rows of a column in blocks (n, ...), in order, so that their number does not change the memory."""
    n_rows, *row_shape = column.shape
    n_at_once = max(1, _BLOCK_NUMBERS // max(1, math.prod(row_shape)))
    for first in range(0, n_rows, n_at_once):
        yield column[first : first + n_at_once]


def numbers_of(rows: Tensor) -> memoryview:
    """The bytes of the numbers of a tensor on the host, as a shard has them."""
    content: memoryview = rows.contiguous().flatten().view(torch.uint8).numpy().data
    return content


def _hash_columns(columns: Mapping[str, Tensor]) -> str:
    """SHA-256 of the numbers of all columns, in the order of the columns' names."""
    digest = hashlib.sha256()
    for name in sorted(columns):
        digest.update(numbers_of(columns[name]))
    return digest.hexdigest()


def dtype_name(column: Tensor) -> str:
    return str(column.dtype).removeprefix("torch.")


def row_count(entry: Mapping[str, Any]) -> int:
    """The number of rows of an item, by its entry in the index."""
    return int(entry.get(COUNT, 1) * math.prod(entry.get(GRID, ())))


def count_rows(entries: Iterable[Mapping[str, Any]]) -> int:
    return sum(row_count(entry) for entry in entries)


@contextlib.contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Turn the errors of a damaged file of a store into a ValueError of one line that names `path`."""
    try:
        yield
    except SHARD_ERRORS as error:
        raise ValueError(f"cannot read {path}: {error_text(error)[:200]}; make it again") from None


def stays_inside(path: Any, parts: int | None = None) -> bool:
    """Whether a path, appended to any folder, stays below that folder; and has this number of parts, if it is given."""
    if not isinstance(path, str) or not path or "\0" in path:
        return False
    pure = PurePosixPath(path)
    has_parts = parts is None or len(pure.parts) == parts
    return has_parts and not pure.is_absolute() and bool(pure.name) and ".." not in pure.parts
