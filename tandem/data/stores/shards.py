"""Stored arrays: shards of a fixed number of items, and an index that is written last.

codes-00000.safetensors   the rows of the items that could be read, in order. It gets this name once it is
                          complete. The metadata hold, as JSON with the key "about", its checksum "sha256" and the
                          items' index entries, "notes"
index.jsonl               {"path": "cats/1.jpg", "shard": 0, "row": 0}, a line per item, in order; row: its first
index.json                settings, checksums and unreadable items; if it exists, all other files are complete
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tandem.data.bad_samples import BadSample, BadSampleLog
from tandem.io.reading import READ_ERRORS, check_regular, error_text, parse_json, read_bytes, read_lines
from tandem.io.renamed import rename_settings

from .names import SampleNames
from .output import OutputFolder, json_bytes

INDEX_FILE, LINES_FILE = "index.json", "index.jsonl"
COUNT = "code_frames"  # key of the number of rows of an item that has several
PARTIAL = "partial"  # key of the reason why only a part of an item's file is read
GRID = "grid"  # key of an item's own sides: then a row is of a single position
_READ_ERRORS: tuple[type[Exception], ...] = (*READ_ERRORS, SafetensorError)
_MOST_NUMBERS = 1 << 29  # of a row
_BLOCK_NUMBERS = 1 << 20  # of rows that are read at once
# The names of dtypes in safetensors files.
_FORMAT_DTYPES = {
    "uint8": "U8", "uint16": "U16", "int32": "I32", "float16": "F16", "bfloat16": "BF16", "float32": "F32",
}  # fmt: skip

Array = npt.NDArray[Any]


class EncodedShard(NamedTuple):
    """The items of a shard.

    Args:
        parts: Arrays (n, ...) whose concatenation is the rows of the items that could be read, in order.
        entries: The index entry of each item that could be read, which may have COUNT and GRID, see `row_count`.
        bad: The items that could not be read.
    """

    parts: Sequence[Any]
    entries: list[dict[str, Any]]
    bad: list[BadSample]


# The indices of the items of each shard -> the encoded shards, each an `EncodedShard` or what the writer takes.
Encode = Callable[[Sequence[range]], Iterator[Any]]


class ShardWriter:
    """Fills an output folder with shards, in any order and by any number of processes.

    Args:
        name: Name of the array in each file, and the beginning of the file's name.
        empty: An empty array (0, ...) with the dtype of the rows and, from dimension 1 on, their shape.
        names: Of all items, in order.
        per_shard: Items of a shard, readable or not; the last may have fewer.
        npy: Whether `arrays` are written, too, for programs that cannot read safetensors.
    """

    def __init__(
        self, output: OutputFolder, name: str, empty: Any, names: SampleNames, per_shard: int, *, npy: bool = False
    ) -> None:
        self.output, self._name, self._names, self._with_npy = output, name, names, npy
        self._empty = torch.as_tensor(empty)
        indices = range(len(names))
        self._items = [indices[first : first + per_shard] for first in range(0, len(names), per_shard)]

    def __len__(self) -> int:
        return len(self._items)

    def fill(self, compute: Encode, count_key: str, verb: str, *, stop_at_bad: bool = False) -> tuple[int, int, float]:
        """Compute and write all shards that are missing or damaged, or whose unreadable items can be read by now, then
        the index. Returns the number of items of this run and that of the unreadable items of all runs, over all
        processes; and the time in seconds. Collective.

        `compute` gets the items of each shard of this process; `count_key` is the key of the number of readable items
        in index.json; `verb` is the participle for messages, such as "encoded". Raises UserMistake, in one line, if the
        disk is full, or too many items cannot be read (with `stop_at_bad`: if any item cannot be read); AskedToStop
        after a signal.
        """
        start_time, processes = time.perf_counter(), self.output.processes
        bad_by_shard: dict[int, list[BadSample]] = {}
        with processes.raise_on_all_ranks():
            if processes.rank == 0:  # this reads all existing shards
                for k in range(len(self)):
                    processes.heartbeat("checking the shards", is_uninterrupted=True)
                    with contextlib.suppress(*_READ_ERRORS):
                        bad_by_shard[k] = self._check_shard(k)
        log = BadSampleLog(len(self._names))
        still_bad = self._try_again(compute, [sample.index for sample in itertools.chain(*bad_by_shard.values())])
        unchanged = {*still_bad}
        is_done = {k for k, samples in bad_by_shard.items() if unchanged.issuperset(samples)}
        missing = processes.broadcast_object([k for k in range(len(self)) if k not in is_done])
        if not missing:
            self.output.say(f"all shards ({len(self)}) were {verb} before, nothing is left to do: {self.output.path}")
        self._report_bad(log, still_bad, stop_at_bad)
        with processes.raise_on_all_ranks():
            if missing and processes.rank == 0:  # it may describe shards that are about to be replaced
                (self.output.path / INDEX_FILE).unlink(missing_ok=True)
        results = compute([self._items[k] for k in missing[processes.rank :: processes.world_size]])
        for shard in self.output.rounds(missing, verb):
            bad: list[BadSample] = []
            with processes.raise_on_all_ranks():
                if shard is not None:
                    encoded = next(results)
                    self._write(shard, encoded)
                    bad = encoded.bad
            self._report_bad(log, bad, stop_at_bad)
        seconds = time.perf_counter() - start_time
        with processes.raise_on_all_ranks():
            if processes.rank == 0:
                self._write_index(count_key)
        return sum(len(self._items[k]) for k in missing), log.count, seconds

    def columns(self, rows: Tensor, entries: Sequence[Any], items: Sequence[int]) -> dict[str, Tensor]:
        """The tensors of a file by name, each (n, ...): the rows of the items with these indices."""
        return {self._name: rows}

    def extra_metadata(self) -> dict[str, Any]:
        """What the metadata of each file say about its columns."""
        return {}

    def arrays(self, shard: int, columns: Mapping[str, Tensor]) -> Iterator[tuple[str, Array]]:
        """The .npy files of a shard, by name."""
        yield f"{self._name}-{shard:05d}.npy", columns[self._name].numpy()

    def _file_name(self, shard: int) -> str:
        return f"{self._name}-{shard:05d}.safetensors"

    def _write(self, shard: int, encoded: EncodedShard) -> None:
        rows = torch.cat([torch.as_tensor(part).to(self._empty.dtype) for part in (self._empty, *encoded.parts)])
        entries, bad = encoded.entries, encoded.bad
        assert (len(entries) + len(bad), _count_rows(entries)) == (len(self._items[shard]), len(rows)), (shard, encoded)
        columns = self.columns(rows, entries, sorted({*self._items[shard]} - {sample.index for sample in bad}))
        if self._with_npy:  # .npy files come before the shard, whose existence means that all are complete
            self.output.write_many((name, _npy_bytes(array)) for name, array in self.arrays(shard, columns))
        self.output.write(self._file_name(shard), shard_bytes(columns, **self._metadata(entries, bad)))

    def _metadata(self, entries: Sequence[Any], bad: Sequence[BadSample]) -> dict[str, Any]:
        """The metadata of a file beside its checksum."""
        reasons = [[sample.index, sample.reason] for sample in bad]
        return {"notes": entries, "bad": reasons, **self.extra_metadata()}

    def _read_metadata(self, shard: int) -> Any:
        with safe_open(check_regular(self.output.path / self._file_name(shard)), "np") as file:
            return parse_json(file.metadata()["about"].encode())

    def _try_again(self, compute: Encode, indices: Sequence[int]) -> list[BadSample]:
        """Those of the items with these indices, given by rank 0, that still cannot be read, in order, each with the
        reason of now. Collective."""
        processes, bad = self.output.processes, list[BadSample]()
        indices = processes.broadcast_object(sorted(indices))[processes.rank :: processes.world_size]
        with processes.raise_on_all_ranks():
            for encoded in compute([range(index, index + 1) for index in indices]) if indices else ():
                processes.heartbeat("trying what could not be read")
                bad += self._finish(encoded)
        reasons = processes.gather_objects([[sample.index, sample.reason] for sample in bad])
        return [BadSample(index, "", reason) for index, reason in sorted(itertools.chain(*reasons))]

    def _finish(self, encoded: Any) -> list[BadSample]:
        """The items of an encoded shard, which is not written, that could not be read."""
        bad: list[BadSample] = encoded.bad
        return bad

    def _check_shard(self, shard: int) -> list[BadSample]:
        """The items of a shard that could not be read, without their names. Raises one of `_READ_ERRORS` if there is no
        such shard, or it does not agree with its metadata."""
        metadata = self._read_metadata(shard)
        count, empty = _count_rows(metadata["notes"]), self.columns(self._empty, [], [])
        shapes = {name: (count, *column.shape[1:]) for name, column in empty.items()}
        dtypes = [_dtype_name(column) for column in empty.values()]
        open_columns(self.output.path / self._file_name(shard), shapes, dtypes, metadata["sha256"])
        if len(metadata["notes"]) + len(metadata["bad"]) != len(self._items[shard]):
            raise ValueError("it holds other items")
        return [BadSample(index, "", reason) for index, reason in metadata["bad"]]

    def _write_index(self, count_key: str) -> None:
        """Write index.jsonl, line by line, so that the memory does not grow with the number of items, then index.json.
        All shards must exist."""
        digest, shards, bad = hashlib.sha256(), list[dict[str, Any]](), list[dict[str, Any]]()

        def lines() -> Iterator[bytes]:
            for shard, items in enumerate(self._items):
                with explain_errors(self.output.path / self._file_name(shard)):
                    metadata, row = self._read_metadata(shard), 0
                reasons, entries = dict(metadata["bad"]), iter(metadata["notes"])
                for index in items:
                    name = self._names.entry(index)
                    if index in reasons:
                        bad.append({**name, "reason": reasons[index]})
                        continue
                    line = {**name, "shard": shard, "row": row, **next(entries)}
                    row += row_count(line)
                    text = (json.dumps(line) + "\n").encode()
                    digest.update(text)
                    yield text
                shards.append({"file": self._file_name(shard), "rows": row, "sha256": metadata["sha256"]})

        self.output.write(LINES_FILE, lines())
        totals = {count_key: len(self._names) - len(bad), "lines_sha256": digest.hexdigest()}
        self.output.write(INDEX_FILE, json_bytes({**self.output.settings, **totals, "shards": shards, "bad": bad}))

    def _report_bad(self, log: BadSampleLog, bad: Iterable[BadSample], stop: bool) -> None:
        """Report the items that any process could not read, each once. Collective."""
        named = [dataclasses.replace(sample, path=self._names.describe(sample.index)) for sample in bad]
        new = log.share(named, self.output.processes.gather_objects)
        with self.output.processes.raise_on_all_ranks():
            if new and stop:
                raise ValueError(f"cannot read {new[0]}; --on_bad_sample skip goes on without it")
            for sample in new:
                self.output.say(f"cannot read {sample}; it is left out")
            log.check()


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
    dtype, shape = _FORMAT_DTYPES[_dtype_name(empty)], [_count_rows(notes), *empty.shape[1:]]
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
    the checksum, and are not kept. Raises one of `_READ_ERRORS` if the shard is damaged."""
    columns = {name: Column(check_regular(path), name) for name in shapes}
    for name, shape in shapes.items():
        if not all(type(side) is int and side >= 0 for side in shape) or math.prod(shape[1:]) > _MOST_NUMBERS:
            limit = f"and a row can have {_MOST_NUMBERS} numbers at most"
            raise ValueError(f"the index claims a shape of {tuple(shape)} for it, {limit}")
        if (stored_shape := columns[name].shape) != list(shape):  # compared before a row is read
            raise ValueError(f"it holds a shape of {tuple(stored_shape)}, not {tuple(shape)}")
        if (dtype := _dtype_name(columns[name][:0])) not in dtypes:
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


