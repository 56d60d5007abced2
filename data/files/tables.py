"""Tables of samples: the rows of Arrow and parquet files, read in any order.

A row holds a file, as the library datasets of Hugging Face stores images and sounds: a struct of its `bytes` and its
`path`, or a plain binary column; and its texts. Arrow files (of the streaming format) are mapped into memory: a start
reads where their record batches are, and nothing of what they hold. Of parquet files it reads the footers; a sample
then costs its whole row group, of which each loader process keeps the last ones.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .opening import missing_package
from .packed import fingerprint_of
from .source import Source
from .table_columns import (
    Media,
    column_of,
    damages,
    features_of,
    is_text,
    label_names,
    one_line,
    schema_of,
    unreadable,
)
from .table_files import TableFiles

_LARGEST_GROUP = 1 << 30  # bytes of a row group of a parquet file, without compression
_KEPT_BYTES = 1 << 28  # of row groups, in each process
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class _Reader(Protocol):
    """A file of a table. `ends`: the number of rows up to the end of each of its parts."""

    ends: np.ndarray

    def part(self, number: int) -> Any:
        """The columns of a part, by name. Raises what pyarrow raises."""
        ...


class Tables:
    """The rows of Arrow or parquet files, numbered in the order of files and rows. See `Places` for the methods.

    Args:
        media: The kind of files that the rows hold.
        texts: Columns that `cells` gives, of those that there are.

    Raises ValueError, in one line, if pyarrow is missing, a file is damaged, or files have no column of this kind, or
    several, or differ in their columns.
    """

    def __init__(self, files: TableFiles, media: Media, texts: Sequence[str] = ()) -> None:
        require_pyarrow()
        self._paths, self._media, self.skipped = files.paths, media, files.skipped
        self._folder = files.folder or os.path.dirname(files.paths[0])
        schema = schema_of(files.paths[0])
        features = features_of(schema)
        self._column = column_of(schema, features, media, files.paths[0])
        self.texts = [name for name in texts if name in schema.names and is_text(schema.field(name).type)]
        self._labels = {name: label_names(features.get(name)) for name in self.texts}
        self._columns = {name: str(schema.field(name).type) for name in (self._column, *self.texts)}
        self._kept = _Kept()
        self._readers = [self._opened(path) for path in files.paths]
        self._firsts = np.cumsum([0, *(_length(reader) for reader in self._readers)])
        if not len(self):
            raise ValueError(f"{self} holds no rows")
        names = [os.path.relpath(path, self._folder) for path in files.paths]
        self._names = names
        found = json.dumps([names, self._firsts.tolist(), list(self._columns.items())])
        self.fingerprint = fingerprint_of([found.encode("utf-8", "surrogateescape")])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __str__(self) -> str:
        first, n = repr(self._paths[0]), len(self._paths)
        return first if n == 1 else f"{n} files, the first {first}"

    def __reduce__(self) -> tuple[Any, ...]:
        files = TableFiles(self._paths, self._folder, self.skipped)
        return Tables, (files, self._media, self.texts)  # a worker that is not forked opens them again

    def source(self, index: int) -> Source:
        """The file in a row. Raises ValueError, in one line, if there is none."""
        value = self._cell(index, self._column)
        path = None
        if hasattr(value, "keys"):  # a struct
            path, value = (value[key] if key in value.keys() else None for key in ("path", "bytes"))  # noqa: SIM118
            path = path.as_py() if path is not None else None
        content = None if value is None else value.as_buffer()
        if content is not None:
            return Source.in_memory(content, self.describe(index), member=path or "")
        if not path:
            raise ValueError(f"the row holds no {self._media.noun}")
        if "\0" in path:
            raise ValueError("the row holds a path that cannot be one")
        return Source(os.path.join(self._folder, os.path.expanduser(path)))

    def cells(self, index: int) -> dict[str, Any]:
        """The texts of a row by column; numbers of classes are replaced by their names."""
        cells = {name: self._cell(index, name).as_py() for name in self.texts}
        for name, classes in self._labels.items():
            if classes and isinstance(number := cells[name], int):
                cells[name] = classes[number] if 0 <= number < len(classes) else None
        return cells

    def describe(self, index: int) -> str:
        file, row = self._place(index)
        return f"{self._paths[file]}[{row}]"

    def name(self, index: int) -> str:
        file, row = self._place(index)
        return f"{self._names[file]}/{row:09d}"

    def _place(self, index: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return file, index - int(self._firsts[file])

    def _cell(self, index: int, column: str) -> Any:
        file, row = self._place(index)
        reader = self._readers[file]
        part = int(np.searchsorted(reader.ends, row, side="right"))
        first = int(reader.ends[part - 1]) if part else 0
        try:
            return reader.part(part)[column][row - first]
        except damages() as error:
            raise ValueError(f"the rows beside it cannot be read: {one_line(error)}") from None

    def _opened(self, path: str) -> _Reader:
        try:
            schema = schema_of(path)
            columns = {name: str(schema.field(name).type) for name in self._columns if name in schema.names}
            if columns != self._columns:
                ours, theirs = (", ".join(f"{k}: {v}" for k, v in c.items()) for c in (columns, self._columns))
                raise _OtherColumnsError(f"{path!r} has the columns {ours}, but {self._paths[0]!r} {theirs}")
            if path.lower().endswith(".parquet"):
                return _ParquetFile(path, list(self._columns), self._kept)
            return _ArrowFile(path, list(self._columns))
        except _OtherColumnsError as error:
            raise ValueError(str(error)) from None
        except damages() as error:
            raise unreadable(path, error) from None


class _OtherColumnsError(Exception):
    """Two files have not the same columns."""


class _ArrowFile:
    """A file of the streaming format in a map of memory."""

    def __init__(self, path: str, columns: Sequence[str]) -> None:
        import pyarrow as pa

        self._columns = columns
        mapped = pa.memory_map(path)
        if mapped.size() < len(_END_OF_STREAM) or mapped.read_at(8, mapped.size() - 8) != _END_OF_STREAM:
            raise ValueError("it is cut off: it has no mark of the end")
        mapped.seek(0)
        content = mapped.read_buffer()  # a view of the map
        schema = pa.ipc.open_stream(content).schema
        numbers = [schema.get_field_index(name) for name in columns]
        options = pa.ipc.IpcReadOptions(included_fields=numbers, use_threads=False)
        self._batches = []
        for batch in pa.ipc.open_stream(content, options=options):
            if not _lies_in(batch, content):
                raise ValueError("it is compressed, so that a start would read all of it: save it without compression")
            self._batches.append(batch)
        self.ends = np.cumsum([batch.num_rows for batch in self._batches])
        self._checked = np.zeros(len(self._batches), np.bool_)

    def part(self, number: int) -> Any:
        batch = self._batches[number]
        if not self._checked[number]:  # else forged offsets would lead out of the file; bytes are not looked at
            batch.validate(full=True)
            self._checked[number] = True
        return {name: batch.column(name) for name in self._columns}


def _lies_in(batch: Any, content: Any) -> bool:
    """Whether a record batch is a part of a file's content, not a copy."""
    first, end = content.address, content.address + content.size
    buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer is not None and buffer.size]
    return all(first <= buffer.address and buffer.address + buffer.size <= end for buffer in buffers)


