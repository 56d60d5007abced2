"""Downloads of published files, such as the weights of a network for FID, when they are needed. One process of a
machine fetches a file for all of them, into the cache of torch.hub (TORCH_HOME) or of huggingface_hub (HF_HOME).

torch.hub's own function keeps partial files of killed processes, has no timeout, and stores anything that a server
sends before it checks the checksum.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

from .installed import missing_package
from .reading import error_text, printable
from .writing import create, open_appending, replacing, say, wait_for_lock

MIRROR = "TANDEM_WEIGHTS_MIRROR"  # environment variable: the address of a folder with the files under their names

TIMEOUT_SECONDS = 60.0  # timeout of an answer and of the next bytes
_MAX_ATTEMPTS, _PAUSE_SECONDS = 3, 1.0  # while a server gives no answer, or an incomplete one
_BUSY = 408, 429  # a server that is busy (RFC 9110, section 15.5.9; RFC 6585, section 4)
_BLOCK_BYTES = 1 << 20
_LONGEST_REASON = 1000  # bytes


class _NoAnswerError(ValueError):
    """The server gave no answer, or an incomplete one: another attempt may succeed."""


@dataclass(frozen=True)
class PublishedFile:
    """A file published by its authors.

    Attributes:
        description: Its content, in words.
        names: Its possible names in the cache or a folder; a fetched file gets the first.
        address: Where it is published.
        size: Bytes.
        sha256: Of the whole file, 64 hexadecimal digits.
    """

    description: str
    names: tuple[str, ...]
    address: str
    size: int
    sha256: str

    def __str__(self) -> str:
        facts = f"{_size_text(self.size)}, SHA-256 {self.sha256}"
        return f"{self.description}: {' or '.join(self.names)}, published as {self.address} ({facts})"

    def find_in(self, folder: Path) -> Path | None:
        """The file in a folder, under one of its names; None if there is none."""
        return next((folder / name for name in self.names if (folder / name).is_file()), None)


def is_offline() -> bool:
    """Whether the user forbids fetching, by huggingface_hub's environment variable."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def fetch_file(file: PublishedFile, heartbeat: Callable[[], None] = lambda: None) -> Path:
    """The file in the cache; if it is missing, one of the processes that request it fetches it. A download without the
    published size and checksum is deleted. A line states the file, its source and its destination.

    Args:
        heartbeat: Called while this or another process fetches the file.

    Raises:
        ValueError: one line with the file and its address, if it cannot be fetched.
    """
    import torch

    folder = Path(torch.hub.get_dir()) / "checkpoints"
    path = folder / file.names[0]
    return _fetch_once(path, str(file), lambda: file.find_in(folder), lambda: _fetch(file, path, heartbeat), heartbeat)


def fetch_from_hub(
    description: str, model: str, name: str, heartbeat: Callable[[], None] = lambda: None, *,
    revision: str | None = None,
) -> Path:  # fmt: skip
    """A file of a model, USER/NAME, of the Hugging Face Hub, in the cache of huggingface_hub; fetched as by
    `fetch_file`, and compared with the Hub's checksum. ``revision`` is a branch, a tag or a commit; None: main.

    Raises:
        ValueError: as `fetch_file`, or huggingface_hub is missing.
    """
    hub = hub_library(f"fetching {description}")

    class HeartbeatBar(hub.utils.tqdm):  # type: ignore[name-defined]
        def update(self, n: float | None = 1) -> bool | None:
            heartbeat()
            return super().update(n)

    address = hub.hf_hub_url(model, name, revision=revision)
    cache = Path(hub.constants.HF_HUB_CACHE)

    def find() -> Path | None:
        cached = hub.try_to_load_from_cache(model, name, revision=revision)
        return Path(cached) if isinstance(cached, str) else None

    def fetch() -> None:
        try:
            published = hub.get_hf_file_metadata(address, timeout=TIMEOUT_SECONDS)
            say(f"fetching {description} ({_size_text(published.size or 0)}) from {address} to {cache}")
            commit = published.commit_hash
            path = Path(hub.hf_hub_download(model, name, revision=commit, tqdm_class=HeartbeatBar))
            if _hub_checksum(path, published.etag or "") != published.etag:
                path.resolve().unlink()
                path.unlink()
                raise ValueError("the download has another checksum and was deleted")
            # The second call records in the cache the commit of the branch; without the record `find` finds nothing.
            hub.hf_hub_download(model, name, revision=revision)
        except Exception as error:  # huggingface_hub uses one of two HTTP libraries, depending on its version
            raise ValueError(error_text(error)) from None

    lock_stem = cache / f"{model.replace('/', '--')}--{name}"
    return _fetch_once(lock_stem, f"{description}: {address}", find, fetch, heartbeat)