def _npy_bytes(array: Array) -> bytes:
    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    return content.getvalue()


def _hash_columns(columns: Mapping[str, Tensor]) -> str:
    """SHA-256 of the numbers of all columns, in the order of the columns' names."""
    digest = hashlib.sha256()
    for name in sorted(columns):
        digest.update(numbers_of(columns[name]))
    return digest.hexdigest()


def _dtype_name(column: Tensor) -> str:
    return str(column.dtype).removeprefix("torch.")


def row_count(entry: Mapping[str, Any]) -> int:
    """The number of rows of an item, by its entry in the index."""
    return int(entry.get(COUNT, 1) * math.prod(entry.get(GRID, ())))


def _count_rows(entries: Iterable[Mapping[str, Any]]) -> int:
    return sum(row_count(entry) for entry in entries)


@contextlib.contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Turn the errors of a damaged file of a store into a ValueError of one line that names `path`."""
    try:
        yield
    except _READ_ERRORS as error:
        raise ValueError(f"cannot read {path}: {error_text(error)[:200]}; make it again") from None


def stays_inside(path: Any, parts: int | None = None) -> bool:
    """Whether a path, appended to any folder, stays below that folder; and has this number of parts, if it is given."""
    if not isinstance(path, str) or not path or "\0" in path:
        return False
    pure = PurePosixPath(path)
    has_parts = parts is None or len(pure.parts) == parts
    return has_parts and not pure.is_absolute() and bool(pure.name) and ".." not in pure.parts
