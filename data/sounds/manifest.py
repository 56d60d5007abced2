"""A table of sounds and their captions: .csv, .tsv, or a JSON object per line."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..bad_samples import reason_of
from ..packed import PackedStrings
from .decoding import ClipDecoder, Source
from .sidecars import NO_CAPTION, Texts, texts_of_object

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_UNNAMEABLE = {"\0", *map(chr, range(0xD800, 0xE000))}  # characters that JSON can hold and a path cannot
ENDINGS = (*_DELIMITERS, ".jsonl", ".ndjson", ".json")


class Row(NamedTuple):
    """A sound as a manifest describes it; the part of the file from start_seconds to end_seconds."""

    path: str
    texts: Texts
    start_seconds: float
    end_seconds: float


class Manifest:
    """The rows of a manifest, numbered in their order. See `Sounds` for the methods.

    Columns, or keys of the objects:

    - path: of the sound, relative to the manifest;
    - caption, or captions: a JSON list, or texts with | between them;
    - label (optional): a class;
    - start_seconds, end_seconds (optional): the part of a long file that the captions describe.

    The table is read once; a sound is not looked for before it is loaded. Raises ValueError, in one line, if the
    manifest cannot be understood or has no rows.
    """

    def __init__(self, path: str, clips: ClipDecoder) -> None:
        self._folder, self._clips = os.path.dirname(path), clips
        self._paths, self._captions, self._labels = PackedStrings(), PackedStrings(), PackedStrings()
        self._starts, self._ends = array("d"), array("d")
        for row in read_manifest(path):
            self._paths.append(row.path)
            self._captions.append("\n".join(row.texts.captions))
            self._labels.append(row.texts.label or "")
            self._starts.append(row.start_seconds)
            self._ends.append(row.end_seconds)
        if not len(self):
            raise ValueError(f"the manifest {path!r} has no rows")
        if not any(self._captions):
            raise ValueError(f"none of the {len(self)} rows of the manifest {path!r} has a caption")

    def __len__(self) -> int:
        return len(self._paths)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        source = Source(self.describe(index), start_seconds=self._starts[index], end_seconds=self._ends[index])
        return self._clips.load(source, index, epoch, augment)

    def texts(self, index: int) -> Texts:
        if not self._captions[index]:
            raise ValueError(NO_CAPTION)
        return Texts(self._captions[index].split("\n"), self._labels[index] or None)

    def describe(self, index: int) -> str:
        return os.path.join(self._folder, os.path.expanduser(self._paths[index]))


def read_manifest(path: str) -> Iterator[Row]:
    """Rows of a manifest, one by one. Raises ValueError, with path and line, if one is wrong."""
    line = 0
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            delimiter = _DELIMITERS.get(os.path.splitext(path)[1].lower())
            for number, entry in _json_lines(file) if delimiter is None else _table(file, delimiter):
                line = number
                yield _row(entry)
    except OSError as error:
        raise ValueError(f"cannot read the manifest {path!r}: {reason_of(error)}") from None
    except _BadLine as error:
        raise ValueError(f"{path}, line {error.line}: {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, after line {line}: it is no UTF-8 text ({error.reason}): save it as UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{path}, line {line}: {error}") from None


class _BadLine(Exception):
    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


def _json_lines(file: io.TextIOBase) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _BadLine(number, f"it is no JSON object: {error}; write one object per line") from None
        if not isinstance(entry, Mapping):
            raise _BadLine(number, 'it is no JSON object: write {"path": "...", "caption": "..."}, one per line')
        yield number, entry


def _table(file: io.TextIOBase, delimiter: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.reader(file, delimiter=delimiter)
    try:
        header = [name.strip() for name in next(reader, [])]
        if "path" not in header or not {"caption", "captions"} & {*header}:
            found = ", ".join(header) or "nothing"
            raise _BadLine(1, f"the columns have to be path and caption (or captions), it has {found}")
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) > len(header):
                hint = 'captions with a comma stand in "double quotes"' if delimiter == "," else "no text holds a tab"
                raise _BadLine(reader.line_num, f"{len(cells)} cells under {len(header)} columns: {hint}")
            yield reader.line_num, dict(zip(header, cells, strict=False))
    except csv.Error as error:
        raise _BadLine(reader.line_num, f"it is no table: {error}") from None


def _row(entry: Mapping[str, Any]) -> Row:
    path = entry.get("path")
    if not isinstance(path, str) or not path.strip() or not _UNNAMEABLE.isdisjoint(path):
        raise ValueError('it has no "path" of a sound')
    texts = texts_of_object({key: value for key, value in entry.items() if key != "text"})
    start, end = _seconds(entry, "start_seconds", 0.0), _seconds(entry, "end_seconds", math.inf)
    if end <= start:
        raise ValueError(f"it ends at {end:g} s, not after its start at {start:g} s")
    return Row(path.strip(), texts, start, end)


def _seconds(entry: Mapping[str, Any], key: str, missing: float) -> float:
    value = entry.get(key)
    if value is None or value == "":
        return missing
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"its {key} is {value!r}, which is no time in seconds")
    return seconds
