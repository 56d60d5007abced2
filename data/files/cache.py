"""What is found out about files once and kept beside them, or in the user's cache folder, for later starts: the indices
of tars, the lists of the files in a folder, the rows of a manifest.

A file that somebody else has made is not trusted: it is taken only if it is whole, and the names in it cannot lead out
of the folder of the samples (`find.Folder`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tandem.files.reading import DAMAGES, open_regular, parse_json
from tandem.files.writing import create, open_appending, replacing

from .packed import PackedStrings, StoredStrings, Strings

_VERSION = 1
FEWEST = 10_000  # strings that are kept: fewer are found in a tenth of a second
_LONGEST_HEADER = 1 << 16  # bytes
CLOCK_TICK_NS = 2 * 10**9  # two changes within one tick of a file system's clock have one time; FAT has the longest
_LONGEST_WAIT_SECONDS = 600.0
_WATCHED = "watched"


class Watched:
    """The files and folders on which a list depends, each with its state before it was read."""

    def __init__(self) -> None:
        self.lines, self.newest_ns = PackedStrings(), 0

    def add(self, name: str, status: os.stat_result | None) -> None:
        """`name` is relative to what the list is of, and empty for that itself; no status: there is no such file."""
        self.lines.append(f"{_state(status)} {name}")
        if status is not None:
            self.newest_ns = max(self.newest_ns, status.st_mtime_ns, status.st_ctime_ns)


class Lists(NamedTuple):
    """Lists of strings by name, and what they depend on."""

    parts: Mapping[str, Strings]
    watched: Watched


def status_of(path: str) -> os.stat_result | None:
    """The status of a file, None if there is none that can be reached."""
    try:
        return os.stat(path)
    except OSError:
        return None


def kept_lists(path: str, kind: str, names: Sequence[str], make: Callable[[], Lists]) -> Mapping[str, Strings]:
    """What `make` finds out about the file or folder `path`: kept from an earlier start if nothing has changed since.

    Long lists are kept in a file, from which all processes of a machine then read them; of those that start at once,
    one makes the file and the others wait for it. `kind` tells lists of one folder apart; `names` are those of the
    parts that `make` returns, in order.
    """
    key = json.dumps([_VERSION, sys.byteorder, kind])
    caches = cache_files(path, f".{hashlib.blake2b(key.encode(), digest_size=4).hexdigest()}.list", "lists")
    if (found := _load_one(caches, path, key, names)) is not None:
        return found
    if not any(map(_can_be_made, caches)):
        return make().parts
    with one_process_at_a_time(path, key) as has_waited:
        if not has_waited:
            return _load_one(caches, path, key, names) or _made(caches, path, key, make)
    # Who has waited lists without the lock, or where no list is kept in the end each would wait for those before it.
    return _load_one(caches, path, key, names) or make().parts


def _made(caches: list[str], path: str, key: str, make: Callable[[], Lists]) -> Mapping[str, Strings]:
    """What `make` finds out, kept if it is long and nothing changes meanwhile."""
    for attempt in range(2):
        if attempt:  # wait until the next change will have another time
            time.sleep(CLOCK_TICK_NS / 1e9)
        begin_ns = time.time_ns()
        made = make()
        if sum(map(len, made.parts.values())) < FEWEST:
            break
        if made.watched.newest_ns < begin_ns - CLOCK_TICK_NS:
            return _save_one(caches, path, key, made)
        if made.watched.newest_ns > time.time_ns():  # a clock was ahead, and no wait is long enough
            break
    return made.parts


def cache_files(path: str, ending: str, folder: str) -> list[str]:
    """Where something about a file or folder may be kept: beside it, or in this folder of the user's cache folder, by
    machine: several may share a home, and each hold another copy of the data under the same path."""
    parent, name = os.path.split(os.path.abspath(path))
    # Absolute, because a user without a home has "~" for one, and the variable may say anything.
    user = os.path.abspath(os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"))
    number = hashlib.blake2b(_here(os.path.realpath(path)), digest_size=16).hexdigest()
    return [os.path.join(parent, f".{name}{ending}"), os.path.join(user, "tandem", folder, f"{number}{ending}")]


def _here(path: str) -> bytes:
    return os.fsencode(f"{socket.gethostname()}:{path}")


@contextlib.contextmanager
def replaced(cache: str, path: str) -> Iterator[BinaryIO]:
    """A new file that takes the place of `cache` if the body succeeds. Whoever may read `path` may read it. Call it in
    `one_process_at_a_time`. Raises OSError."""
    folder, name = os.path.split(cache)
    os.makedirs(folder, exist_ok=True)
    # One name on each machine, so that what a killed process left is deleted; short, because `name` may be a long one.
    unfinished = f".index-{hashlib.blake2b(_here(name), digest_size=8).hexdigest()}"
    with replacing(Path(cache), name=unfinished, mode=None, is_synced=False) as temporary:
        with create(temporary, 0o600) as file:
            yield file
        temporary.chmod(stat.S_IMODE(os.stat(path).st_mode) & 0o444 | 0o600)


def _can_be_made(cache: str) -> bool:
    folder = os.path.dirname(cache)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return os.access(folder, os.W_OK)


def _load_one(caches: list[str], path: str, key: str, names: Sequence[str]) -> Mapping[str, Strings] | None:
    return next((found for cache in caches if (found := _load(cache, path, key, names)) is not None), None)


def _save_one(caches: list[str], path: str, key: str, lists: Lists) -> Mapping[str, Strings]:
    """The lists, read from the first file that could be made; else as they are."""
    for cache in caches:
        with contextlib.suppress(OSError):
            _save(cache, path, key, lists)
            return _load(cache, path, key, list(lists.parts)) or lists.parts
    return lists.parts


def _save(cache: str, path: str, key: str, lists: Lists) -> None:
    parts = {_WATCHED: lists.watched.lines, **{name: _packed(part) for name, part in lists.parts.items()}}
    described = [[name, len(part), len(part.buffers[1]), part.fingerprint] for name, part in parts.items()]
    with replaced(cache, path) as file:
        file.write(json.dumps({"key": key, "parts": described}).encode() + b"\n")
        for part in parts.values():
            for buffer in part.buffers:
                file.write(buffer)


def _packed(strings: Strings) -> PackedStrings:
    return strings if isinstance(strings, PackedStrings) else PackedStrings(strings)


def _load(cache: str, path: str, key: str, names: Sequence[str]) -> Mapping[str, Strings] | None:
    """The lists in a file; None if there is no such file, or it is of something else, out of date, or damaged."""
    try:
        file = open_regular(cache)
    except (OSError, ValueError):
        return None
    try:
        line = file.readline(_LONGEST_HEADER)
        header = parse_json(line)
        if header["key"] == key and [part[0] for part in header["parts"]] == [_WATCHED, *names]:
            parts, fingerprints, at = dict[str, StoredStrings](), dict[str, str](), len(line)
            for name, n, n_bytes, fingerprint in header["parts"]:
                if not (type(n) is type(n_bytes) is int and n >= 0 and n_bytes >= 0):
                    raise ValueError("no list has such a length")
                parts[name], fingerprints[name] = StoredStrings(file, cache, at, n, n_bytes), fingerprint
                at = parts[name].end
            watched = parts.pop(_WATCHED)
            if at == os.fstat(file.fileno()).st_size and _is_unchanged(path, watched):
                watched.check(fingerprints[_WATCHED])
                for name, part in parts.items():
                    part.check(fingerprints[name])
                return parts
    except DAMAGES:
        pass
    file.close()
    return None


def _is_unchanged(path: str, watched: Strings) -> bool:
    for line in watched:
        state, _, name = line.partition(" ")
        if state != _state(status_of(os.path.join(path, name) if name else path)):
            return False
    return len(watched) > 0


def _state(status: os.stat_result | None) -> str:
    """What is different after a change. Not the number of the device, which NFS has another one of on each machine."""
    if status is None:
        return "none"
    times = status.st_mtime_ns, status.st_ctime_ns  # tools that copy folders set the former as they like
    return ":".join(map(str, (stat.S_IFMT(status.st_mode), status.st_ino, status.st_size, *times)))


@contextlib.contextmanager
def one_process_at_a_time(path: str, key: str, *, longest_wait: float = _LONGEST_WAIT_SECONDS) -> Iterator[bool]:
    """Wait while another process of this user on this machine is in here with the same path and key, and say whether
    there was one. Not for ever, and not where there are no locks: the lock only saves work."""
    has_waited = False
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            # A lock of one byte of one file, because a file for each path would stay behind.
            lock = Path(tempfile.gettempdir(), f"tandem-{os.getuid()}.lock")
            file = stack.enter_context(open_appending(lock))
            if os.fstat(file.fileno()).st_uid != os.getuid():
                raise PermissionError("another user, who could hold the lock for ever, has made it")
            number = hashlib.blake2b(os.fsencode(os.path.realpath(path)) + key.encode(), digest_size=7).digest()
            deadline = time.monotonic() + longest_wait
            while not _locked(file, int.from_bytes(number, "big")):
                has_waited = True
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.05)
        yield has_waited


def _locked(file: BinaryIO, place: int) -> bool:
    """Whether this process now holds the lock of a byte. Raises OSError where there are no locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except (BlockingIOError, PermissionError):
        return False
    return True
