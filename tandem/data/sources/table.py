"""Tables of samples: the rows of Arrow and parquet files, read in any order.

A row holds a file, as the library datasets of Hugging Face stores images and sounds: a struct of its `bytes` and its
`path`, or a plain binary column; and its texts, its embeddings, and where its part of a long file begins and ends.
Arrow files (of the streaming format) are mapped into memory: a start reads where their record batches are, and nothing
of what they hold. Of parquet files it reads the footers; a sample then costs its whole row group, of which each loader
process keeps the last ones.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from tandem.data.bad_samples import reason_of
from tandem.io.installed import missing_package
from tandem.io.reading import DAMAGES, LONGEST_BEGINNING, check_regular, other_kind, read_json

from . import remote
from .files import is_address, shown
from .folder import FolderSource, NothingFoundError
from .index import fingerprint_of
from .record import Entry, Files, Wanted, open_bytes
from .rows import TIMES, Rows, columns_of, unread_line

ENDINGS = (".arrow", ".parquet")
_LARGEST_GROUP = 1 << 30  # bytes of a row group of a parquet file, without compression
_KEPT_BYTES = 1 << 28  # of row groups, in each process
_BYTES_OF_ROW = 8  # that a row of a parquet file takes at least, however often it repeats the one before
_THREADS = 16
_LONGEST_HEADER = 1 << 24  # bytes
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_MEDIA = ("Image", "Audio", "Video")
# The words by which the hub tells splits apart in the paths of files.
_SPLITS = {"train": "train", "training": "train", "validation": "validation", "valid": "validation",
           "val": "validation", "dev": "validation", "test": "test", "testing": "test", "eval": "test",
           "evaluation": "test"}  # fmt: skip
_WORD = re.compile(r"[A-Za-z]+")
# Types of columns, as pyarrow writes them.
_FILE = re.compile(r"struct<(.*, )?bytes: (large_)?binary\b.*>|(large_)?binary")
_TEXT = re.compile(r"(dictionary<values=|(large_)?list<\w+: )?((large_)?string|u?int\d+)\b.*")
_LISTS = ("list<", "large_list<", "fixed_size_list<")


def saved_files(folder: str) -> Files | None:
    """The files of a folder that `save_to_disk` has written, None if it is none.

    Raises ValueError, in one line, if it is damaged, holds several splits, or names rows of the files.
    """
    path, of_splits = os.path.join(folder, "state.json"), os.path.join(folder, "dataset_dict.json")
    try:
        splits = [*map(str, read_json(of_splits)["splits"])] if os.path.isfile(of_splits) else []
        state = read_json(path) if os.path.isfile(path) else {"_data_files": []}
        files = [str(file["filename"]) for file in state["_data_files"]]
    except DAMAGES as error:
        said = f"cannot read {path!r} or {of_splits!r}: {type(error).__name__}, {reason_of(error)}"
        raise ValueError(f"{said}: save the dataset again") from None
    if splits:
        example = os.path.join(folder, splits[0])
        raise ValueError(
            f"{folder!r} holds the splits {', '.join(splits)}: give the folder of one, such as {example!r}"
        )
    if not files:
        return None
    if state.get("_indices_data_files"):  # of old versions
        raise ValueError(
            f"{folder!r} holds a selection of the rows of its files: call flatten_indices() and save it again"
        )
    if outside := [name for name in files if os.path.basename(name) != name or name in ("", "..")]:
        raise ValueError(f"{path!r} names {outside[0]!r}, which is no file of its folder")
    return Files([os.path.join(folder, name) for name in files], folder)


def tables_below(folder: str) -> Files | None:
    """The Arrow or parquet files below a folder, in the order of their relative paths; None if there are none.

    Raises ValueError, in one line, if they are of both kinds, or of several splits.
    """
    try:
        files = FolderSource(folder, [Wanted("table", "table", ENDINGS)])
    except NothingFoundError:
        return None
    names = [files.name(number) for number in range(len(files))]
    if not names:
        return None
    check_alike(folder, names)
    return Files([os.path.join(folder, name) for name in names], folder, files.skipped)


def check_alike(folder: str, names: Sequence[str]) -> None:
    """Raises ValueError, in one line, if the tables of a folder are of both kinds, or of several splits."""
    if len({os.path.splitext(name)[1].lower() for name in names}) > 1:
        raise ValueError(f"{folder!r} holds Arrow and parquet files: give those of one kind, as a pattern")
    splits = {split: name for name in reversed(names) if (split := _split_of(name))}
    if len(splits) > 1:
        raise ValueError(
            f"{folder!r} holds the splits {', '.join(sorted(splits))}, such as {', '.join(sorted(splits.values()))}: "
            "give the folder or a pattern of one"
        )


def _split_of(name: str) -> str | None:
    """The split that the path of a file names, its last word of this kind."""
    words = [_SPLITS[word.lower()] for word in _WORD.findall(name) if word.lower() in _SPLITS]
    return words[-1] if words else None


class TableSource(Rows):
    """The rows of Arrow or parquet files, numbered in the order of files and rows. See `Source` for the methods.

    Cells of texts that are numbers of classes are replaced by the names of these. Raises ValueError, in one line, if
    pyarrow is missing, a file is damaged, or files have no column of the first that is wanted, or several, or differ in
    their columns.
    """

    def __init__(self, files: Files, wanted: Sequence[Wanted]) -> None:
        try:  # here, so that loader workers that are forked later need not
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise missing_package("reading Arrow and parquet files", "pyarrow", "datasets") from None
        self._given, self.paths = (files, tuple(wanted)), files.paths
        with ThreadPoolExecutor(_THREADS) as threads:  # a server takes a while for each
            opened = [*threads.map(_opened, files.paths)]
        kinds, features = _kinds(opened[0].schema), _features_of(opened[0].schema)
        columns: dict[Wanted, Sequence[str]] = {wanted[0]: [_column_of(kinds, features, wanted[0], files.paths[0])]}
        for one in wanted[1:]:
            there = [name for name in columns_of(one) if name in kinds]
            columns[one] = [name for name in there if _TEXT.fullmatch(kinds[name])] if one.as_cells else there[:1]
        super().__init__(columns, files.folder or os.path.dirname(files.paths[0]))
        self._times = [name for name in TIMES if name in kinds]
        chosen = [*dict.fromkeys(itertools.chain(*columns.values(), self._times))]
        self.classes = {
            name: names for name in chosen if isinstance(names := features.get(name, {}).get("names"), list)
        }
        self.skipped = "; ".join(filter(None, (files.skipped, unread_line(files.paths[0], kinds, chosen))))
        types = {name: kinds[name] for name in chosen}
        for path, file in zip(files.paths, opened, strict=True):
            found = {name: kind for name, kind in _kinds(file.schema).items() if name in types}
            if found != types:
                ours, theirs = (", ".join(f"{k}: {v}" for k, v in each.items()) for each in (found, types))
                raise ValueError(f"{path!r} has the columns {ours}, but {files.paths[0]!r} {theirs}")
        self._parts = [(file, number) for file in opened for number in range(len(file.lengths))]
        self._ends = np.cumsum([0, *itertools.chain(*(file.lengths for file in opened))])  # of the parts, after a 0
        self._firsts = np.cumsum([0, *(sum(file.lengths) for file in opened)])
        if not len(self):
            first, n = repr(files.paths[0]), len(files.paths)
            raise ValueError(f"{first if n == 1 else f'{n} files, the first {first}'} holds no rows")
        ranges = [range(first, end) for first, end in itertools.pairwise(self._firsts.tolist())]
        self.shards: Sequence[range] | None = ranges if len(ranges) > 1 else None
        self._names = [os.path.relpath(path, self._folder) for path in files.paths]
        about = json.dumps([self._names, self._firsts.tolist(), list(types.items())])
        self.fingerprint = fingerprint_of([about.encode("utf-8", "surrogateescape")])
        largest = max(file.largest for file in opened)
        self._part = lru_cache(max(1, _KEPT_BYTES // largest))(partial(self._read_part, columns=chosen))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return TableSource, self._given  # a worker that is not forked opens the files again

    def cells(self, index: int) -> Mapping[str, Any]:
        number = int(np.searchsorted(self._ends, index, side="right")) - 1
        columns, row = self._part(number), index - int(self._ends[number])
        with _in_one_line("the row cannot be read"):
            cells = {name: _plain(column[row]) for name, column in columns.items()}
        for name, classes in self.classes.items():
            if isinstance(at := cells[name], int):
                cells[name] = str(classes[at]) if 0 <= at < len(classes) else None
        return cells

    def times(self) -> Iterator[Mapping[str, Any]]:
        for number in range(len(self._parts) if self._times else 0):
            columns = self._read_part(number, self._times)
            for cells in zip(*columns.values(), strict=True):
                yield dict(zip(columns, map(_plain, cells), strict=True))

    def describe(self, index: int) -> str:
        file, row = self._place(index)
        return f"{self.paths[file]}[{row}]"

    def name(self, index: int) -> str:
        file, row = self._place(index)
        return f"{self._names[file]}/{row:09d}"

    def _place(self, index: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return file, index - int(self._firsts[file])

    def _read_part(self, number: int, columns: Sequence[str]) -> Mapping[str, Any]:
        """Columns of rows that are read together."""
        file, part = self._parts[number]
        with _in_one_line("the rows beside it cannot be read"):
            read = file.part(part, columns)
            return {name: read.column(name) for name in columns}


class _ArrowFile:
    """A file of the streaming format; its parts are record batches, whose headers are read at the start. A part is a
    view of a map of memory, or is fetched from a server when one of its samples is asked for."""

    def __init__(self, path: str) -> None:
        import pyarrow as pa

        self._path, self.lengths, self._places = path, list[int](), list[tuple[int, int]]()
        self._mapped = None if is_address(path) else pa.memory_map(path).read_buffer()
        at = 0
        with open_bytes(path, ahead=1 << 16) as file:
            while (mark := file.pread(8, at)) != _END_OF_STREAM:
                size = 8 + int.from_bytes(mark[4:], "little")
                header = file.pread(size, at) if mark[:4] == _END_OF_STREAM[:4] and size <= _LONGEST_HEADER else b""
                if len(header) < size:
                    raise ValueError("it is cut off, or no stream of Arrow: write it as a stream, or as parquet")
                message = pa.ipc.read_message(pa.PythonFile(_WithoutBody(header, file.size - at - size), mode="r"))
                if not at:
                    self.schema = pa.ipc.read_schema(message)
                else:
                    self.lengths.append(_rows_of(message, self.schema))
                    self._places.append((at, size + message.body.size))
                at += size + (message.body.size if message.body else 0)
            if (n_more := file.size - at - len(_END_OF_STREAM)) > 0:
                raise ValueError(
                    f"{n_more} bytes follow the end of its stream: give files that were appended one by one"
                )
        self.largest = 1 if self._mapped else max((size for _, size in self._places), default=1)
        if self.largest > _LARGEST_GROUP:
            raise ValueError("one of its record batches has more than 1 GB, and all of it is read for one sample")

    def part(self, number: int, columns: Sequence[str]) -> Any:
        import pyarrow as pa

        at, size = self._places[number]
        content = self._mapped.slice(at, size) if self._mapped else Entry(self._path, at, size).read(size)
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(content), self.schema).select(columns)
        batch.validate(full=True)  # else forged offsets would lead out of the file
        if batch.num_rows != self.lengths[number]:
            raise ValueError("it claims another number of rows than it has")
        return batch


class _WithoutBody(io.BytesIO):
    """A message of Arrow, of which the header is there, and zeros stand for the body, of at most `longest` bytes: they
    take no memory until somebody looks at them."""

    def __init__(self, header: bytes, longest: int) -> None:
        super().__init__(header)
        self._longest = longest

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(size)
        if content or not size:
            return content
        if not 0 <= size <= self._longest:
            raise ValueError("it is cut off: it has no mark of the end")
        return bytes(size)


def _rows_of(message: Any, schema: Any) -> int:
    """How many rows a record batch has, of whose body nothing is known. Raises ValueError, in one line, if it is none
    whose columns stand in the body as they are."""
    import pyarrow as pa

    try:
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate()  # a compressed body has too few bytes
    except (pa.ArrowException, OSError) as error:
        said = "it is compressed, has dictionaries or is damaged: save it without them, or as parquet"
        raise ValueError(f"{said} ({error})") from None
    return int(batch.num_rows)


class _ParquetFile:
    """A parquet file; its parts are row groups. It is opened for each, because processes must not share an open one."""

    def __init__(self, path: str) -> None:
        import pyarrow.parquet as pq

        self._path = path
        with _at_random(path, is_part=False) as file:
            self._about = pq.read_metadata(file)
        self.schema = self._about.schema.to_arrow_schema()
        groups = [self._about.row_group(number) for number in range(self._about.num_row_groups)]
        self.lengths = [group.num_rows for group in groups]
        sizes = [max(group.total_byte_size, _BYTES_OF_ROW * group.num_rows) for group in groups]
        self.largest = max([1, *sizes])
        # Cells that are equal stand in a file once: a small one would take any memory if each became a copy.
        leaves = (self._about.schema.column(number) for number in range(len(self._about.schema)))
        self._once = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        if self.largest > _LARGEST_GROUP:
            raise ValueError(
                f"its row group {sizes.index(self.largest)} has {self.largest / 1e9:.1f} GB, and all of it is read for "
                "one sample: write it again with row_group_size=100, or as Arrow"
            )

    def part(self, number: int, columns: Sequence[str]) -> Any:
        import pyarrow.parquet as pq

        how = {"metadata": self._about, "read_dictionary": self._once}
        with _at_random(self._path, is_part=True) as opened, pq.ParquetFile(opened, **how) as file:
            return file.read_row_group(number, columns=[*columns], use_threads=False)


def _opened(path: str) -> _ArrowFile | _ParquetFile:
    with _in_one_line(f"cannot read {path!r}"):
        if not is_address(path):
            check_regular(Path(path))
        try:
            return _ParquetFile(path) if shown(path).lower().endswith(".parquet") else _ArrowFile(path)
        except ValueError:  # pyarrow's errors of a content are ValueErrors, too
            if reason := other_kind(Entry(path).read(LONGEST_BEGINNING)):
                raise ValueError(reason) from None
            raise


def _at_random(path: str, is_part: bool) -> contextlib.AbstractContextManager[Any]:
    """What pyarrow opens. `is_part`: as for `open_bytes`."""
    return remote.open_file(path, is_part) if is_address(path) else contextlib.nullcontext(path)


@contextlib.contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """Context in which whatever pyarrow raises for a damaged file becomes a ValueError, in one line."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, *DAMAGES) as error:
        raise ValueError(f"{what}: {' '.join(reason_of(error).split()) or type(error).__name__}") from None


