"""Arrays on the disk: shards of a fixed number of items, a record beside each, and an index that is written last.

codes-00000.safetensors   the rows of the items that could be read, in order; or codes-00000.npy
codes-00000.json          rows, checksum, and unreadable items; written after the shard
index.jsonl               {"path": "cats/1.jpg", "shard": 0, "row": 0}, a line per item, in order; row: its first
index.json                settings and checksums; written last: if it exists, all other files are complete
"""

from __future__ import annotations

import contextlib
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
from safetensors import SafetensorError
from safetensors.numpy import load as safetensors_load
from safetensors.numpy import save as safetensors_save

from tandem.files.reading import DAMAGES, LONGEST_JSON_BYTES, parse_json, read_bytes, read_json

from ..bad_samples import BadSample, BadSampleLog, reason_of
from ..files.arrays import read_header
from .output import OutputFolder, json_bytes, sha256_of

INDEX_FILE, LINES_FILE = "index.json", "index.jsonl"
_DAMAGES: tuple[type[Exception], ...] = (*DAMAGES, SafetensorError)

# Of a shard: its numbers, which have at most so many bytes each; and of its file what is no number.
_MOST_NUMBERS, _LARGEST_NUMBER_BYTES, _LONGEST_HEADER = 1 << 29, 4, 1 << 16

Array = npt.NDArray[Any]
COUNT = "code_frames"  # key of the number of rows of an item that has several

# Shards -> for each shard, in order, its rows (n, ...) in parts, and the items that could not be read; and, if items
# have several rows, what their lines in the index say of each item that could be read, COUNT among it.
Compute = Callable[[Sequence[int]], Iterator[tuple[Any, ...]]]


class Filled(NamedTuple):
    """What `ShardWriter.fill` did: the number of items of this run and of unreadable items of all runs, over all
    processes; and the time in seconds."""

    items: int
    bad: int
    seconds: float


