"""URLs, and open files with random access."""

from __future__ import annotations

import io
import os
import re
import unicodedata
from typing import Any, Protocol

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# User and password of a URL. If no @ precedes the first slash, a colon without a port begins a password with a slash.
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


class LocalFile:
    """An open file of this machine, by its descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self.size = descriptor, os.fstat(descriptor).st_size

    def pread(self, size: int, offset: int) -> bytes:
        return os.pread(self._descriptor, size, offset)


class FileWindow(io.RawIOBase):
    """Bytes offset .. offset + size - 1 of an open file, as a read-only file. `readinto` stores an error of the file
    system in `error` and returns 0, because C code that calls it cannot raise."""

    def __init__(self, file: RandomAccessFile, offset: int, size: int) -> None:
        self._file, self._offset, self._size, self._position = file, offset, size, 0
        self.error: OSError | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence])
        return self._position

    def readinto(self, buffer: Any) -> int:
        n = min(len(buffer), self._size - self._position)
        if n <= 0:
            return 0
        try:
            content = self._file.pread(n, self._offset + self._position)
        except OSError as error:
            self.error = error
            return 0
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)