def _plain(cell: Any) -> Any:
    """A cell without pyarrow, but for the contents of files, which stay where they are in a map of memory."""
    import pyarrow.types as types

    if types.is_dictionary(cell.type):
        cell = cell.value
    kind = cell.type
    if cell.is_valid and types.is_struct(kind):
        return {name: _plain(cell[name]) for name in ("bytes", "path") if kind.get_field_index(name) >= 0}
    if cell.is_valid and (types.is_binary(kind) or types.is_large_binary(kind)):
        return memoryview(cell.as_buffer())
    if cell.is_valid and str(kind).startswith(_LISTS):
        if types.is_floating(kind.value_type):
            return np.from_dlpack(cell.values)  # to_numpy() would import pandas
        return [_plain(each) for each in cell.values]
    return cell.as_py()


def _features_of(schema: Any) -> Mapping[str, Mapping[str, Any]]:
    """What datasets says of the columns."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: said for name, said in features.items() if isinstance(said, Mapping)}
    except DAMAGES:
        return {}


def _kinds(schema: Any) -> dict[str, str]:
    """The type of each column, as pyarrow writes it; of columns of one name, none."""
    counts = Counter(schema.names)
    return {name: str(kind) for name, kind in zip(schema.names, schema.types, strict=True) if counts[name] < 2}


def _column_of(kinds: Mapping[str, str], features: Mapping[str, Mapping[str, Any]], wanted: Wanted, path: str) -> str:
    """The column that holds the files."""
    columns = columns_of(wanted)
    files = {name: kind for name, kind in kinds.items() if _FILE.fullmatch(kind)}
    said = {name: features.get(name, {}).get("_type") for name in files}
    stated = [name for name in files if said[name] == wanted.feature]
    unsaid = [name for name in files if said[name] not in _MEDIA]
    named = [name for name in unsaid if name.lower() in columns]
    structs = [name for name in unsaid if files[name].startswith("struct")]
    for found in (stated, named, structs):
        found = [name for name in found if name == columns[0]] or found
        if len(found) == 1:
            return found[0]
        if found:
            what, those = f"several columns of {wanted.noun}s", ", ".join(found)
            raise ValueError(f"{path!r} has {what}, {those}: call the one to train on {columns[0]}")
    raise ValueError(
        f"{path!r} has no column of {wanted.noun}s, a struct of bytes and path or a binary one called {columns[0]}; it "
        f"has {', '.join([*kinds][:20]) or 'none'}"
    )
