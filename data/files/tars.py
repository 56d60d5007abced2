"""Webdataset tars, read in any order by an index of where each sample's members begin. The index is made once, from the
headers only."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.files.reading import DAMAGES, open_regular

from ..bad_samples import reason_of
from .cache import cache_files, one_process_at_a_time, replaced
from .packed import PackedStrings, fingerprint_of
from .source import Source

_VERSION = 1
_BLOCK = tarfile.BLOCKSIZE
_DAMAGES: tuple[type[Exception], ...] = (tarfile.TarError, *DAMAGES)
_LONGEST_HEADER = 1 << 20  # bytes; far more than a long name or the extended headers of a file need


class Members(NamedTuple):
    """Which members of a tar are indexed. Members with equal names up to the first dot are a sample.

    noun: what messages call a sample;
    kinds: the endings of each kind of member; one of the first kind makes a sample, the others stand beside it;
    suffix: a part of the names of the files that keep the index, if it is not the index of sounds;
    whole: whether an ending has to be all of a name after its first dot, so that "0.mask.png" is no ".png".
    """

    noun: str
    kinds: tuple[tuple[str, ...], ...]
    suffix: str = ""
    whole: bool = False

    def kind(self, base: str, stem: str) -> int | None:
        """The kind of a member, by its name without folders and by that name up to its first dot; None if of none."""
        ending, name = base[len(stem) :].lower(), base.lower()
        found = (k for k, ends in enumerate(self.kinds) if name.endswith(ends) and (not self.whole or ending in ends))
        return None if base.startswith(".") else next(found, None)


class TarIndex(NamedTuple):
    """The samples of a tar, in its order: the n names of their first members, and the first byte and the size of each
    kind of member, -1 if there is none, int64 (n, 2 * kinds)."""

    names: Sequence[str]
    table: npt.NDArray[np.int64]


class Tars:
    """The samples of several tars, numbered in the order of tars and members.

    Raises ValueError, in one line, if a tar is damaged or none holds a sample.
    """

    def __init__(self, paths: Sequence[str], members: Members) -> None:
        self._paths, self._names = list(paths), PackedStrings()
        tables = []
        for path in self._paths:
            index = open_index(path, members)
            tables.append(index.table)
            for name in index.names:
                self._names.append(name)
        self.table = np.concatenate([np.zeros((0, 2 * len(members.kinds)), np.int64), *tables])
        self._firsts = np.cumsum([0, *map(len, tables)])
        if not len(self):
            raise ValueError(f"no {members.noun} ({' '.join(members.kinds[0])}) in {self}")
        # Of the same samples in the same tars, with the same members beside them; other members may lie between.
        found = (self._firsts.astype(np.int64), self.table[:, 1::2] >= 0)
        self.fingerprint = fingerprint_of([*self._names.buffers, *(array.tobytes() for array in found)])

    def __len__(self) -> int:
        return len(self.table)

    def __str__(self) -> str:
        first, n = repr(self._paths[0]), len(self._paths)
        return first if n == 1 else f"{n} tars, the first {first}"

    def source(self, index: int) -> Source:
        """Where the first member of a sample is."""
        offset, size = self.table[index, :2].tolist()
        return Source(self.path(index), offset, size, member=self._names[index])

    def beside(self, index: int, kind: int) -> tuple[int, int] | None:
        """First byte and size of another member of a sample, None if it has none of this kind (from 1)."""
        offset, size = self.table[index, 2 * kind : 2 * kind + 2].tolist()
        return (offset, size) if size >= 0 else None

    @property
    def paths(self) -> Sequence[str]:
        return self._paths

    @property
    def shards(self) -> list[range]:
        """The indices of the samples in each tar."""
        return [range(int(first), int(end)) for first, end in itertools.pairwise(self._firsts)]

    def shard(self, index: int) -> int:
        """The place of the tar that holds a sample."""
        return int(np.searchsorted(self._firsts, index, side="right")) - 1

    def path(self, index: int) -> str:
        """The tar that holds a sample."""
        return self._paths[self.shard(index)]

    def name(self, index: int) -> str:
        """The name of a sample's first member."""
        return self._names[index]

    def describe(self, index: int) -> str:
        return f"{self.path(index)}/{self._names[index]}"


def stem_of(name: str) -> str:
    """The name of a member without folders, up to its first dot: the key of a sample."""
    return name.rpartition("/")[2].partition(".")[0]


def open_index(path: str, members: Members) -> TarIndex:
    """The index of a tar. It is read from a file beside the tar or in the user's cache folder, if the size and the time
    of change in that file are still those of the tar; else it is made and, if possible, saved there. Any number of
    processes may do so at once.

    Raises ValueError, in one line, if the tar cannot be read, is damaged or cut off.
    """
    try:
        status = os.stat(path)
        endings = zlib.crc32(repr(members.kinds).encode())  # a later version may read more of them
        key = np.array([_VERSION, status.st_size, status.st_mtime_ns, endings], np.int64)
        caches = cache_files(path, f"{members.suffix}.index.npz", "tars")
        for cache in caches:
            if (index := _load_index(cache, key, len(members.kinds), status.st_size)) is not None:
                return index
        index = scan(path, members)
    except OSError as error:
        raise ValueError(f"cannot read the tar {path!r}: {reason_of(error)}") from None
    with one_process_at_a_time(path, members.suffix, longest_wait=0) as is_being_saved:
        for cache in [] if is_being_saved else caches:
            with contextlib.suppress(OSError):
                _save_index(cache, path, key, index)
                break
    return index


