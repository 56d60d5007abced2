"""Tables of samples: the rows of Arrow and parquet files, read in any order.

A row holds a file, as the library datasets of Hugging Face stores images and sounds: a struct of its `bytes` and its
`path`, or a plain binary column; and its texts, its embeddings, and the start and end of its part of a long file. Arrow
files (of the streaming format) are mapped into memory: a start reads only the headers of their record batches. Of
parquet files it reads the footers; a sample then costs the reading of its row group, of which each loader process
caches the last ones.
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

from tandem.io.installed import missing_package
from tandem.io.reading import LONGEST_BEGINNING, READ_ERRORS, check_regular, error_text, read_json, wrong_kind_text

from .files import is_url, redact
from .folder import FolderSource
from .index import fingerprint_of
from .record import FieldSpec, FileRef, Files, open_range
from .rows import TIMES, Rows, unread_line

ENDINGS = (".arrow", ".parquet")
_MAX_GROUP_BYTES = 1 << 30  # of a row group of a parquet file, without compression
_CACHED_BYTES = 1 << 28  # of row groups, in each process
_MIN_ROW_BYTES = 8  # memory of a row of a parquet file, even if the file stores it as a repetition of the last row
_THREADS = 16
_MAX_HEADER_BYTES = 1 << 24
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_MEDIA = ("Image", "Audio", "Video")
# The words in the paths of files from which the Hugging Face hub infers the split.
_SPLITS = {"train": "train", "training": "train", "validation": "validation", "valid": "validation",
           "val": "validation", "dev": "validation", "test": "test", "testing": "test", "eval": "test",
           "evaluation": "test"}  # fmt: skip
_WORD = re.compile(r"[A-Za-z]+")
# Types of columns, as pyarrow writes them.
_FILE = re.compile(r"struct<(.*, )?bytes: (large_)?binary\b.*>|(large_)?binary")
_TEXT = re.compile(r"(dictionary<values=|(large_)?list<\w+: )?((large_)?string|u?int\d+)\b.*")
_LISTS = ("list<", "large_list<", "fixed_size_list<")


def saved_files(folder: str) -> Files | None:
    """The files of a folder written by `save_to_disk`, None for another folder.

    Raises ValueError, in one line, if it is damaged, holds several splits, or selects rows of the files.
    """
    state_path, splits_path = os.path.join(folder, "state.json"), os.path.join(folder, "dataset_dict.json")
    try:
        splits = [*map(str, read_json(splits_path)["splits"])] if os.path.isfile(splits_path) else []
        state = read_json(state_path) if os.path.isfile(state_path) else {"_data_files": []}
        files = [str(file["filename"]) for file in state["_data_files"]]
    except READ_ERRORS as error:
        reason = f"cannot read {state_path!r} or {splits_path!r}: {type(error).__name__}, {error_text(error)}"
        raise ValueError(f"{reason}: save the dataset again") from None
    if splits:
        hint = f"give the folder of one, such as {os.path.join(folder, splits[0])!r}"
        raise ValueError(f"{folder!r} holds the splits {', '.join(splits)}: {hint}")
    if not files:
        return None
    if state.get("_indices_data_files"):  # of old versions
        hint = "call flatten_indices() and save it again"
        raise ValueError(f"{folder!r} holds a selection of the rows of its files: {hint}")
    if outside := [name for name in files if os.path.basename(name) != name or name in ("", "..")]:
        raise ValueError(f"{state_path!r} names {outside[0]!r}, which is no file of its folder")
    return Files([os.path.join(folder, name) for name in files], folder)


def tables_below(folder: str) -> Files:
    """The Arrow or parquet files below a folder, in the order of their relative paths.

    Raises ValueError, in one line, if they are of both kinds, or of several splits; and NothingFoundError.
    """
    files = FolderSource(folder, [FieldSpec("table", "table", ENDINGS)])
    names = [files.name(number) for number in range(len(files))]
    check_alike(folder, names)
    return Files([os.path.join(folder, name) for name in names], folder, files.skipped)


def check_alike(folder: str, names: Sequence[str]) -> None:
    """Raise ValueError, in one line, if the tables of a folder are of both kinds, or of several splits."""
    if len({os.path.splitext(name)[1].lower() for name in names}) > 1:
        raise ValueError(f"{folder!r} holds Arrow and parquet files: give those of one kind, as a pattern")
    splits = {split: name for name in reversed(names) if (split := _find_split(name))}
    if len(splits) > 1:
        raise ValueError(
            f"{folder!r} holds the splits {', '.join(sorted(splits))}, such as {', '.join(sorted(splits.values()))}: "
            "give the folder or a pattern of one"
        )


def _find_split(name: str) -> str | None:
    """The split that a file's path names, by the last such word."""
    words = [_SPLITS[word.lower()] for word in _WORD.findall(name) if word.lower() in _SPLITS]
    return words[-1] if words else None


