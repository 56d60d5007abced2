"""Addresses of files on servers, and open files that are read at random."""

from __future__ import annotations

import io
import os
import re
import unicodedata
from typing import Any, Protocol

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# User and password of an address. If no @ precedes the first slash, a colon without a port begins a password that
# contains a slash.
USER = re.compile(r"(?<=://)(?:[^/?#]*|[^/?#:]*:(?!\d+/).*)@")


def is_address(path: str) -> bool:
    """Whether a path is the address of something on a server, such as s3://bucket/00000.tar."""
    return SCHEME.match(path) is not None


def shown(path: str) -> str:
    """A path for messages: an address without user, password and query, which may hold a signature."""
    return re.split("[?#]", USER.sub("", path))[0] if is_address(path) else path


def as_on_disk(path: str) -> str:
    """A local path in the Unicode form, composed or decomposed, that names on the disk have, because systems differ;
    unchanged if nothing exists in either form."""
    if path.isascii() or os.path.lexists(path):
        return path
    folder, name = os.path.split(path)
    candidates = [os.path.join(as_on_disk(folder), unicodedata.normalize(form, name)) for form in ("NFC", "NFD")]
    return next(filter(os.path.lexists, candidates), path)


class Bytes(Protocol):
    """An open file that is read at random."""

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
    """Bytes offset .. offset + size - 1 of an open file, as a read-only file. `error` holds an error of the file
    system, because C code that calls this class cannot raise it."""

    def __init__(self, file: Bytes, offset: int, size: int) -> None:
        self._file, self._offset, self._size, self._at = file, offset, size, 0
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
            content = self._file.pread(n, self._offset + self._at)
        except OSError as error:
            self.error = error
            return 0
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)
