"""Where the bytes of a sample are: in a file of its own, in a part of a tar, or in memory."""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple, Protocol

from tandem.files.reading import open_regular


class Source(NamedTuple):
    """A file, or the byte range of a file that holds one; and the part of the sound or video that clips are taken from.
    `member` is the name of the file inside a tar; `content` is a file in memory, of `size` bytes (`in_memory`)."""

    path: str
    offset: int = 0
    size: int | None = None
    start_seconds: float = 0.0
    end_seconds: float = math.inf
    member: str = ""
    content: Any = None

    @classmethod
    def in_memory(cls, content: Any, path: str, member: str = "") -> Source:
        """The bytes of a file, from something with the buffer protocol; `path` is what messages call it."""
        return cls(path, 0, len(content), member=member, content=content)

    @property
    def name(self) -> str:
        """The name of the file, by whose ending its kind is known."""
        return self.member or self.path


def parts_of(sources: Iterable[Source]) -> list[str]:
    """Which part of its file each source is, in seconds; empty if all are whole files."""
    parts = [(source.start_seconds, source.end_seconds) for source in sources]
    return [f"{begin} {end}" for begin, end in parts] if any(part != (0.0, math.inf) for part in parts) else []


class Places(Protocol):
    """Where the samples of a set are. `name` is the path of a file in its folder, or of a member in its tar;
    `fingerprint` is that of all names."""

    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...
    def source(self, index: int) -> Source: ...
    def describe(self, index: int) -> str: ...
    def name(self, index: int) -> str: ...


class FileWindow(io.RawIOBase):
    """Bytes offset .. offset + size - 1 of an open file, as a read-only file. `error` keeps an error of the file
    system, if there was one, because C code that calls this class cannot pass it on."""

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        self._descriptor, self._offset, self._size, self._at = file.fileno(), offset, size, 0
        self.error: OSError | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        n = min(len(buffer), self._size - self._at)
        if n <= 0:
            return 0
        try:
            content = os.pread(self._descriptor, n, self._offset + self._at)
        except OSError as error:
            self.error = error
            return 0
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


class MemoryFile(io.BytesIO):
    """A file in memory, in the form of a `FileWindow`; reading it causes no error."""

    error: OSError | None = None


@contextlib.contextmanager
def open_source(source: Source) -> Iterator[FileWindow | MemoryFile]:
    """The bytes of a source. Raises OSError, and ValueError, in one line, if there are none."""
    if source.content is not None:
        if not source.size:
            raise ValueError("the file is empty")
        yield MemoryFile(source.content)
        return
    with open_regular(source.path) as file:
        size = os.fstat(file.fileno()).st_size if source.size is None else source.size
        if size == 0:
            raise ValueError("the file is empty")
        yield FileWindow(file, source.offset, size)