class TableSource(Rows):
    """The rows of Arrow or parquet files, numbered in the order of files and rows. See `RecordSource` for the methods.

    Cells with class numbers are replaced by the names of the classes. Raises ValueError, in one line, if pyarrow is
    missing, a file is damaged, files have no column for the first `FieldSpec`, or several, or differ in their columns.
    """

    def __init__(self, files: Files, specs: Sequence[FieldSpec]) -> None:
        try:  # imported here, so that loader workers forked later need not
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise missing_package("reading Arrow and parquet files", "pyarrow", "datasets") from None
        self._arguments, self.paths = (files, tuple(specs)), files.paths
        with ThreadPoolExecutor(_THREADS) as threads:  # a server answers slowly
            open_files = [*threads.map(_open_table, files.paths)]
        types, features = _read_types(open_files[0].schema), _read_features(open_files[0].schema)
        columns: dict[FieldSpec, Sequence[str]] = {specs[0]: [_find_column(types, features, specs[0], files.paths[0])]}
        for spec in specs[1:]:
            present = [name for name in spec.columns if name in types]
            columns[spec] = [name for name in present if _TEXT.fullmatch(types[name])] if spec.as_cells else present[:1]
        super().__init__(columns, files.folder or os.path.dirname(files.paths[0]))
        self._times = [name for name in TIMES if name in types]
        used = [*dict.fromkeys(itertools.chain(*columns.values(), self._times))]
        self.classes = {name: names for name in used if isinstance(names := features.get(name, {}).get("names"), list)}
        self.skipped = "; ".join(filter(None, (files.skipped, unread_line(files.paths[0], types, used))))
        used_types = {name: types[name] for name in used}
        for path, file in zip(files.paths, open_files, strict=True):
            file_types = {name: kind for name, kind in _read_types(file.schema).items() if name in used_types}
            if file_types != used_types:
                texts = [", ".join(f"{k}: {v}" for k, v in group.items()) for group in (file_types, used_types)]
                raise ValueError(f"{path!r} has the columns {texts[0]}, but {files.paths[0]!r} {texts[1]}")
        self._parts = [(file, number) for file in open_files for number in range(len(file.row_counts))]
        part_row_counts = itertools.chain(*(file.row_counts for file in open_files))
        self._ends = np.cumsum([0, *part_row_counts])  # of the parts, after a 0
        self._firsts = np.cumsum([0, *(sum(file.row_counts) for file in open_files)])  # of the files, and the end
        if not len(self):
            first, n = repr(files.paths[0]), len(files.paths)
            raise ValueError(f"{first if n == 1 else f'{n} files, the first {first}'} holds no rows")
        ranges = [range(first, end) for first, end in itertools.pairwise(self._firsts.tolist())]
        self.shards: Sequence[range] | None = ranges if len(ranges) > 1 else None
        self._names = [os.path.relpath(path, self._folder) for path in files.paths]
        text = json.dumps([self._names, self._firsts.tolist(), list(used_types.items())])
        self.fingerprint = fingerprint_of([text.encode("utf-8", "surrogateescape")])
        max_part_bytes = max(file.max_part_bytes for file in open_files)
        self._cached_part = lru_cache(max(1, _CACHED_BYTES // max_part_bytes))(partial(self._read_part, columns=used))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return TableSource, self._arguments  # a worker that is not forked opens the files again

    def cells(self, index: int) -> Mapping[str, Any]:
        number = int(np.searchsorted(self._ends, index, side="right")) - 1
        columns, row = self._cached_part(number), index - int(self._ends[number])
        with _errors_in_one_line("the row cannot be read"):
            cells = {name: _to_plain(column[row]) for name, column in columns.items()}
        for name, classes in self.classes.items():
            if isinstance(label := cells[name], int):
                cells[name] = str(classes[label]) if 0 <= label < len(classes) else None
        return cells

    def times(self) -> Iterator[Mapping[str, Any]]:
        for number in range(len(self._parts) if self._times else 0):
            columns = self._read_part(number, self._times)
            for cells in zip(*columns.values(), strict=True):
                yield dict(zip(columns, map(_to_plain, cells), strict=True))

    def describe(self, index: int) -> str:
        file, row = self._locate(index)
        return f"{self.paths[file]}[{row}]"

    def name(self, index: int) -> str:
        file, row = self._locate(index)
        return f"{self._names[file]}/{row:09d}"

    def _locate(self, index: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return file, index - int(self._firsts[file])

    def _read_part(self, number: int, columns: Sequence[str]) -> Mapping[str, Any]:
        """Columns of a part, the rows that are read together."""
        file, part = self._parts[number]
        with _errors_in_one_line("the rows beside it cannot be read"):
            rows = file.read_part(part, columns)
            return {name: rows.column(name) for name in columns}


class _ArrowFile:
    """An Arrow file of the streaming format. Its parts are record batches, whose headers the constructor reads. A part
    is a view of the memory map; from a server it is fetched when one of its samples is read."""

    def __init__(self, path: str) -> None:
        import pyarrow as pa

        self._path, self.row_counts, self._batch_ranges = path, list[int](), list[tuple[int, int]]()
        self._map = None if is_url(path) else pa.memory_map(path).read_buffer()
        offset = 0
        with open_range(FileRef(path), ahead=1 << 16) as file:
            while (marker := file.pread(8, offset)) != _END_OF_STREAM:
                size = 8 + int.from_bytes(marker[4:], "little")
                is_marked = marker[:4] == _END_OF_STREAM[:4] and size <= _MAX_HEADER_BYTES
                header = file.pread(size, offset) if is_marked else b""
                if len(header) < size:
                    raise ValueError("it is cut off, or no stream of Arrow: write it as a stream, or as parquet")
                message = pa.ipc.read_message(pa.PythonFile(_WithoutBody(header, file.size - offset - size), mode="r"))
                if not offset:
                    self.schema = pa.ipc.read_schema(message)
                else:
                    self.row_counts.append(_count_rows(message, self.schema))
                    self._batch_ranges.append((offset, size + message.body.size))
                offset += size + (message.body.size if message.body else 0)
            if (n_more := file.size - offset - len(_END_OF_STREAM)) > 0:
                hint = "give files that were appended one by one"
                raise ValueError(f"{n_more} bytes follow the end of its stream: {hint}")
        # A view of the memory map takes no memory.
        self.max_part_bytes = 1 if self._map else max((size for _, size in self._batch_ranges), default=1)
        if self.max_part_bytes > _MAX_GROUP_BYTES:
            raise ValueError("one of its record batches has more than 1 GB, and all of it is read for one sample")

    def read_part(self, number: int, columns: Sequence[str]) -> Any:
        import pyarrow as pa

        offset, size = self._batch_ranges[number]
        content = self._map.slice(offset, size) if self._map else FileRef(self._path, offset, size).read(size)
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(content), self.schema).select(columns)
        batch.validate(full=True)  # forged offsets would lead out of the file
        if batch.num_rows != self.row_counts[number]:
            raise ValueError("it claims another number of rows than it has")
        return batch


class _WithoutBody(io.BytesIO):
    """An Arrow message with its header, and zeros in place of the body, of at most `longest` bytes: they take no memory
    until they are accessed."""

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


def _count_rows(message: Any, schema: Any) -> int:
    """The number of rows of a record batch without its body. Raises ValueError, in one line, if its columns are not
    stored plainly in the body."""
    import pyarrow as pa

    try:
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate()  # a compressed body has too few bytes
    except (pa.ArrowException, OSError) as error:
        reason = "it is compressed, has dictionaries or is damaged: save it without them, or as parquet"
        raise ValueError(f"{reason} ({error})") from None
    return int(batch.num_rows)


class _ParquetFile:
    """A parquet file; its parts are row groups. The file is opened for each part, because processes must not share an
    open file."""

    def __init__(self, path: str) -> None:
        import pyarrow.parquet as pq

        self._path = path
        with _open_for_pyarrow(path, is_part=False) as file:
            self._metadata = pq.read_metadata(file)
        self.schema = self._metadata.schema.to_arrow_schema()
        groups = [self._metadata.row_group(number) for number in range(self._metadata.num_row_groups)]
        self.row_counts = [group.num_rows for group in groups]
        sizes = [max(group.total_byte_size, _MIN_ROW_BYTES * group.num_rows) for group in groups]
        self.max_part_bytes = max([1, *sizes])
        # Equal cells are stored once: if each became a copy, a small file could take any amount of memory.
        leaves = (self._metadata.schema.column(number) for number in range(len(self._metadata.schema)))
        self._dictionary_columns = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        if self.max_part_bytes > _MAX_GROUP_BYTES:
            size = f"its row group {sizes.index(self.max_part_bytes)} has {self.max_part_bytes / 1e9:.1f} GB"
            hint = "write it again with row_group_size=100, or as Arrow"
            raise ValueError(f"{size}, and all of it is read for one sample: {hint}")

    def read_part(self, number: int, columns: Sequence[str]) -> Any:
        import pyarrow.parquet as pq

        options = {"metadata": self._metadata, "read_dictionary": self._dictionary_columns}
        with _open_for_pyarrow(self._path, is_part=True) as raw, pq.ParquetFile(raw, **options) as file:
            return file.read_row_group(number, columns=[*columns], use_threads=False)


def _open_table(path: str) -> _ArrowFile | _ParquetFile:
    with _errors_in_one_line(f"cannot read {path!r}"):
        if not is_url(path):
            check_regular(Path(path))
        try:
            return _ParquetFile(path) if redact(path).lower().endswith(".parquet") else _ArrowFile(path)
        except ValueError:  # pyarrow's errors about the content are ValueErrors, too
            if reason := wrong_kind_text(FileRef(path).read(LONGEST_BEGINNING)):
                raise ValueError(reason) from None
            raise


def _open_for_pyarrow(path: str, is_part: bool) -> contextlib.AbstractContextManager[Any]:
    """A file at an address, see `open_range` for `is_part`; or the path, which pyarrow reads several times faster by
    itself."""
    return open_range(FileRef(path), is_part) if is_url(path) else contextlib.nullcontext(path)


@contextlib.contextmanager
def _errors_in_one_line(failure: str) -> Iterator[None]:
    """Context in which pyarrow's errors for a damaged file become a ValueError, in one line."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, *READ_ERRORS) as error:
        raise ValueError(f"{failure}: {error_text(error)}") from None


def _to_plain(cell: Any) -> Any:
    """Arrow scalar -> Python values; the content of a file remains a view of the memory map."""
    import pyarrow.types as types

    if types.is_dictionary(cell.type):
        cell = cell.value
    kind = cell.type
    if cell.is_valid and types.is_struct(kind):
        return {name: _to_plain(cell[name]) for name in ("bytes", "path") if kind.get_field_index(name) >= 0}
    if cell.is_valid and (types.is_binary(kind) or types.is_large_binary(kind)):
        return memoryview(cell.as_buffer())
    if cell.is_valid and str(kind).startswith(_LISTS):
        if types.is_floating(kind.value_type):
            return np.from_dlpack(cell.values)  # to_numpy() would import pandas
        return [_to_plain(element) for element in cell.values]
    return cell.as_py()


def _read_features(schema: Any) -> Mapping[str, Mapping[str, Any]]:
    """The features of the columns in the metadata of the library datasets."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, Mapping)}
    except READ_ERRORS:
        return {}


def _read_types(schema: Any) -> dict[str, str]:
    """The type of each column, as pyarrow writes it, without columns of equal names."""
    counts = Counter(schema.names)
    return {name: str(kind) for name, kind in zip(schema.names, schema.types, strict=True) if counts[name] < 2}


def _find_column(
    types: Mapping[str, str], features: Mapping[str, Mapping[str, Any]], spec: FieldSpec, path: str
) -> str:
    """The column of the samples' files: the one whose feature is that of `spec`; else, among those without a feature of
    an image, sound or video, one with a name of `spec`, or the only struct. Raises ValueError, in one line, if there is
    none, or several that fit equally well."""
    files = {name: kind for name, kind in types.items() if _FILE.fullmatch(kind)}
    features_by_name = {name: features.get(name, {}).get("_type") for name in files}
    by_feature = [name for name in files if features_by_name[name] == spec.feature]
    untyped = [name for name in files if features_by_name[name] not in _MEDIA]
    by_name = [name for name in untyped if name.lower() in spec.columns]
    structs = [name for name in untyped if files[name].startswith("struct")]
    for candidates in (by_feature, by_name, structs):
        candidates = [name for name in candidates if name == spec.columns[0]] or candidates
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            problem, names = f"several columns of {spec.noun}s", ", ".join(candidates)
            raise ValueError(f"{path!r} has {problem}, {names}: call the one to train on {spec.columns[0]}")
    raise ValueError(
        f"{path!r} has no column of {spec.noun}s, a struct of bytes and path or a binary one called "
        f"{spec.columns[0]}; it has {', '.join([*types][:20]) or 'none'}"
    )
