"""Manifests of samples: .csv, .tsv, or a JSON object per line."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.io.reading import LONGEST_BEGINNING, counted, error_text, parse_json, wrong_kind_text

from . import remote
from .files import is_url, redact
from .index import Dependencies, IndexData, PackedStrings, cached_index, fingerprint_of, status_of
from .record import FieldSpec, FileRef, open_range
from .rows import TIMES, Rows, path_of, seconds_of, unread_line

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
ENDINGS = (*_DELIMITERS, ".jsonl", ".ndjson", ".json")
_PATH_COLUMNS = {"path", "file_name", "filename"}
_LONGEST_LINE = 1 << 20  # characters
_BUFFER_BYTES = 1 << 16
_MOST_COLUMNS = 100  # whose names are recorded: each object may have others
_IN_QUOTES = re.compile(r'"(?:[^"]|"")*"')
_QUOTING = "a cell that begins with a quotation mark ends with one, and those inside are doubled"


class ManifestSource(Rows):
    """The rows of a manifest, numbered in their order. See `RecordSource` for the methods.

    Columns, or keys of the objects:

    - path, file_name or filename: of the file, relative to the manifest or to `folder`;
    - start_seconds, end_seconds, or start_s, end_s (optional): the part of a long file that is the sample;
    - the columns of the other specs: cells (`as_cells`), a path relative to the manifest, or a list of numbers.

    The manifest is read once; the rows of a long one are cached for later starts. Whether a file exists is not checked
    before it is read. Raises ValueError, in one line, if the manifest cannot be parsed or has no rows.
    """

    shards: Sequence[range] | None = None

    def __init__(self, path: str, specs: Sequence[FieldSpec], folder: str | None = None) -> None:
        columns = {spec: spec.columns if number else ("path",) for number, spec in enumerate(specs)}
        keys = list(dict.fromkeys(itertools.chain(*columns.values())))

        def build() -> IndexData:
            dependencies, rows, filled, names = Dependencies(), PackedStrings(), set[str](), dict[str, None]()
            if not is_url(path):
                dependencies.add("", status_of(path))  # before it is read, so that no later change is missed
            for row, row_columns in _read_rows(path, specs, keys, names):
                rows.append(row)
                filled.update(row_columns)
            if not len(rows):
                raise ValueError(f"the manifest {path!r} has no rows")
            facts = {"filled": sorted(filled), "names": [*names]}
            return IndexData({"rows": rows}, fingerprint_of(rows.buffers), facts, dependencies)

        depends = _read_version(path) if is_url(path) else ""
        index = cached_index(path, json.dumps(["manifest", specs[0].noun, *keys]), build, depends=depends)
        self._rows, self.fingerprint = index.strings("rows"), index.fingerprint
        filled, names = (index.facts.get(name) for name in ("filled", "names"))
        if not (isinstance(filled, list) and isinstance(names, list)):
            raise index.damaged_error()
        self._damaged_error = index.damaged_error
        self.skipped = unread_line(redact(path), map(str, names), {*_PATH_COLUMNS, *TIMES, *keys})
        filled_columns = {spec: [name for name in columns[spec] if name in filled] for spec in columns}
        super().__init__(filled_columns, os.path.expanduser(folder) if folder else os.path.dirname(path))
        self._path = path

    def __len__(self) -> int:
        return len(self._rows)

    def cells(self, index: int) -> Mapping[str, Any]:
        row = parse_json(self._rows[index].encode())
        if not isinstance(row, Mapping):  # another user may have written the index
            raise self._damaged_error()
        return row

    def describe(self, index: int) -> str:
        """The path of the file; for a row without one, the manifest and the number of the row."""
        try:
            return redact(self.resolve_path(self._path_in_row(index)))
        except (OSError, ValueError):
            return f"{redact(self._path)}[{index}]"

    def name(self, index: int) -> str:
        """The path as in the manifest; an address without passwords, because stores save the name."""
        return redact(self._path_in_row(index))

    def part(self, index: int) -> dict[str, float]:
        """The start_seconds and end_seconds of a row that are not those of the whole file."""
        cells = self.cells(index)
        return {name: cells[name] for name in ("start_seconds", "end_seconds") if name in cells}

    def _path_in_row(self, index: int) -> str:
        return path_of(self.cells(index), next(iter(self.columns)).noun)


def _read_version(address: str) -> str:
    try:
        return remote.version(address)
    except OSError as error:
        raise ValueError(f"cannot read the manifest {redact(address)!r}: {error_text(error)}") from None


def _read_rows(
    path: str, specs: Sequence[FieldSpec], keys: Sequence[str], names: dict[str, None]
) -> Iterator[tuple[str, Sequence[str]]]:
    """For each row, a JSON object of its path, its times, and its cells in the columns `keys`; and the names of the
    columns that are not empty. Adds the first `_MOST_COLUMNS` names of columns to `names`. Raises ValueError with path
    and line."""
    example = json.dumps({"path": "...", **{spec.columns[0]: "..." for spec in specs if spec.as_cells}})
    array_columns = {column for spec in specs[1:] if not spec.as_cells for column in spec.columns}
    lines: _Lines | None = None
    try:
        with open_range(FileRef(path)) as raw:
            if other := wrong_kind_text(raw.pread(LONGEST_BEGINNING, 0)):
                raise ValueError(other)
            file = io.TextIOWrapper(io.BufferedReader(raw, _BUFFER_BYTES), encoding="utf-8-sig", newline="")
            lines, delimiter = _Lines(file), _DELIMITERS.get(os.path.splitext(path)[1].lower())
            endings = specs[0].all_endings
            for cells in _read_objects(lines, example) if delimiter is None else _read_table(lines, delimiter, endings):
                if len(names) < _MOST_COLUMNS:
                    names |= dict.fromkeys(itertools.islice(cells, _MOST_COLUMNS))
                cells = {"path": cells.get("file_name") or cells.get("filename"), **cells}
                start, end = seconds_of(cells)
                row = {name: cells[name] for name in keys if cells.get(name) not in (None, "")}
                for name in array_columns & row.keys():
                    if isinstance(row[name], str) and row[name].startswith("["):  # a list in the cell of a table
                        row[name] = parse_json(row[name].encode())
                row |= {"path": path_of(cells, specs[0].noun), **({"start_seconds": start} if start else {})}
                row |= {"end_seconds": end} if math.isfinite(end) else {}
                yield json.dumps(row), [*row]
    except OSError as error:
        raise ValueError(f"cannot read the manifest {path!r}: {error_text(error)}") from None
    except UnicodeDecodeError as error:
        # Text is decoded in blocks; the one that failed begins after the lines that were read.
        number = (lines.number if lines else 0) + len((error.object[: error.start] + b".").splitlines())
        raise ValueError(f"{path}, line {number}: it is no UTF-8 text ({error.reason}): save it as UTF-8") from None
    except (ValueError, csv.Error) as error:
        if lines is None:  # such as a pipe
            raise ValueError(f"cannot read the manifest {path!r}: {error}") from None
        reason = f"it is no table ({error}): {_QUOTING}" if isinstance(error, csv.Error) else error
        raise ValueError(f"{path}, {lines.row_lines}: {reason}") from None


class _Lines:
    """The lines of a file; `number` is that of the last line read, and `row` the lines of the current row. Raises
    ValueError at a line that is too long, because a file may be a single line."""

    def __init__(self, file: io.TextIOBase) -> None:
        self._file, self.number, self.row = file, 0, list[str]()

    @property
    def row_lines(self) -> str:
        first = self.number - max(len(self.row), 1) + 1
        return f"line {first}" if first == self.number else f"lines {first} to {self.number}"

    def __iter__(self) -> Iterator[str]:
        while line := self._file.readline(_LONGEST_LINE + 1):
            self.number += 1
            self.row.append(line)
            if len(line) > _LONGEST_LINE:
                raise ValueError(f"it is longer than {_LONGEST_LINE} characters")
            yield line


def _read_objects(lines: _Lines, example: str) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        if line.strip():
            try:
                row = parse_json(line.encode())
            except ValueError as error:
                raise ValueError(f"it is no JSON object: {error}; write one object per line") from None
            if not isinstance(row, Mapping):
                raise ValueError(f"it is no JSON object: write {example}, one per line")
            yield row
        lines.row.clear()


def _read_table(lines: _Lines, delimiter: str, endings: tuple[str, ...]) -> Iterator[Mapping[str, Any]]:
    """The rows of a .csv, whose quoted cells may contain line breaks; or of a .tsv, in which each line is a row.

    Raises ValueError, in one line, if the file is no such table. An unclosed quotation mark makes one row of several
    lines. It is noticed if one of the later lines looks like a row, with a cell that ends in one of `endings`."""
    csv.field_size_limit(_LONGEST_LINE)  # a list of numbers in a cell is long
    rows = csv.reader(lines, strict=True) if delimiter == "," else map(_cells_of_tsv, lines)
    header = [name.strip() for name in next(rows, [])]
    lines.row.clear()
    if not _PATH_COLUMNS & {*header}:
        raise ValueError(f"it has no column path (or file_name, filename), it has {', '.join(header) or 'nothing'}")
    is_open = False  # whether a cell of the last line begins with an unclosed quotation mark
    for cells in rows:
        for line in lines.row[1:]:
            if any(cell.strip(' "\r\n').lower().endswith(endings) for cell in line.split(delimiter)):
                raise ValueError(f"a quotation mark that is not closed makes one row of these lines: {_QUOTING}")
        was_open, is_open = is_open, delimiter == "\t" and any(map(_is_open, lines.row[0].split("\t")))
        if (was_open or is_open) and len(cells) < len(header):
            raise ValueError("a cell in quotes goes on over several lines, and in a .tsv each is a row: write .csv")
        if len(cells) > len(header):
            hint = 'put a cell with a comma into "double quotes"' if delimiter == "," else "no cell may contain a tab"
            named = counted(len(header), "column")
            raise ValueError(f"it has {len(cells)} cells, but the first line names {named}: {hint}")
        if any(cell.strip() for cell in cells):
            yield dict(zip(header, cells, strict=False))
        lines.row.clear()


def _cells_of_tsv(line: str) -> list[str]:
    """The cells of a line, without quotes around a whole cell: some programs quote cells of a .tsv; for others, a
    quotation mark in a caption is an ordinary character."""
    cells = line.rstrip("\r\n").split("\t")
    return [cell[1:-1].replace('""', '"') if _IN_QUOTES.fullmatch(cell) else cell for cell in cells]


def _is_open(cell: str) -> bool:
    return cell.startswith('"') and not _IN_QUOTES.fullmatch(cell.rstrip("\r\n"))