def scan(path: str, members: Members) -> TarIndex:
    """Make the index of a tar. Only the headers of its members are read.

    Raises ValueError, in one line, if the tar is damaged or cut off, or two samples have one name; OSError if it
    cannot be opened.
    """
    samples: dict[str, tuple[str, list[int]]] = {}
    n_columns = 2 * len(members.kinds)
    for name, offset, size in _members(path):
        folder, _, base = name.rpartition("/")
        stem = stem_of(base)
        kind = members.kind(base, stem)
        if kind is None:
            continue
        key = f"{folder}/{stem}"
        first, places = samples.get(key, ("", [-1] * n_columns))
        if (kind == 0 or members.whole) and places[2 * kind + 1] >= 0:
            of_one_name = f"{members.noun}s of one name, {first!r} and {name!r}"
            beside_one = f"files like {name!r} for one {members.noun}"
            raise ValueError(f"the tar {path!r} holds two {beside_one if kind else of_one_name}")
        places[2 * kind : 2 * kind + 2] = offset, size
        samples[key] = (name if kind == 0 else first, places)
    found = [(name, places) for name, places in samples.values() if name]
    table = np.array([places for _, places in found], np.int64).reshape(-1, n_columns)
    return TarIndex([name for name, _ in found], table)


class _Headers:
    """An open tar, of which no more than a header or a long name is read at once, whatever length the tar claims."""

    def __init__(self, file: io.FileIO) -> None:
        self._file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _LONGEST_HEADER:
            raise tarfile.ReadError(f"it claims a header of {size} bytes")
        return self._file.read(size)


def _members(path: str) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and size of every file in a tar."""
    with open_regular(path) as file:
        n_bytes = os.fstat(file.fileno()).st_size
        try:
            unbuffered: Any = _Headers(io.FileIO(file.fileno(), closefd=False))  # headers are small and far apart
            with tarfile.open(fileobj=unbuffered, mode="r:") as tar:
                begin = -1
                while (member := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined]  # the list would grow with the tar
                    if not begin < tar.offset or member.size < 0:
                        raise tarfile.ReadError(f"{member.name!r} has a size below 0")
                    begin = tar.offset
                    if member.offset_data + (member.size if member.isreg() else 0) > n_bytes:
                        raise tarfile.ReadError(f"{member.name!r} lies beyond its end")
                    if member.isreg() and not member.issparse():
                        yield member.name, member.offset_data, member.size
                end = tar.offset
        except OSError:
            raise
        except _DAMAGES as error:
            raise ValueError(f"the tar {path!r} is damaged or cut off: {error}") from None
        # Check the end, because tarfile stops silently at anything that is no header; a whole tar ends with zeros.
        if os.pread(file.fileno(), _BLOCK, min(end, n_bytes)) != bytes(_BLOCK):
            without_end = f"it ends at byte {n_bytes} without a mark of the end"
            where = f"no header at byte {end}" if end < n_bytes else without_end
            raise ValueError(f"the tar {path!r} is damaged or cut off: {where}")


def _load_index(cache: str, key: npt.NDArray[np.int64], n_kinds: int, n_bytes: int) -> TarIndex | None:
    """The index in a file; None if there is no such file, or it is of another tar, or damaged. `n_bytes` is the size of
    the tar, which is larger than its index."""
    try:
        with open_regular(cache, limit=n_bytes + _LONGEST_HEADER) as file:
            with zipfile.ZipFile(file) as archive:
                if any(member.compress_type for member in archive.infolist()):
                    return None  # it would unpack to more than the file
            with np.load(file, allow_pickle=False) as stored:
                table, ends, text = stored["table"], stored["ends"], stored["names"].tobytes()
                is_table = table.shape == (len(ends), 2 * n_kinds) and table.dtype == np.int64
                if not (is_table and np.array_equal(stored["key"], key)):
                    return None
        offsets, sizes = table[:, ::2], table[:, 1::2]
        if not ((sizes == -1) | ((offsets >= 0) & (sizes >= 0) & (offsets <= n_bytes - sizes))).all():
            return None
        begins = [0, *ends.tolist()]
        return TarIndex([os.fsdecode(text[a:b]) for a, b in itertools.pairwise(begins)], table)
    except DAMAGES:
        return None


def _save_index(cache: str, path: str, key: npt.NDArray[np.int64], index: TarIndex) -> None:
    """Write the file whole or not at all. Raises OSError."""
    encoded = [os.fsencode(name) for name in index.names]
    content: dict[str, Any] = {
        "key": key,
        "table": index.table,
        "ends": np.cumsum([len(name) for name in encoded], dtype=np.int64),
        "names": np.frombuffer(b"".join(encoded), np.uint8),
    }
    with replaced(cache, path) as file:
        np.savez(file, **content)
