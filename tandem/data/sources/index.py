"""The index of a source: which samples a folder, a list of tars or a manifest holds, as columns of strings and numbers.
It is built once and kept for later starts in one file, beside the source or in the user's cache folder.

Every access checks its bounds, because another user may have written the file, and a start does not read all of it. The
file is not mapped into memory, because a process that touches a mapped file behind its end is killed, while a short
read is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import socket
import stat
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.io.reading import READ_ERRORS, open_regular, parse_json
from tandem.io.writing import create, open_appending, replacing, wait_for_lock

from .files import LocalFile, MemoryFile, RandomAccessFile, is_url
from .record import MOST_EXAMPLES

_VERSION = 3
MIN_CACHED_STRINGS = 10_000  # strings in an index that is cached; fewer are listed in a tenth of a second
_LONGEST_HEADER = 1 << 20  # bytes
_STRINGS_AT_ONCE = 4096  # strings
_CLOCK_TICK_NS = 2 * 10**9  # two changes within one tick of a file system's clock look alike; FAT has the longest tick
_DEPENDENCIES = "watched"


class PackedStrings:
    """Strings in two flat buffers: a list would take several times the memory."""

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self._bytes, self._ends = bytearray(), array("q", [0])
        for string in strings:
            self.append(string)

    def append(self, string: str) -> None:
        """Add a string. A string that is no valid UTF-8 must come from `os.fsdecode`."""
        self._bytes += os.fsencode(string)
        self._ends.append(len(self._bytes))

    @property
    def buffers(self) -> tuple[memoryview, memoryview]:
        """The ends of the strings, int64 (n + 1), the first one 0; and their concatenated bytes."""
        return memoryview(self._ends).cast("B"), memoryview(self._bytes)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[str]:
        return (os.fsdecode(bytes(self._bytes[begin:end])) for begin, end in itertools.pairwise(self._ends))


class Dependencies:
    """The files and folders on which an index depends, each with its state before it was read."""

    def __init__(self) -> None:
        self.lines, self.newest_ns = PackedStrings(), 0

    def add(self, name: str, status: os.stat_result | None) -> None:
        """`name` is relative to the `path` of `cached_index`, "" for that path itself; status None: no such file."""
        self.lines.append(f"{_describe_status(status)} {name}")
        if status is not None:
            self.newest_ns = max(self.newest_ns, status.st_mtime_ns, status.st_ctime_ns)


class IndexData(NamedTuple):
    """The content of an index.

    columns: strings or int64 numbers, by name;
    fingerprint: see `RecordSource`;
    facts: a few values that JSON can hold;
    dependencies: the files on which the index depends, if they are known only when it is built.
    """

    columns: Mapping[str, PackedStrings | array[int]]
    fingerprint: str
    facts: Mapping[str, Any]
    dependencies: Dependencies | None = None


def largest(sizes: Any) -> list[int]:
    """The indices of the `MOST_EXAMPLES` largest sizes, the largest first; negative sizes are ignored."""
    numbers = np.asarray(sizes, np.int64)
    order = np.argsort(-numbers, kind="stable")[:MOST_EXAMPLES]
    return [int(index) for index in order if numbers[index] >= 0]


class Index:
    """Columns in a file or in memory. A process holds no column of a file in memory: the operating system caches the
    file for all processes of a machine. Methods raise ValueError, in one line, if the file cannot be read."""

    def __init__(self, file: RandomAccessFile, path: str) -> None:
        """`path` is that of the file. Raises one of `READ_ERRORS` if the content is no index."""
        self._file, self._path = file, path
        self.header = file.pread(_LONGEST_HEADER, 0).partition(b"\n")[0]
        header = parse_json(self.header)
        self.key, self.depends, self.fingerprint = header["key"], header["depends"], str(header["fingerprint"])
        self.facts: Mapping[str, Any] = header["facts"]
        self._columns: dict[str, Strings | Numbers] = {}
        offset = len(self.header) + 1
        for name, n, n_bytes in header["columns"]:
            if not (type(n) is int and n >= 0 and (n_bytes is None or (type(n_bytes) is int and n_bytes >= 0))):
                raise ValueError("no column has such a length")
            self._columns[name] = Numbers(self, offset, n) if n_bytes is None else Strings(self, offset, n, n_bytes)
            offset += 8 * n if n_bytes is None else 8 * (n + 1) + n_bytes
        if offset != file.size:
            raise ValueError("it has another size than its columns")

    def strings(self, name: str) -> Strings:
        column = self._columns.get(name)
        if not isinstance(column, Strings):
            raise self.damaged_error()
        return column

    def numbers(self, name: str, n: int) -> Numbers:
        """The column of this name, which must have n numbers."""
        column = self._columns.get(name)
        if not isinstance(column, Numbers) or len(column) != n:
            raise self.damaged_error()
        return column

    def examples(self, name: str) -> Sequence[int]:
        """See `RecordSource.examples`; the facts hold the examples by name, as indices of the strings "names"."""
        by_name, n = self.facts.get("examples"), len(self.strings("names"))
        indices = by_name.get(name, []) if isinstance(by_name, Mapping) else None
        if not (isinstance(indices, list) and all(type(index) is int and 0 <= index < n for index in indices)):
            raise self.damaged_error()
        return indices

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes."""
        try:
            content = self._file.pread(size, offset)
        except (OSError, OverflowError, MemoryError):  # such as a file on another machine that was replaced
            content = b""
        if len(content) != size:
            raise self.damaged_error()
        return content

    def damaged_error(self) -> ValueError:
        return ValueError(f"the list of samples {self._path!r} was damaged or replaced: delete it, and start again")

    def __reduce__(self) -> tuple[Callable[..., Index], tuple[Any, ...]]:
        """For a worker that is not forked: open files cannot be pickled."""
        is_in_memory = isinstance(self._file, MemoryFile)
        return _reopen, (self._path, self.header, self._file.pread(self._file.size, 0) if is_in_memory else None)


