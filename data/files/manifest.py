"""A table of samples: .csv, .tsv, or a JSON object per line."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from tandem.files.reading import open_regular, parse_json

from ..bad_samples import reason_of
from .cache import Lists, Watched, kept_lists, status_of
from .packed import PackedStrings, Strings
from .source import Source

RowType = TypeVar("RowType")

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_LATEST = 1e9  # seconds; about thirty years
_LONGEST_QUOTE = 40
_LONGEST_LINE = 1 << 20  # characters
_UNNAMEABLE = {"\0", *map(chr, range(0xD800, 0xE000))}  # characters that JSON can hold and a path cannot
ENDINGS = (*_DELIMITERS, ".jsonl", ".ndjson", ".json")
OTHER_NAMES = {"file_name": "path", "start_s": "start_seconds", "end_s": "end_seconds"}


class Columns(NamedTuple):
    """What a manifest has to hold, for its messages.

    needed: groups of names, of each of which the header of a table has to hold one;
    words: those groups, as a sentence says them;
    example: a JSON object with them;
    texts: the cells of a table that may hold a comma.
    """

    needed: tuple[tuple[str, ...], ...]
    words: str
    example: str
    texts: str


class Part(NamedTuple):
    """A file, or the part of it from start_seconds to end_seconds, as a row of a manifest states it."""

    path: str
    start_seconds: float
    end_seconds: float

    def row(self, **more: Any) -> str:
        """A row of the list of a manifest, which `part_of` reads again; `more` are its other cells."""
        begin = {"start_seconds": self.start_seconds} if self.start_seconds else {}
        end = {"end_seconds": self.end_seconds} if math.isfinite(self.end_seconds) else {}
        return json.dumps({"path": self.path, **begin, **end, **more}, ensure_ascii=False)


class Parts:
    """The files of a manifest, or parts of them, numbered in the order of its rows, `read_rows`. `noun` is what
    messages call a file."""

    def __init__(self, manifest: str, rows: Strings, noun: str) -> None:
        self._folder, self._rows, self._noun = os.path.dirname(manifest), rows, noun
        self.fingerprint = rows.fingerprint

    def __len__(self) -> int:
        return len(self._rows)

    def source(self, index: int) -> Source:
        part = self._part(index)
        return Source(self._path(part), start_seconds=part.start_seconds, end_seconds=part.end_seconds)

    def describe(self, index: int) -> str:
        """The path of a file, which a manifest states relative to its own folder."""
        return self._path(self._part(index))

    def name(self, index: int) -> str:
        """The path as the manifest states it."""
        return self._part(index).path

    def row(self, index: int) -> Mapping[str, Any]:
        """The cells of a row by name."""
        row = parse_json(self._rows[index].encode())
        if not isinstance(row, Mapping):  # somebody else may have kept the list
            raise ValueError("the list that is kept of the rows of the manifest is not true: delete it")
        return row

    def _part(self, index: int) -> Part:
        return part_of(self.row(index), self._noun)

    def _path(self, part: Part) -> str:
        return os.path.join(self._folder, os.path.expanduser(part.path))


def read_rows(path: str, columns: Columns, parse: Callable[[Mapping[str, Any]], Part | str]) -> Strings:
    """Rows of a manifest, each as JSON, as `parse` makes it, or the part that `parse` makes of the row's cells by name.
    The rows of a long manifest are kept for later starts (`cache.kept_lists`).

    Raises ValueError, with path and line, if one is wrong, as `parse` does, or if there is none.
    """

    def make() -> Lists:
        watched, rows = Watched(), PackedStrings()
        watched.add("", status_of(path))  # before it is read, so that no change after it is missed
        for parsed in _read(path, columns, parse):
            rows.append(parsed.row() if isinstance(parsed, Part) else parsed)
        if not len(rows):
            raise ValueError(f"the manifest {path!r} has no rows")
        return Lists({"rows": rows}, watched)

    return kept_lists(path, columns.words, ("rows",), make)["rows"]


def _read(path: str, columns: Columns, parse: Callable[[Mapping[str, Any]], RowType]) -> Iterator[RowType]:
    line = 0
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as file:
            delimiter = _DELIMITERS.get(os.path.splitext(path)[1].lower())
            rows = _json_lines(file, columns) if delimiter is None else _table(file, delimiter, columns)
            for number, entry in rows:
                line = number
                yield parse(entry)
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


def _lines(file: io.TextIOBase) -> Iterator[str]:
    """The lines of a file. Raises `_BadLine` at one that is too long for a row: a file can be one line, without end."""
    for number in itertools.count(1):
        line = file.readline(_LONGEST_LINE + 1)
        if len(line) > _LONGEST_LINE:
            raise _BadLine(number, f"it is longer than {_LONGEST_LINE} characters")
        if not line:
            return
        yield line


def _json_lines(file: io.TextIOBase, columns: Columns) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(_lines(file), 1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line.encode())
        except ValueError as error:
            raise _BadLine(number, f"it is no JSON object: {error}; write one object per line") from None
        if not isinstance(entry, Mapping):
            raise _BadLine(number, f"it is no JSON object: write {columns.example}, one per line")
        yield number, entry


def _table(file: io.TextIOBase, delimiter: str, columns: Columns) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.reader(_lines(file), delimiter=delimiter)
    try:
        header = [name.strip() for name in next(reader, [])]
        if not all({*names} & {*header} for names in columns.needed):
            found = ", ".join(header) or "nothing"
            raise _BadLine(1, f"the columns have to be {columns.words}, it has {found}")
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) > len(header):
                quoted = f'{columns.texts} with a comma stand in "double quotes"'
                hint = quoted if delimiter == "," else "no text holds a tab"
                raise _BadLine(reader.line_num, f"{len(cells)} cells under {len(header)} columns: {hint}")
            yield reader.line_num, dict(zip(header, cells, strict=False))
    except csv.Error as error:
        raise _BadLine(reader.line_num, f"it is no table: {error}") from None


def part_of(entry: Mapping[str, Any], noun: str) -> Part:
    """The `path`, `start_seconds` and `end_seconds` (both optional) of a row, or what public tables have for them, in
    `OTHER_NAMES`; `noun` is what messages call the file.

    Raises ValueError, in one line, if one of them cannot be.
    """
    entry = {**{name: entry[other] for other, name in OTHER_NAMES.items() if other in entry}, **entry}
    path = entry.get("path")
    if not isinstance(path, str) or not path.strip() or not _UNNAMEABLE.isdisjoint(path):
        raise ValueError(f'it has no "path" of a {noun}')
    start, end = _seconds(entry, "start_seconds", 0.0), _seconds(entry, "end_seconds", math.inf)
    if end <= start:
        raise ValueError(f"it ends at {end:g} s, not after its start at {start:g} s")
    return Part(path.strip(), start, end)


def _seconds(entry: Mapping[str, Any], key: str, missing: float) -> float:
    value = entry.get(key)
    if value is None or value == "":
        return missing
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds <= _LATEST:
        text = repr(value) if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
        raise ValueError(f"its {key} is {text[:_LONGEST_QUOTE]}, which is no time in seconds")
    return seconds
