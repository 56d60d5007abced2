"""What is found out about a source once, for all later starts: its index, which is one file for a folder, a list of
tars or a manifest, beside it or in the user's cache folder.

A file that somebody else has made is not trusted, and at a start it is not read whole either: every access checks its
own bounds. Nothing is mapped into memory, because a process that touches a mapped file after its end is killed, while a
read of too few bytes is an error.
"""

from __future__ import annotations

import contextlib
import fcntl
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
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.io.reading import DAMAGES, open_regular, parse_json
from tandem.io.writing import create, open_appending, replacing

from .files import is_address
from .record import MOST_EXAMPLES

_VERSION = 3
FEWEST = 10_000  # strings in an index that is kept: fewer are found in a tenth of a second
_LONGEST_HEADER = 1 << 20  # bytes
_STRINGS_PER_READ = 4096  # strings
_CLOCK_TICK_NS = 2 * 10**9  # two changes within one tick of a file system's clock have one time; FAT has the longest
_DEPENDENCIES = "watched"


class PackedStrings:
    """Strings that are appended to two flat buffers: a list would take several times their memory."""

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
        """Where the strings end, int64 (n + 1), the first is 0; and their bytes, one string after the other."""
        return memoryview(self._ends).cast("B"), memoryview(self._bytes)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[str]:
        return (os.fsdecode(bytes(self._bytes[begin:end])) for begin, end in itertools.pairwise(self._ends))


class Watched:
    """The files and folders on which an index depends, each with its state before it was read."""

    def __init__(self) -> None:
        self.lines, self.newest_ns = PackedStrings(), 0

    def add(self, name: str, status: os.stat_result | None) -> None:
        """`name` is relative to what the index is of, and empty for that itself; no status: there is no such file."""
        self.lines.append(f"{_describe_status(status)} {name}")
        if status is not None:
            self.newest_ns = max(self.newest_ns, status.st_mtime_ns, status.st_ctime_ns)


class Made(NamedTuple):
    """What an index is to hold.

    columns: strings or int64 numbers, by name;
    fingerprint: see `records.record.Source`;
    facts: little that JSON can hold;
    watched: what the index depends on, if that is known after it was made alone.
    """

    columns: Mapping[str, PackedStrings | array[int]]
    fingerprint: str
    facts: Mapping[str, Any] = MappingProxyType({})
    watched: Watched | None = None


def largest(sizes: Any) -> list[int]:
    """The places of the largest of these sizes, the largest first; a negative one stands for none."""
    numbers = np.asarray(sizes, np.int64)
    order = np.argsort(-numbers, kind="stable")[:MOST_EXAMPLES]
    return [int(index) for index in order if numbers[index] >= 0]