def _reopen(path: str, header: bytes, content: bytes | None) -> Index:
    try:
        index = Index(LocalFile(open_regular(path)) if content is None else MemoryFile(content), path)
        if index.header == header:
            return index
    except READ_ERRORS:
        pass
    raise ValueError(f"the list of samples {path!r} was damaged or replaced: start again")


class Strings:
    """Numbered strings of an index."""

    def __init__(self, index: Index, offset: int, n: int, n_bytes: int) -> None:
        self._index, self._offset, self._n, self._n_bytes = index, offset, n, n_bytes

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[str]:
        for first in range(0, self._n, _STRINGS_AT_ONCE):
            yield from self._read_strings(first, min(_STRINGS_AT_ONCE, self._n - first))

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < self._n:
            raise IndexError(index)
        return self._read_strings(index, 1)[0]

    def _read_strings(self, first: int, n: int) -> list[str]:
        ends = array("q", self._index.read(self._offset + 8 * first, 8 * (n + 1)))
        if not 0 <= ends[0] <= ends[-1] <= self._n_bytes:
            raise self._index.damaged_error()
        content = self._index.read(self._offset + 8 * (self._n + 1) + ends[0], ends[-1] - ends[0])
        return [os.fsdecode(content[begin - ends[0] : end - ends[0]]) for begin, end in itertools.pairwise(ends)]


class Numbers:
    """Numbered integers of an index."""

    def __init__(self, index: Index, offset: int, n: int) -> None:
        self._index, self._offset, self._n = index, offset, n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._n:
            raise IndexError(index)
        return int.from_bytes(self._index.read(self._offset + 8 * index, 8), sys.byteorder, signed=True)

    def to_numpy(self) -> npt.NDArray[np.int64]:
        """All of them, in memory."""
        return np.frombuffer(self._index.read(self._offset, 8 * self._n), np.int64)


def cached_index(
    path: str, kind: str, build: Callable[[], IndexData], *, depends: str = "", min_strings: int = MIN_CACHED_STRINGS
) -> Index:
    """The index of the file or folder `path`, from an earlier start if nothing has changed since.

    An index of at least `min_strings` strings is cached in a file that all processes of a machine read; if they start
    at once, one writes the file and the others wait. Raises what `build` raises.

    Args:
        kind: Distinguishes the indices of one path.
        depends: Describes what else the index depends on, such as the size of a file; if this text changes, the index
            is built again.
    """
    key = [_VERSION, sys.byteorder, kind]
    paths = _cache_paths(path, kind)

    def read_cached() -> Index | None:
        return next(filter(None, (_read_cache(cache_path, path, key, depends) for cache_path in paths)), None)

    if index := read_cached():
        return index
    with one_process_at_a_time(path, kind) as has_waited:
        if not has_waited:
            return read_cached() or _build_index(paths, path, build, key, depends, min_strings)
    # A process that waited without getting an index builds one without the lock: with the lock, all processes would do
    # so one after the other.
    return read_cached() or _index_in_memory(build(), key, depends)


def _build_index(
    cache_paths: list[str], path: str, build: Callable[[], IndexData], key: list[Any], depends: str, min_strings: int
) -> Index:
    """The index of what `build` returns. It is cached if it is long, and no file changed so recently that another
    change could leave its time of modification the same."""
    begin_ns = time.time_ns()
    data = build()
    n = sum(len(column) for column in data.columns.values() if isinstance(column, PackedStrings))
    is_settled = data.dependencies is None or data.dependencies.newest_ns < begin_ns - _CLOCK_TICK_NS
    if n >= min_strings and is_settled:
        for cache_path in cache_paths:
            with contextlib.suppress(OSError):
                _write_cache(cache_path, path, _serialize(data, key, depends))
                return _read_cache(cache_path, path, key, depends) or _index_in_memory(data, key, depends)
    return _index_in_memory(data, key, depends)


