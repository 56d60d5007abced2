"""The base of tables and manifests: the cells of a row become a record."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tandem.io.reading import printable

from .files import is_url, match_unicode_form
from .record import MOST_EXAMPLES, FieldSpec, FileRef, Record, RecordSource

TIMES = ("start_s", "end_s", "start_seconds", "end_seconds")
_LATEST = 1e9  # seconds; about thirty years
_LONGEST_QUOTE = 40
_MAX_LISTED_COLUMNS = 8
_IMPOSSIBLE_CHARACTERS = {"\0", *map(chr, range(0xD800, 0xE000))}  # characters that JSON can hold and a path cannot


class Rows:
    """Numbered rows of cells. A subclass defines `cells`, `describe` and `__len__`.

    Args:
        columns: The columns of each `FieldSpec`, in order of preference.
        folder: The folder of relative paths in cells.

    classes: by column, the names of its classes, in order, where a table states them.
    """

    classes: Mapping[str, Sequence[str]] = {}

    def __init__(self, columns: Mapping[FieldSpec, Sequence[str]], folder: str) -> None:
        self.columns, self._folder = columns, folder

    def __len__(self) -> int:
        raise NotImplementedError

    def cells(self, index: int) -> Mapping[str, Any]:
        """The cells of a row by column. The cell of a file is its content, its path, or a mapping of both, "bytes" and
        "path"; that of an embedding is a list or array of numbers. Raises ValueError, in one line, if they cannot be
        read."""
        raise NotImplementedError

    def times(self) -> Iterator[Mapping[str, Any]]:
        """For each row its cells in the columns `TIMES`, perhaps among others; a subclass may yield nothing if there is
        no such column. Raises what `cells` raises."""
        return map(self.cells, range(len(self)))

    def describe(self, index: int) -> str:
        raise NotImplementedError

    def record(self, index: int, epoch: int = 0, augment: bool = False) -> Record:
        cells, record = self.cells(index), dict[str, Any]()
        for spec, columns in self.columns.items():
            present = {column: cell for column in columns if (cell := cells.get(column)) is not None}
            value = present if spec.as_cells else self._parse_cell(spec, next(iter(present.values()), None), index)
            record.update({} if value is None or not present else {spec.name: value})
        first = next(iter(self.columns))
        if not isinstance(record.get(first.name), FileRef):
            raise ValueError(f"the row holds no {first.noun}")
        start, end = seconds_of(cells)
        return {**record, first.name: record[first.name]._replace(start_seconds=start, end_seconds=end)}

    def examples(self, name: str) -> Sequence[int]:
        """The first rows, if there is a column of this name."""
        has_column = any(spec.name == name and columns for spec, columns in self.columns.items())
        return range(min(len(self), MOST_EXAMPLES) if has_column else 0)

    def resolve_path(self, path: str) -> str:
        """The path or address of a file that a row names. Raises ValueError, in one line, if a list on a server names a
        file outside its own folder."""
        if is_url(path):
            return path
        if is_url(self._folder) and (path.startswith(("/", "~")) or ".." in path.split("/")):
            raise ValueError(
                f"it names {path[:_LONGEST_QUOTE]!r}, which is outside the folder of its list on the server"
            )
        return os.path.join(self._folder, path if is_url(self._folder) else os.path.expanduser(path))

    def _parse_cell(self, spec: FieldSpec, cell: Any, index: int) -> Any:
        """The file or the numbers of a cell; None if it is empty."""
        path = cell.get("path") if isinstance(cell, Mapping) else cell
        content = cell.get("bytes") if isinstance(cell, Mapping) else cell
        if content is None or isinstance(content, str):
            if not path:
                return None
            full_path = self.resolve_path(path_of({"path": path}, spec.noun))
            return FileRef(full_path if is_url(full_path) else match_unicode_form(full_path))
        if isinstance(content, bytes | memoryview):
            return FileRef.in_memory(content, self.describe(index), member=path if isinstance(path, str) else "")
        try:
            with np.errstate(over="ignore"):  # the field checks that they are finite
                return np.array(content, np.float32)
        except (ValueError, TypeError, OverflowError):
            raise ValueError(f"its {spec.noun} is no list of numbers, nor a list of such lists of one length") from None


def time_ranges(source: RecordSource) -> Iterator[str]:
    """A text for each record: its start and end in its file, in seconds, or its invalid cells. Nothing if all records
    are whole files."""
    whole = _describe_range({})
    if isinstance(source, Rows) and any(text != whole for text in map(_describe_range, source.times())):
        yield from map(_describe_range, source.times())


def _describe_range(cells: Mapping[str, Any]) -> str:
    try:
        start, end = seconds_of(cells)
    except ValueError:  # it is raised again when the sample is read
        return repr([cells.get(name) for name in TIMES])
    return f"{start} {end}"


def unread_line(path: str, names: Iterable[str], read: Container[str]) -> str:
    """A line about the columns of a table or manifest that are not read; "" if there are none."""
    unread = [*itertools.islice((name for name in names if name and name not in read), _MAX_LISTED_COLUMNS + 1)]
    texts = [printable(name[:_LONGEST_QUOTE]) for name in unread]
    if len(unread) > _MAX_LISTED_COLUMNS:
        texts[-1] = "..."
    return f"columns of {path!r} that are not read: {', '.join(texts)}" if texts else ""


def path_of(cells: Mapping[str, Any], noun: str) -> str:
    """The path of a row. Raises ValueError, in one line, if it has none, or one that no file can have."""
    path = cells.get("path")
    if not isinstance(path, str) or not path.strip() or not _IMPOSSIBLE_CHARACTERS.isdisjoint(path):
        raise ValueError(f'it has no "path" of its {noun}')
    return path.strip()


def seconds_of(cells: Mapping[str, Any]) -> tuple[float, float]:
    """The start and the end of a sample in its file, from the columns `TIMES`, all optional. Raises ValueError, in one
    line, if they are impossible."""
    start, end = _parse_seconds(cells, "start", 0.0), _parse_seconds(cells, "end", math.inf)
    if end <= start:
        raise ValueError(f"it ends at {end:g} s, not after its start at {start:g} s")
    return start, end


def _parse_seconds(cells: Mapping[str, Any], edge: str, default: float) -> float:
    filled = [cells[name] for name in (f"{edge}_seconds", f"{edge}_s") if cells.get(name) not in (None, "")]
    cell = filled[0] if filled else default
    try:
        seconds = math.nan if isinstance(cell, bool) else float(cell)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not (0 <= seconds <= _LATEST or cell is default):
        text = repr(cell) if isinstance(cell, (str, int, float)) else f"a {type(cell).__name__}"
        raise ValueError(f"its {edge}_seconds is {text[:_LONGEST_QUOTE]}, which is no time in seconds")
    return seconds
