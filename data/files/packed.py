"""Many strings in little memory: in two flat buffers, or in a file from which all processes of a machine read them."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
import struct
from array import array
from collections.abc import Iterable, Iterator
from typing import BinaryIO, Protocol

_END, _PAIR = struct.Struct("=q"), struct.Struct("=qq")
_CHUNK = 1 << 20  # bytes that are hashed at a time
_READ_TOGETHER = 4096  # strings
_LONGEST = 1 << 23  # bytes of a stored string, and of those that are read together; a row of a manifest may have half


class Strings(Protocol):
    """Numbered strings. `fingerprint` is equal for equal strings in equal order."""

    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, index: int, /) -> str: ...


class PackedStrings:
    """Strings in two flat buffers. Reading a list of str would change reference counts, and so make every forked worker
    copy the memory pages of the list."""

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

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.buffers)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[str]:
        return (os.fsdecode(bytes(self._bytes[begin:end])) for begin, end in itertools.pairwise(self._ends))

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return os.fsdecode(bytes(self._bytes[self._ends[index] : self._ends[index + 1]]))


class StoredStrings:
    """Strings in a part of a file, as `PackedStrings.buffers` lie in memory. Nothing is kept in memory: the operating
    system holds what was read once, for all processes of the machine. If they cannot be read, or one has more than
    8 MiB, each method raises ValueError, in one line.

    Args:
        path: What messages call the file.
        offset: First byte of the ends, behind which the bytes of the strings follow.
        n, n_bytes: Number of strings, and of their bytes.
    """

    def __init__(self, file: BinaryIO, path: str, offset: int, n: int, n_bytes: int) -> None:
        self._file, self._path, self._offset, self._n, self._n_bytes = file, path, offset, n, n_bytes
        self._first = offset + 8 * (n + 1)
        self.end = self._first + n_bytes  # the byte behind them
        self.fingerprint = ""

    def check(self, fingerprint: str) -> None:
        """Raise ValueError if the strings do not have this fingerprint. Reads them all."""
        ends = (self._read(at, _END.size) for at in (self._offset, self._first - _END.size))
        # Else a file with holes, which takes no disk, could hold any number of bytes beside its strings.
        if [*map(_END.unpack, ends)] != [(0,), (self._n_bytes,)] or self._n_bytes > self._n * _LONGEST:
            raise self._damaged()
        chunks = (self._read(at, min(_CHUNK, self.end - at)) for at in range(self._offset, self.end, _CHUNK))
        self.fingerprint = fingerprint_of(chunks)
        if self.fingerprint != fingerprint:
            raise self._damaged()

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[str]:
        for index in range(0, self._n, _READ_TOGETHER):
            count = min(_READ_TOGETHER, self._n - index)
            ends = array("q", self._read(self._offset + 8 * index, 8 * (count + 1)))
            if ends[-1] - ends[0] > _LONGEST:
                yield from map(self.__getitem__, range(index, index + count))
                continue
            content = self._between(ends[0], ends[-1])
            for begin, end in itertools.pairwise(ends):
                yield os.fsdecode(content[begin - ends[0] : end - ends[0]])

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < self._n:
            raise IndexError(index)
        return os.fsdecode(self._between(*_PAIR.unpack(self._read(self._offset + 8 * index, _PAIR.size))))

    def __reduce__(self) -> tuple[type[PackedStrings], tuple[list[str]]]:
        return PackedStrings, (list(self),)  # an open file cannot be sent to a worker that is not forked

    def _between(self, begin: int, end: int) -> bytes:
        if not 0 <= begin <= end <= min(self._n_bytes, begin + _LONGEST):
            raise self._damaged()
        return self._read(self._first + begin, end - begin)

    def _read(self, at: int, size: int) -> bytes:
        try:
            content = os.pread(self._file.fileno(), size, at)
        except OSError:  # such as a file on another machine that somebody has replaced there
            content = b""
        if len(content) < size:
            raise self._damaged()
        return content

    def _damaged(self) -> ValueError:
        return ValueError(f"the list of samples {self._path!r} was damaged or replaced: delete it, and start again")


def fingerprint_of(parts: Iterable[bytes | memoryview]) -> str:
    """A hash of bytes, one part after the other."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def is_among(strings: Strings, string: str) -> bool:
    """Whether sorted strings hold this one."""
    place = bisect.bisect_left(strings, string)
    return place < len(strings) and strings[place] == string