class _Kept:
    """The row groups that were used last, up to a number of bytes, but one at least."""

    def __init__(self) -> None:
        self.groups: OrderedDict[tuple[str, int], tuple[Any, int]] = OrderedDict()
        self._bytes = 0

    def add(self, key: tuple[str, int], group: Any) -> None:
        self.groups[key] = group, group.nbytes
        self._bytes += group.nbytes
        while len(self.groups) > 1 and self._bytes > _KEPT_BYTES:
            self._bytes -= self.groups.popitem(last=False)[1][1]

    def get(self, key: tuple[str, int]) -> Any:
        self.groups.move_to_end(key)
        return self.groups[key][0]


class _ParquetFile:
    """A parquet file, read by row groups, of which the last ones of all files of a table are `kept`."""

    def __init__(self, path: str, columns: Sequence[str], kept: _Kept) -> None:
        import pyarrow.parquet as pq

        self._path, self._columns, self._kept, self._pid = path, list(columns), kept, os.getpid()
        self._file = pq.ParquetFile(path)
        about = self._file.metadata
        for number in range(about.num_row_groups):
            if about.row_group(number).total_byte_size > _LARGEST_GROUP:
                size = about.row_group(number).total_byte_size / 1e9
                raise ValueError(
                    f"its row group {number} has {size:.1f} GB, and all of it is read for one sample: write it again "
                    "with row_group_size=100, or as Arrow"
                )
        self.ends = np.cumsum([about.row_group(number).num_rows for number in range(about.num_row_groups)])

    def part(self, number: int) -> Any:
        key = (self._path, number)
        if key not in self._kept.groups:
            import pyarrow.parquet as pq

            if self._pid != os.getpid():  # a loader process has its own file
                self._file, self._pid = pq.ParquetFile(self._path, metadata=self._file.metadata), os.getpid()
            self._kept.add(key, self._file.read_row_group(number, columns=self._columns, use_threads=False))
        return self._kept.get(key)


def require_pyarrow() -> None:
    """Raise ValueError, in one line, if pyarrow is missing. It imports the package, so that loader workers that are
    forked later need not."""
    try:
        import pyarrow
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise missing_package("reading Arrow and parquet files", "pyarrow", "datasets") from None


def _length(reader: _Reader) -> int:
    return int(reader.ends[-1]) if len(reader.ends) else 0
