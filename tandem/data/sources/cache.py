"""A bounded cache of whole files on the local disk, shared by all processes of a machine."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

_PIECE = 16 << 20  # bytes that are fetched at a time


class ShardCache:
    """Whole files in a folder of the local disk, of at most `limit` bytes together. Many processes may use it at once:
    one fetches a file, and the others wait for it. The least recently used files are deleted; a process that has one
    open can still read it.

    Raises OSError, if the folder cannot be made or written to."""

    def __init__(self, folder: str | Path, limit: int) -> None:
        self._folder, self.limit = Path(folder), limit
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder), self._locked_folder():
            pass

    def open(self, key: str, size: int, read: Callable[[int, int], bytes]) -> BinaryIO | None:
        """The local copy of the file with this key and `size`; if there is none, `read`(size, offset) fetches it. None
        if the cache has no room for it. Raises OSError, and what `read` raises."""
        path = self._folder / hashlib.sha256(key.encode()).hexdigest()
        part_path = path.with_suffix(".part")
        while size <= self.limit:
            with contextlib.suppress(FileNotFoundError):
                file = open(path, "rb")  # noqa: SIM115
                now = time.time_ns()  # finer than the time that os.utime would set by itself
                os.utime(file.fileno(), ns=(now, now))
                return file
            descriptor = os.open(part_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "r+b") as part, _locked(part):
                if not _is_at_path(part, part_path):
                    continue  # another process has finished or deleted it
                with contextlib.ExitStack() as cleanup:
                    cleanup.callback(part_path.unlink)
                    if path.exists():
                        continue
                    if not self._make_room(part, size):
                        break
                    for offset in range(0, size, _PIECE):
                        part.write(read(_PIECE, offset))
                    part.flush()
                    os.fsync(part.fileno())  # after a loss of power, the final file must not hold zeros
                    with self._locked_folder():
                        os.replace(part_path, path)
                    cleanup.pop_all()
        return None

    @contextlib.contextmanager
    def _locked_folder(self) -> Iterator[None]:
        """Context in which the folder is locked, to count, rename or delete files."""
        with open(self._folder / "lock", "ab") as lock, _locked(lock):
            yield

    def _make_room(self, part: BinaryIO, size: int) -> bool:
        """Reserve `size` bytes of the disk for the file `part`, and delete others until all fit. Returns whether they
        do: files that other processes are fetching are not deleted."""
        with self._locked_folder():
            os.truncate(part.fileno(), 0)  # a killed process may have left some content
            files = []
            for path in filter(_is_cache_file, self._folder.iterdir()):
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    files.append((status.st_mtime, status.st_size, path))
            total = size + sum(n_bytes for _, n_bytes, _ in files)
            for _, n_bytes, path in sorted(files):
                if total > self.limit and n_bytes and not (path.suffix == ".part" and _is_locked(path)):
                    path.unlink(missing_ok=True)
                    total -= n_bytes
            # If the disk is full, this raises before anything is fetched; macOS has no posix_fallocate.
            if size and total <= self.limit and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(part.fileno(), 0, size)
            return total <= self.limit


@contextlib.contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    """Context in which a file is locked. It unlocks explicitly, because closing the file would not unlock it if a
    process that was forked meanwhile has it open, too."""
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _is_cache_file(path: Path) -> bool:
    """Whether the cache wrote this file: a user may choose a folder with other files."""
    return re.fullmatch(r"[0-9a-f]{64}(\.part)?", path.name) is not None


def _is_at_path(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is still the one at the path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _is_locked(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(file, fcntl.LOCK_UN)
    return False
