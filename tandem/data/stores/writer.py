"""Fills an output folder with shards of stored arrays, by any number of processes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from tandem.data.bad_samples import BadSample, BadSampleLog
from tandem.io.reading import check_regular, parse_json

from .names import SampleNames
from .output import OutputFolder, json_bytes
from .shards import (
    INDEX_FILE,
    LINES_FILE,
    SHARD_ERRORS,
    Array,
    count_rows,
    dtype_name,
    explain_errors,
    open_columns,
    row_count,
    shard_bytes,
)


class EncodedShard(NamedTuple):
    """The items of a shard.

    Args:
        parts: Arrays (n, ...) whose concatenation is the rows of the items that could be read, in order.
        entries: The index entry of each item that could be read, which may have COUNT and GRID, see `row_count`.
        bad: By index, why the other items could not be read.
    """

    parts: Sequence[Any]
    entries: list[dict[str, Any]]
    bad: dict[int, str]


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
        start_time, processes, log = time.perf_counter(), self.output.processes, BadSampleLog(len(self._names))
        missing, still_bad = self._find_missing(compute)
        if not missing:
            self.output.say(f"all shards ({len(self)}) were {verb} before, nothing is left to do: {self.output.path}")
        self._report_bad(log, still_bad, stop_at_bad)
        with processes.raise_on_all_ranks():
            if missing and processes.rank == 0:  # it may describe shards that are about to be replaced
                (self.output.path / INDEX_FILE).unlink(missing_ok=True)
        results = compute([self._items[k] for k in missing[processes.rank :: processes.world_size]])
        for shard in self.output.rounds(missing, verb):
            bad = dict[int, str]()
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

    def arrays(self, shard: int, columns: Mapping[str, Tensor]) -> Iterator[tuple[str, Array]]:
        """The .npy files of a shard, by name."""
        yield f"{self._name}-{shard:05d}.npy", columns[self._name].numpy()

    def _file_name(self, shard: int) -> str:
        return f"{self._name}-{shard:05d}.safetensors"

    def _write(self, shard: int, encoded: EncodedShard) -> None:
        rows = torch.cat([torch.as_tensor(part).to(self._empty.dtype) for part in (self._empty, *encoded.parts)])
        entries, bad = encoded.entries, encoded.bad
        assert (len(entries) + len(bad), count_rows(entries)) == (len(self._items[shard]), len(rows)), (shard, encoded)
        columns = self.columns(rows, entries, sorted({*self._items[shard]} - bad.keys()))
        if self._with_npy:  # .npy files come before the shard, whose existence means that all are complete
            self.output.write_many((name, _npy_bytes(array)) for name, array in self.arrays(shard, columns))
        self.output.write(self._file_name(shard), shard_bytes(columns, **self._metadata(entries, bad)))

    def _metadata(self, entries: Sequence[Any], bad: Mapping[int, str]) -> dict[str, Any]:
        """The metadata of a file beside its checksum; of latents, also how they are normalised."""
        stated = {name: value for name, value in self.output.settings.items() if name == "normalize"}
        return {"notes": entries, "bad": sorted(bad.items()), **stated}

    def _read_metadata(self, shard: int) -> Any:
        with safe_open(check_regular(self.output.path / self._file_name(shard)), "np") as file:
            return parse_json(file.metadata()["about"].encode())

    def _find_missing(self, compute: Encode) -> tuple[list[int], dict[int, str]]:
        """The shards to compute, which are missing or damaged, or have items that could not be read and can be read by
        now, or fail for another reason; and by index, why the items of existing shards cannot be read now. Collective.
        """
        processes, bad_by_shard, still_bad = self.output.processes, dict[int, dict[int, str]](), dict[int, str]()
        with processes.raise_on_all_ranks():
            for k in range(len(self)) if processes.rank == 0 else ():  # this reads all existing shards
                processes.heartbeat("checking the shards", is_uninterrupted=True)
                with contextlib.suppress(*SHARD_ERRORS):
                    bad_by_shard[k] = self._check_shard(k)
        indices = processes.broadcast_object(sorted(itertools.chain(*bad_by_shard.values())))
        indices_of_rank = indices[processes.rank :: processes.world_size]
        with processes.raise_on_all_ranks():
            for encoded in compute([range(index, index + 1) for index in indices_of_rank]) if indices_of_rank else ():
                processes.heartbeat("trying what could not be read")
                still_bad |= self._reasons(encoded)
        still_bad = dict(sorted(itertools.chain(*processes.gather_objects([*still_bad.items()]))))
        is_done = {k for k, bad in bad_by_shard.items() if bad.items() <= still_bad.items()}
        return processes.broadcast_object([k for k in range(len(self)) if k not in is_done]), still_bad

    def _reasons(self, encoded: Any) -> dict[int, str]:
        """By index, why items of an encoded shard, which is not written, could not be read."""
        bad: dict[int, str] = encoded.bad
        return bad

    def _check_shard(self, shard: int) -> dict[int, str]:
        """By index, why items of a shard could not be read. Raises one of `SHARD_ERRORS` if there is no such shard, or
        it does not agree with its metadata."""
        metadata = self._read_metadata(shard)
        count, empty = count_rows(metadata["notes"]), self.columns(self._empty, [], [])
        shapes = {name: (count, *column.shape[1:]) for name, column in empty.items()}
        dtypes = [dtype_name(column) for column in empty.values()]
        open_columns(self.output.path / self._file_name(shard), shapes, dtypes, metadata["sha256"])
        items, bad = {*self._items[shard]}, dict[int, str](metadata["bad"])
        if len(metadata["notes"]) + len(bad) != len(items) or not bad.keys() <= items:
            raise ValueError("it holds other items")
        return bad

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

    def _report_bad(self, log: BadSampleLog, bad: Mapping[int, str], stop: bool) -> None:
        """Report the items that any process could not read, each once. Collective."""
        named = [BadSample(index, self._names.describe(index), reason) for index, reason in bad.items()]
        new = log.share(named, self.output.processes.gather_objects)
        with self.output.processes.raise_on_all_ranks():
            if new and stop:
                raise ValueError(f"cannot read {new[0]}; --on_bad_sample skip goes on without it")
            for sample in new:
                self.output.say(f"cannot read {sample}; it is left out")
            log.check()


def _npy_bytes(array: Array) -> bytes:
    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    return content.getvalue()