def hub_library(purpose: str) -> Any:
    """The package huggingface_hub, silent in log files and with a timeout; ValueError if it is missing."""
    try:
        import huggingface_hub.constants
        import huggingface_hub.utils
    except ImportError as error:
        raise missing_package(purpose, error.name or "huggingface_hub", "hub") from None
    huggingface_hub.utils.logging.set_verbosity_error()  # each retry would print a line
    if not sys.stderr.isatty():
        huggingface_hub.utils.disable_progress_bars()
    huggingface_hub.utils.get_session().timeout = TIMEOUT_SECONDS  # the default is to wait for ever
    return huggingface_hub


def _hub_checksum(path: Path, expected: str) -> str:
    """The SHA-256 of a file, or git's SHA-1 if `expected` is one: the Hub states that for small files."""
    digest = hashlib.sha256() if len(expected) == 64 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _fetch_once(
    path: Path,
    description: str,
    find: Callable[[], Path | None],
    fetch: Callable[[], None],
    heartbeat: Callable[[], None],
) -> Path:
    """The file that `find` returns, after one process has called `fetch` if necessary. `path` names the lock file."""
    if file := find():
        return file
    if is_offline():
        advice = "give its file, or copy this folder from a machine that has fetched it"
        raise ValueError(f"{path.parent} does not hold {description}, and HF_HUB_OFFLINE forbids to fetch it: {advice}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_appending(path.with_name(f".{path.name}.lock")) as lock:  # released even if the process is killed
            has_waited = wait_for_lock(lock, heartbeat)
            if file := find():
                return file
            if has_waited and (reason := os.pread(lock.fileno(), _LONGEST_REASON, 0)):
                # Do not try again: all processes would try in vain, one after the other.
                raise ValueError(reason.decode(errors="replace"))
            lock.truncate(0)
            try:
                fetch()
            except ValueError as error:
                lock.write(str(error).encode()[:_LONGEST_REASON])
                raise
    except OSError as error:
        raise ValueError(f"cannot fetch {description} to {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"cannot fetch {description}: {printable(str(error))}") from None
    file = find()
    assert file
    return file


def _fetch(file: PublishedFile, path: Path, heartbeat: Callable[[], None]) -> None:
    """Download a file to `path`. Raises ValueError if the download fails, and OSError if the disk does."""
    mirror = os.environ.get(MIRROR)
    if mirror and "@" in urlsplit(mirror).netloc:
        raise ValueError(f"{MIRROR} holds a password, which would stand in the log: give an address without one")
    address = f"{mirror.rstrip('/')}/{file.address.rpartition('/')[2]}" if mirror else file.address
    say(f"fetching {file.description} ({_size_text(file.size)}) from {address} to {path}")
    for attempt in range(1, _MAX_ATTEMPTS + 1):
        try:
            with replacing(path) as temporary, create(temporary) as target, _progress_bar(file.size) as progress:
                length, digest = 0, hashlib.sha256()
                for block in _read_blocks(address):
                    heartbeat()
                    progress.update(len(block))
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
            if attempt == _MAX_ATTEMPTS:
                raise
            time.sleep(_PAUSE_SECONDS)


def _read_blocks(address: str) -> Iterator[bytes]:
    """The content at an address. Raises ValueError; `_NoAnswerError` if another attempt may succeed."""
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as answer:
            while block := answer.read(_BLOCK_BYTES):
                yield block
    except HTTPError as error:
        error_class = _NoAnswerError if error.code >= 500 or error.code in _BUSY else ValueError
        raise error_class(f"{address} answers {error.code} ({error.reason})") from None
    except (OSError, HTTPException) as error:
        raise _NoAnswerError(f"{address} gives no answer ({error or type(error).__name__})") from None


def _progress_bar(size: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=size, unit="B", unit_scale=True, leave=False, disable=None)  # None: disabled without a terminal


def _size_text(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size > 1e6 else f"{size} bytes"
