"""URLs, and open files with random access."""

from __future__ import annotations

import functools
import io
import os
import re
import unicodedata
from typing import Any, BinaryIO, Protocol

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# User and password of a URL, up to the @. The second alternative is for a password with a slash, user:pa/ss@host; it
# does not match digits and a slash after the colon, the port of a host whose path has an @.
CREDENTIALS = re.compile(r"(?<=://)(?:[^/?#]*|[^/?#:]*:(?!\d+/).*)@")


def is_url(path: str) -> bool:
    """Whether a path is a URL, such as s3://bucket/00000.tar."""
    return SCHEME.match(path) is not None


def redact(path: str) -> str:
    """A path for messages: a URL without user, password and query, which may hold a signature."""
    return re.split("[?#]", CREDENTIALS.sub("", path))[0] if is_url(path) else path


def match_unicode_form(path: str) -> str:
    """A local path in the Unicode form, NFC or NFD, in which it exists on the disk, because systems write names in
    different forms; unchanged if it exists in neither."""
    if path.isascii() or os.path.lexists(path):
        return path
    folder, name = os.path.split(path)
    forms = (unicodedata.normalize(form, name) for form in ("NFC", "NFD"))
    return next(filter(os.path.lexists, (os.path.join(match_unicode_form(folder), form) for form in forms)), path)


class RandomAccessFile(Protocol):
    """An open file with random access."""

    @property
    def size(self) -> int: ...
    def pread(self, size: int, offset: int) -> bytes:
        """At most `size` bytes from `offset`; fewer only at the end of the file. Raises OSError."""
        ...


class MemoryFile(io.BytesIO):
    """A `RandomAccessFile` in memory."""

    @property
    def size(self) -> int:
        return self.getbuffer().nbytes

    def pread(self, size: int, offset: int) -> bytes:
        return bytes(self.getbuffer()[offset : offset + size])


class SeekableFile(io.RawIOBase, RandomAccessFile):
    """A `RandomAccessFile` that libraries read from its position on. A subclass defines `size` and `pread`."""

    _position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence])
        return self._position

    def readinto(self, buffer: Any) -> int:
        n = min(len(buffer), self.size - self._position)
        content = self.pread(n, self._position) if n > 0 else b""
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


class LocalFile(SeekableFile):
    """An open file of this machine."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    @functools.cached_property
    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def pread(self, size: int, offset: int) -> bytes:
        return os.pread(self._file.fileno(), size, offset)


class FileWindow(SeekableFile):
    """Bytes offset .. offset + size - 1 of an open file; size None: to its end. `readinto` stores an error of the file
    system in `error` and returns 0, because C code that calls it cannot raise."""

    def __init__(self, file: RandomAccessFile, offset: int = 0, size: int | None = None) -> None:
        self._file, self._offset, self._size = file, offset, size
        self.error: OSError | None = None

    @property
    def size(self) -> int:
        return self._file.size - self._offset if self._size is None else self._size

    def pread(self, size: int, offset: int) -> bytes:
        n = size if self._size is None else max(0, min(size, self._size - offset))
        return self._file.pread(n, self._offset + offset)

    def readinto(self, buffer: Any) -> int:
        try:
            return super().readinto(buffer)
        except OSError as error:
            self.error = error
            return 0
