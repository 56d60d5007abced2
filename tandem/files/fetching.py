"""Published files, such as the weights of a network that judges images: fetched when they are asked for, once for all
processes of a machine, into torch.hub's cache (TORCH_HOME)."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

from .reading import printable
from .writing import create, open_appending, replacing, say

MIRROR = "TANDEM_WEIGHTS_MIRROR"  # in the environment: the address of a folder that holds the files under their names

_SECONDS = 60.0  # to wait for an answer, or for the next bytes
_TRIES, _PAUSE_SECONDS = 3, 1.0  # where a server gives no answer, or ends it too early
_BLOCK_BYTES = 1 << 20
_LONGEST_REASON = 1000  # bytes


class _NoAnswerError(ValueError):
    """The server may give the file if it is asked again."""


@dataclass(frozen=True)
class Published:
    """A file that its authors publish.

    Attributes:
        what: What it holds, in words.
        names: Under which the cache or a folder may hold it; one that is fetched gets the first.
        address: Where it is published.
        size: Bytes.
        sha256: Of the whole file, 64 hexadecimal digits.
    """

    what: str
    names: tuple[str, ...]
    address: str
    size: int
    sha256: str

    def __str__(self) -> str:
        names = " or ".join(self.names)
        return f"{self.what}: {names}, published as {self.address} ({_bytes(self.size)}, SHA-256 {self.sha256})"

    def inside(self, folder: Path) -> Path | None:
        """The file in a folder, under one of its names; None if there is none."""
        return next((folder / name for name in self.names if (folder / name).is_file()), None)


def is_offline() -> bool:
    """Whether the user forbids to fetch anything, by the variable that huggingface_hub has for it."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def fetched(file: Published, mark: Callable[[], None] = lambda: None) -> Path:
    """The file in the cache; one that is not there is fetched, by one process of those that ask for it at once. What
    has not the published size and checksum is not kept. A line says what is fetched, from where and to where.

    Args:
        mark: Called while the file comes, or another process fetches it, to show that this one is alive.

    Raises:
        ValueError: one line that names the file and where it is published, if it cannot be had.
    """
    import torch

    folder = Path(torch.hub.get_dir()) / "checkpoints"
    if found := file.inside(folder):
        return found
    path = folder / file.names[0]
    if is_offline():
        raise ValueError(f"{folder} does not hold {file}, and HF_HUB_OFFLINE forbids to fetch it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open_appending(folder / f".{path.name}.lock") as lock:  # its end, even by a kill, gives up the lock
            has_waited = _wait_for(lock.fileno(), mark)
            if path.is_file():
                return path
            if has_waited and (reason := os.pread(lock.fileno(), _LONGEST_REASON, 0)):
                raise ValueError(reason.decode(errors="replace"))  # each process would try in vain, one after the other
            lock.truncate(0)
            try:
                _fetch(file, path, mark)
            except ValueError as error:
                lock.write(str(error).encode()[:_LONGEST_REASON])
                raise
    except OSError as error:
        raise ValueError(f"cannot fetch {file} to {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"cannot fetch {file}: {printable(str(error))}") from None
    return path


def _wait_for(lock: int, mark: Callable[[], None]) -> bool:
    """Lock a file; whether another process had locked it."""
    has_waited = False
    while True:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            has_waited = True
            mark()
            time.sleep(0.1)
        else:
            return has_waited


def _fetch(file: Published, path: Path, mark: Callable[[], None]) -> None:
    """Raises ValueError, in words, if the server does not give the file, and OSError if the disk does not take it."""
    mirror = os.environ.get(MIRROR)
    address = f"{mirror.rstrip('/')}/{file.address.rpartition('/')[2]}" if mirror else file.address
    say(f"fetching {file.what} ({_bytes(file.size)}) from {address} to {path}")
    for left in reversed(range(_TRIES)):
        try:
            with replacing(path) as temporary, create(temporary) as target:
                length, digest = 0, hashlib.sha256()
                for block in _blocks(address):
                    mark()
                    length += len(block)
                    if length > file.size:
                        break
                    digest.update(block)
                    target.write(block)
                if length < file.size:
                    raise _NoAnswerError(f"{address} ended after {length} of {file.size} bytes")
                if digest.hexdigest() != file.sha256:
                    raise ValueError(f"{address} is another file: its SHA-256 or its size differs; nothing was kept")
            return
        except _NoAnswerError:
            if not left:
                raise
            time.sleep(_PAUSE_SECONDS)


def _blocks(address: str) -> Iterator[bytes]:
    try:
        with urllib.request.urlopen(address, timeout=_SECONDS) as answer:
            while block := answer.read(_BLOCK_BYTES):
                yield block
    except HTTPError as error:
        kind = _NoAnswerError if error.code >= 500 else ValueError
        raise kind(f"{address} answers {error.code} ({error.reason})") from None
    except (OSError, HTTPException) as error:
        raise _NoAnswerError(f"{address} gives no answer ({error or type(error).__name__})") from None


def _bytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size > 1e6 else f"{size} bytes"