class ShardWriter:
    """Fills an output folder with shards, in any order and by any number of processes.

    Args:
        empty: An empty array (0, ...) with the dtype of the rows and, from dimension 1 on, their shape.
        sizes: Items of each shard, readable or not.
        names: Relative paths of all items, in order.
        name: Name of the array in each file, and the beginning of the file's name.
        paths_in_records: Whether records hold the paths of unreadable items beside their indices.
    """

    def __init__(
        self,
        output: OutputFolder,
        empty: Array,
        sizes: Sequence[int],
        names: Sequence[str],
        *,
        name: str,
        ending: str = "safetensors",
        paths_in_records: bool = True,
    ) -> None:
        self.output, self._empty, self._names, self._name, self._ending = output, empty, names, name, ending
        self._paths_in_records = paths_in_records
        # Indices of each shard's items.
        self.items = [range(last - size, last) for size, last in zip(sizes, itertools.accumulate(sizes), strict=True)]

    def __len__(self) -> int:
        return len(self.items)

    def fill(
        self, compute: Compute, write_index: Callable[[], None], done: str, *, stop_at_bad: bool = False
    ) -> Filled:
        """Compute and write all shards that are missing or damaged, then the index. Collective.

        `compute` gets the shards of this process; `write_index` is called on one process, once all shards exist;
        `done` says in messages what has been done to a shard, such as "encoded". Raises UserMistake, in one line, if
        the disk is full, or too many items cannot be read (with `stop_at_bad`: if any item cannot be read); AskedToStop
        after a signal.
        """
        started = time.perf_counter()
        processes = self.output.processes
        unfinished: list[int] = []
        with processes.agreement():
            if processes.rank == 0:  # this reads all existing files
                for k in range(len(self)):
                    processes.working("checking the shards")
                    unfinished += [] if self._is_finished(k) else [k]
        todo = processes.broadcast_object(unfinished)
        if not todo:
            self.output.say(f"all {len(self)} shards were {done} before, nothing is left to do: {self.output.path}")
        log = BadSampleLog(sum(map(len, self.items)))
        self._report(log, [bad for k in range(len(self)) if k not in todo for bad in self._bad(k)], stop_at_bad)
        results = iter(compute(todo[processes.rank :: processes.world_size]))
        for shard in self.output.rounds(todo, done):
            bad: list[BadSample] = []
            with processes.agreement():
                if shard is not None:
                    parts, bad, *about = next(results)
                    self._write(shard, parts, bad, *about)
            self._report(log, bad, stop_at_bad)
        seconds = time.perf_counter() - started
        with processes.agreement():
            if processes.rank == 0:
                write_index()
        return Filled(sum(len(self.items[k]) for k in todo), log.count, seconds)

    def lines(self, notes: Callable[[int], Mapping[str, Any]] = lambda index: {}) -> list[dict[str, Any]]:
        """Path, shard and first row of each item, and what else is known of it, in order; `notes` adds to the line of
        an item by its index. All shards must exist."""
        lines = []
        for shard in range(len(self)):
            left_out = {sample.index for sample in self._bad(shard)}
            items = [index for index in self.items[shard] if index not in left_out]
            about = self._record(shard).get("items") or [{}] * len(items)
            firsts = itertools.accumulate((each.get(COUNT, 1) for each in about), initial=0)
            for index, first, each in zip(items, firsts, about, strict=False):
                lines.append({"path": self._names[index], "shard": shard, "row": first, **each, **notes(index)})
        return lines

    def bad(self) -> list[dict[str, str]]:
        """Path and reason of each item that could not be read. All shards must exist."""
        return [{"path": bad.path, "reason": bad.reason} for k in range(len(self)) for bad in self._bad(k)]

    def entries(self) -> list[dict[str, Any]]:
        """File, rows and checksum of each shard, for the index. All shards must exist."""
        records = [(k, self._record(k)) for k in range(len(self))]
        return [{"file": self._file(k), "rows": r["rows"], "sha256": r["sha256"]} for k, r in records]

    def write_lines(self, file: str, objects: Iterable[Any]) -> str:
        """Write a JSON object per line; returns the file's SHA-256."""
        text = "".join(json.dumps(line) + "\n" for line in objects).encode()
        self.output.write(file, text)
        return hashlib.sha256(text).hexdigest()

    def write_index(self, index: Mapping[str, Any]) -> None:
        """Write index.json: the settings of the folder, then `index`."""
        self.output.write(INDEX_FILE, json_bytes({**self.output.settings, **index}))

    def _write(
        self,
        shard: int,
        parts: Sequence[npt.ArrayLike],
        bad: Sequence[BadSample],
        about: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        arrays = [np.asarray(part) for part in (self._empty, *parts)]
        rows = np.concatenate(arrays, dtype=self._empty.dtype, casting="unsafe")
        n_items = len(rows) if about is None else len(about)
        n_rows = len(rows) if about is None else sum(each[COUNT] for each in about)
        assert (n_items + len(bad), n_rows) == (len(self.items[shard]), len(rows)), (n_items, len(bad), n_rows, shard)
        content = _to_bytes(rows, self._name, self._ending)
        self.output.write(self._file(shard), content)
        unreadable = [[b.index, *([self._names[b.index]] if self._paths_in_records else []), b.reason] for b in bad]
        record = {"rows": len(rows), "sha256": hashlib.sha256(content).hexdigest(), "bad": unreadable}
        self.output.write(
            self._file(shard, "json"), json_bytes(record if about is None else {**record, "items": about})
        )

    def _is_finished(self, shard: int) -> bool:
        """Whether the shard has a record, and its file has the checksum of the record."""
        try:
            record = self._record(shard)
            n_items = len(record["items"]) if "items" in record else record["rows"]
            is_whole = n_items + len(record["bad"]) == len(self.items[shard])
            file, n_numbers = self.output.path / self._file(shard), record["rows"] * math.prod(self._empty.shape[1:])
            # Without this, a file that claims terabytes would be read for hours.
            n_others = file.stat().st_size - n_numbers * self._empty.itemsize
            fits = n_numbers <= _MOST_NUMBERS and 0 <= n_others <= _LONGEST_HEADER
            return is_whole and fits and record["sha256"] == sha256_of([file])
        except _DAMAGES:
            return False

    def _bad(self, shard: int) -> list[BadSample]:
        """The items of an existing shard that could not be read, by relative path."""
        return [BadSample(index, self._names[index], reason) for index, *_, reason in self._record(shard)["bad"]]

    def _record(self, shard: int) -> Any:
        return read_json(self.output.path / self._file(shard, "json"))

    def _file(self, shard: int, ending: str = "") -> str:
        return f"{self._name}-{shard:05d}.{ending or self._ending}"

    def _report(self, log: BadSampleLog, bad: Iterable[BadSample], stop: bool) -> None:
        """Say which items any process could not read, each once. Collective."""
        processes = self.output.processes
        new = log.share(bad, processes.gather_objects)
        with processes.agreement():
            if new and stop:
                raise ValueError(f"cannot read {new[0]}; --on_bad_sample skip goes on without it")
        for sample in new:
            text = f"cannot read {sample}; it is left out"
            self.output.say(text.encode(errors="backslashreplace").decode())  # a name may hold bytes that are not UTF-8
        with processes.agreement():
            log.check()


def shard_sizes(n_items: int, items_per_shard: int) -> list[int]:
    """Items of each shard, of which the last may be smaller."""
    return [min(items_per_shard, n_items - first) for first in range(0, n_items, items_per_shard)]


def read_shard(folder: Path, entry: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Array:
    """The rows of a shard, by its entry in an index, which claims this shape of them. Raises one of many errors if it
    is damaged: see `explained`."""
    if not all(type(side) is int and side >= 0 for side in shape) or math.prod(shape) > _MOST_NUMBERS:
        raise ValueError(f"the index claims a shape of {shape} for it, and it can have {_MOST_NUMBERS} numbers at most")
    content = read_bytes(folder / entry["file"], _LONGEST_HEADER + math.prod(shape) * _LARGEST_NUMBER_BYTES)
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise ValueError("its checksum is not that of the index")
    if not entry["file"].endswith(".npy"):
        return safetensors_load(content)[name]
    header = io.BytesIO(content)
    found, is_fortran, dtype = read_header(header)
    if found != shape or is_fortran or dtype.hasobject:  # a header may claim any size
        raise ValueError(f"it holds {dtype} {found}, not {shape}")
    return np.frombuffer(content, dtype, math.prod(shape), header.tell()).reshape(shape)


def read_index(folder: Path, name: str) -> tuple[dict[str, Any], str]:
    """index.json of a folder of shards, and its SHA-256. Raises ValueError, in one line, if it is missing or
    damaged, or names files outside the folder."""
    path = folder / INDEX_FILE
    if not path.exists():
        what = f"it holds no index of {name}"
        if not folder.is_dir():
            what = "there is no such folder"
        elif any(folder.glob(f"{name}-*")):
            what = "the command that fills it did not finish: start it again"
        raise ValueError(f"there is no {INDEX_FILE} in {str(folder)!r}: {what}")
    with explained(path):
        content = read_bytes(path, LONGEST_JSON_BYTES)
        index = parse_json(content)
        for entry in index["shards"]:
            if not stays_inside(entry["file"], parts=1):
                raise ValueError(f"it names {str(entry['file'])!r}, which is no file in the folder")
        return index, hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file of a store raises into a ValueError of one line that names `path`."""
    try:
        yield
    except _DAMAGES as error:
        reason = " ".join(reason_of(error).split())[:200] or type(error).__name__
        raise ValueError(f"cannot read {path}: {reason}; make it again") from None


def stays_inside(path: Any, parts: int | None = None) -> bool:
    """Whether a path, appended to any folder, stays below that folder; and has this number of parts, if it is given."""
    if not isinstance(path, str) or not path or "\0" in path:
        return False
    pure = PurePosixPath(path)
    fits = parts is None or len(pure.parts) == parts
    return fits and not pure.is_absolute() and bool(pure.name) and ".." not in pure.parts


def _to_bytes(rows: Array, name: str, ending: str) -> bytes:
    if ending == "safetensors":
        return safetensors_save({name: rows})
    content = io.BytesIO()
    np.save(content, rows, allow_pickle=False)
    return content.getvalue()