class Index:
    """Columns in a file or in memory. Nothing of them is kept in a process: the operating system holds what was read
    once, for all processes of a machine. What cannot be read raises ValueError, in one line."""

    def __init__(self, content: BinaryIO | bytes, path: str) -> None:
        """`path` is that of the file. Raises what `DAMAGES` has if this is no index."""
        self._content, self._path = content, path
        self.header = self._pread(_LONGEST_HEADER, 0).partition(b"\n")[0]
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
        if offset != (len(content) if isinstance(content, bytes) else os.fstat(content.fileno()).st_size):
            raise ValueError("it has another size than its columns")

    def strings(self, name: str) -> Strings:
        column = self._columns.get(name)
        if not isinstance(column, Strings):
            raise self.damaged()
        return column

    def numbers(self, name: str, n: int) -> Numbers:
        """The column, which has to have n numbers."""
        column = self._columns.get(name)
        if not isinstance(column, Numbers) or len(column) != n:
            raise self.damaged()
        return column

    def examples(self, name: str) -> Sequence[int]:
        """See `Source`; they stand in the facts, and are numbers of the strings "names"."""
        indices = self.facts.get("examples")
        indices, n = indices.get(name, []) if isinstance(indices, Mapping) else None, len(self.strings("names"))
        if not (isinstance(indices, list) and all(type(index) is int and 0 <= index < n for index in indices)):
            raise self.damaged()
        return indices

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes."""
        try:
            content = self._pread(size, offset)
        except (OSError, OverflowError, MemoryError):  # such as a file on another machine that somebody has replaced
            content = b""
        if len(content) != size:
            raise self.damaged()
        return content

    def _pread(self, size: int, offset: int) -> bytes:
        if isinstance(self._content, bytes):
            return self._content[offset : offset + size]
        return os.pread(self._content.fileno(), size, offset)

    def damaged(self) -> ValueError:
        return ValueError(f"the list of samples {self._path!r} was damaged or replaced: delete it, and start again")

    def __reduce__(self) -> tuple[Callable[..., Index], tuple[Any, ...]]:
        """For a worker that is not forked, to which no open file can be sent."""
        is_file = not isinstance(self._content, bytes)
        return (_reopen, (self._path, self.header)) if is_file else (Index, (self._content, self._path))


def _reopen(path: str, header: bytes) -> Index:
    try:
        index = Index(open_regular(path), path)
        if index.header == header:
            return index
    except DAMAGES:
        pass
    raise ValueError(f"the list of samples {path!r} was damaged or replaced: start again")


class Strings:
    """Numbered strings of an index."""

    def __init__(self, index: Index, offset: int, n: int, n_bytes: int) -> None:
        self._index, self._offset, self._n, self._n_bytes = index, offset, n, n_bytes

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[str]:
        for first in range(0, self._n, _STRINGS_PER_READ):
            yield from self._read_strings(first, min(_STRINGS_PER_READ, self._n - first))

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < self._n:
            raise IndexError(index)
        return self._read_strings(index, 1)[0]

    def _read_strings(self, first: int, n: int) -> list[str]:
        ends = array("q", self._index.read(self._offset + 8 * first, 8 * (n + 1)))
        if not 0 <= ends[0] <= ends[-1] <= self._n_bytes:
            raise self._index.damaged()
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

    def whole(self) -> npt.NDArray[np.int64]:
        """All of them, in memory."""
        return np.frombuffer(self._index.read(self._offset, 8 * self._n), np.int64)


def kept(path: str, kind: str, make: Callable[[], Made], *, depends: str = "", fewest: int = FEWEST) -> Index:
    """The index of the file or folder `path`, kept from an earlier start if nothing has changed since.

    One of `fewest` strings is kept in a file, from which all processes of a machine then read it; of those that start
    at once, one makes the file and the others wait for it. Raises what `make` raises.

    Args:
        kind: Tells indices of one path apart.
        depends: What else the index depends on, such as the size of a file: if it is another one, it is made again.
    """
    key = [_VERSION, sys.byteorder, kind]
    caches = _cache_paths(path, kind)

    def read_cached() -> Index | None:
        return next((index for cache in caches if (index := _read_cache(cache, path, key, depends))), None)

    if index := read_cached():
        return index
    with one_process_at_a_time(path, kind) as has_waited:
        if not has_waited:
            return read_cached() or _make_index(caches, path, make, key, depends, fewest)
    # Who has waited makes one without the lock, or where none is kept in the end each would wait for those before it.
    return read_cached() or _index_in_memory(make(), key, depends)


def _make_index(
    caches: list[str], path: str, make: Callable[[], Made], key: list[Any], depends: str, fewest: int
) -> Index:
    """What `make` finds out, kept if it is long and nothing has changed just now, and so can change again without
    getting another time."""
    begin_ns = time.time_ns()
    data = make()
    n = sum(len(column) for column in data.columns.values() if isinstance(column, PackedStrings))
    is_settled = data.watched is None or data.watched.newest_ns < begin_ns - _CLOCK_TICK_NS
    for cache in caches if n >= fewest and is_settled else ():
        with contextlib.suppress(OSError):
            _write_cache(cache, path, _serialize(data, key, depends))
            return _read_cache(cache, path, key, depends) or _index_in_memory(data, key, depends)
    return _index_in_memory(data, key, depends)


def _serialize(data: Made, key: list[Any], depends: str) -> list[bytes | memoryview]:
    """The content of an index: a line of JSON, and the columns."""
    columns = {_DEPENDENCIES: data.watched.lines if data.watched else PackedStrings(), **data.columns}
    descriptions, parts = list[Any](), list[bytes | memoryview]()
    for name, column in columns.items():
        parts += column.buffers if isinstance(column, PackedStrings) else [memoryview(column).cast("B")]
        descriptions.append([name, len(column), len(parts[-1]) if isinstance(column, PackedStrings) else None])
    header = {"key": key, "depends": depends, "fingerprint": data.fingerprint, "facts": dict(data.facts)}
    return [json.dumps({**header, "columns": descriptions}).encode() + b"\n", *parts]


def _index_in_memory(data: Made, key: list[Any], depends: str) -> Index:
    return Index(b"".join(_serialize(data._replace(watched=None), key, depends)), "in memory")


def _cache_paths(path: str, kind: str) -> list[str]:
    """Where an index may be kept: beside its file or folder, unless that has an address, and in the user's cache folder
    by machine: several may share a home, and each hold another copy of the data under the same path. An address means
    the same on all."""
    ending = f".{fingerprint_of([kind.encode()])[:8]}.index"
    # Absolute, because a user without a home has "~" for one, and the variable may say anything.
    home_cache = os.path.abspath(os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"))
    digest = fingerprint_of([os.fsencode(path) if is_address(path) else _machine_path(os.path.realpath(path))])
    paths = [os.path.join(home_cache, "tandem", "lists", f"{digest}{ending}")]
    if not is_address(path):
        parent, name = os.path.split(os.path.abspath(path))
        paths.insert(0, os.path.join(parent, f".{name}{ending}"))
    return paths


def _machine_path(path: str) -> bytes:
    return os.fsencode(f"{socket.gethostname()}:{path}")


def _write_cache(cache: str, path: str, parts: Iterable[bytes | memoryview]) -> None:
    """Write the file whole or not at all; whoever may read `path` may read it. Raises OSError."""
    folder, name = os.path.split(cache)
    os.makedirs(folder, exist_ok=True)
    # One name on each machine, so that what a killed process left is deleted; short, because `name` may be a long one.
    temporary_name = f".index-{fingerprint_of([_machine_path(name)])[:16]}"
    with replacing(Path(cache), name=temporary_name, mode=None, is_synced=False) as temporary:
        with create(temporary, 0o600) as file:
            for part in parts:
                file.write(part)
        readers = 0 if is_address(path) else stat.S_IMODE(os.stat(path).st_mode) & 0o444
        temporary.chmod(readers | 0o600)


def _read_cache(cache: str, path: str, key: list[Any], depends: str) -> Index | None:
    """The index in a file; None if there is no such file, or it is of something else, out of date, or damaged."""
    try:
        file = open_regular(cache)
    except (OSError, ValueError):
        return None
    try:
        index = Index(file, cache)
        if (index.key, index.depends) == (key, depends) and _is_unchanged(path, index.strings(_DEPENDENCIES)):
            return index
    except DAMAGES:
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
    """The status of a file, None if there is none that can be reached."""
    try:
        return os.stat(path)
    except OSError:
        return None


def _describe_status(status: os.stat_result | None) -> str:
    """What is different after a change. Not the number of the device, which NFS has another one of on each machine."""
    if status is None:
        return "none"
    times = status.st_mtime_ns, status.st_ctime_ns  # tools that copy folders set the former as they like
    return ":".join(map(str, (stat.S_IFMT(status.st_mode), status.st_ino, status.st_size, *times)))


def fingerprint_of(parts: Iterable[bytes | memoryview]) -> str:
    """A hash of bytes, one part after the other."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


@contextlib.contextmanager
def one_process_at_a_time(path: str, key: str) -> Iterator[bool]:
    """Wait while another process of this user on this machine is in here with the same path and key, and say whether
    there was one. Where there are no locks, nobody waits: the lock only saves work."""
    has_waited = False
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            # A lock of one byte of one file, because a file for each path would stay behind.
            lock = Path(tempfile.gettempdir(), f"tandem-{os.getuid()}.lock")
            file = stack.enter_context(open_appending(lock))
            if os.fstat(file.fileno()).st_uid != os.getuid():
                raise PermissionError("another user, who could hold the lock for ever, has made it")
            offset = int(fingerprint_of([os.fsencode(os.path.realpath(path)), key.encode()])[:14], 16)
            while not _try_lock(file, offset):  # a call that blocks uses no processor, as one that hangs
                has_waited = True
                time.sleep(0.1)
        yield has_waited


def _try_lock(file: BinaryIO, offset: int) -> bool:
    """Whether this process now holds the lock of a byte. Raises OSError where there are no locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
    except (BlockingIOError, PermissionError):
        return False
    return True