def _serialize(data: IndexData, key: list[Any], depends: str) -> list[bytes | memoryview]:
    """The content of an index: a line of JSON, and the columns."""
    columns = {_DEPENDENCIES: data.dependencies.lines if data.dependencies else PackedStrings(), **data.columns}
    descriptions, parts = list[Any](), list[bytes | memoryview]()
    for name, column in columns.items():
        parts += column.buffers if isinstance(column, PackedStrings) else [memoryview(column).cast("B")]
        descriptions.append([name, len(column), len(parts[-1]) if isinstance(column, PackedStrings) else None])
    header = {"key": key, "depends": depends, "fingerprint": data.fingerprint, "facts": dict(data.facts)}
    return [json.dumps({**header, "columns": descriptions}).encode() + b"\n", *parts]


def _index_in_memory(data: IndexData, key: list[Any], depends: str) -> Index:
    return Index(MemoryFile(b"".join(_serialize(data._replace(dependencies=None), key, depends))), "in memory")


def _cache_paths(path: str, kind: str) -> list[str]:
    """The possible files of an index: beside its file or folder, unless that is an address, and in the user's cache
    folder by machine, because machines that share a home may hold different data under the same path. An address means
    the same on all machines."""
    ending = f".{fingerprint_of([kind.encode()])[:8]}.index"
    # Absolute, because without a home expanduser leaves "~", and the variable may hold anything.
    home_cache = os.path.abspath(os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"))
    digest = fingerprint_of([os.fsencode(path) if is_url(path) else _machine_path(os.path.realpath(path))])
    paths = [os.path.join(home_cache, "tandem", "lists", f"{digest}{ending}")]
    if not is_url(path):
        parent, name = os.path.split(os.path.abspath(path))
        paths.insert(0, os.path.join(parent, f".{name}{ending}"))
    return paths


def _machine_path(path: str) -> bytes:
    return os.fsencode(f"{socket.gethostname()}:{path}")


def _write_cache(cache_path: str, path: str, parts: Iterable[bytes | memoryview]) -> None:
    """Write the file whole or not at all. The users who may read `path` may read it, too. Raises OSError."""
    folder, name = os.path.split(cache_path)
    os.makedirs(folder, exist_ok=True)
    # One name per machine, so that the leftover of a killed process is deleted; hashed, because `name` may be long.
    temporary_name = f".index-{fingerprint_of([_machine_path(name)])[:16]}"
    with replacing(Path(cache_path), name=temporary_name, mode=None, is_synced=False) as temporary:
        with create(temporary, 0o600) as file:
            for part in parts:
                file.write(part)
        readers = 0 if is_url(path) else stat.S_IMODE(os.stat(path).st_mode) & 0o444
        temporary.chmod(readers | 0o600)


def _read_cache(cache_path: str, path: str, key: list[Any], depends: str) -> Index | None:
    """The index in a file; None if there is no such file, or it is another index, out of date, or damaged."""
    try:
        file = open_regular(cache_path)
    except (OSError, ValueError):
        return None
    try:
        index = Index(LocalFile(file), cache_path)
        if (index.key, index.depends) == (key, depends) and _is_unchanged(path, index.strings(_DEPENDENCIES)):
            return index
    except READ_ERRORS:
        pass
    file.close()
    return None


def _is_unchanged(path: str, dependencies: Strings) -> bool:
    for line in dependencies:
        state, _, name = line.partition(" ")
        if state != _describe_status(status_of(os.path.join(path, name) if name else path)):
            return False
    return True


def status_of(path: str) -> os.stat_result | None:
    """The status of a file, None if it cannot be reached."""
    try:
        return os.stat(path)
    except OSError:
        return None


def _describe_status(status: os.stat_result | None) -> str:
    """A text that changes with the file, without the device number, which differs between NFS clients."""
    if status is None:
        return "none"
    times = status.st_mtime_ns, status.st_ctime_ns  # tools that copy folders may set the first
    return ":".join(map(str, (stat.S_IFMT(status.st_mode), status.st_ino, status.st_size, *times)))


def fingerprint_of(parts: Iterable[bytes | memoryview]) -> str:
    """A hash of bytes, one part after the other."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


@contextlib.contextmanager
def one_process_at_a_time(path: str, key: str) -> Iterator[bool]:
    """Context that only one process of this user on this machine enters at a time for a path and key; yields whether
    this process had to wait. On a file system without locks no process waits: the lock only saves work."""
    has_waited = False
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            # Lock one byte of one common file, because a file for each path would be left behind.
            lock = Path(tempfile.gettempdir(), f"tandem-{os.getuid()}.lock")
            file = stack.enter_context(open_appending(lock))
            if os.fstat(file.fileno()).st_uid != os.getuid():
                raise PermissionError("another user, who could hold the lock for ever, has made it")
            offset = int(fingerprint_of([os.fsencode(os.path.realpath(path)), key.encode()])[:14], 16)
            has_waited = wait_for_lock(file, byte=offset)
        yield has_waited
