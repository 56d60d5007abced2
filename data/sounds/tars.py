"""Webdataset tars of sounds, read in any order by an index of where each sound and its texts begin. The index is made
once, from the headers only."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..bad_samples import reason_of
from ..packed import PackedStrings
from .decoding import ENDINGS, ClipDecoder, Source
from .sidecars import NO_CAPTION, TEXT_ENDINGS, Texts, read_texts

_VERSION = 1
_BLOCK = tarfile.BLOCKSIZE
# Columns of the table: first byte and size of the sound, the .json and the .txt of a sample; -1 if there is none.
_KINDS = (ENDINGS, *((ending,) for ending in TEXT_ENDINGS))
_COLUMNS = 2 * len(_KINDS)


class TarIndex(NamedTuple):
    """The sounds of a tar, in its order: their n names and their places, int64 (n, 6), see `_KINDS`."""

    names: Sequence[str]
    table: npt.NDArray[np.int64]


class Tars:
    """The sounds of tars. Members whose names are equal up to the first dot after the folder are a sample: a sound,
    and a .json (see `texts_of_object`) or .txt (a caption per line). See `Sounds` for the methods.

    Raises ValueError, in one line, if a tar is damaged, or none holds a sound, or no sound has a text.
    """

    def __init__(self, paths: Sequence[str], clips: ClipDecoder) -> None:
        self._clips, self._paths = clips, list(paths)
        self._names = PackedStrings()
        tables = []
        for index in map(open_index, self._paths):
            tables.append(index.table)
            for name in index.names:
                self._names.append(name)
        self._table = np.concatenate([np.zeros((0, _COLUMNS), np.int64), *tables])
        self._firsts = np.cumsum([0, *map(len, tables)])
        if not len(self):
            raise ValueError(f"no sound ({' '.join(ENDINGS)}) in {_counted(self._paths)}")
        if not (self._table[:, 2::2] >= 0).any():
            raise ValueError(f"no sound in {_counted(self._paths)} has a caption, a .json or .txt of the same name")

    def __len__(self) -> int:
        return len(self._table)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        offset, size = map(int, self._table[index, :2])
        return self._clips.load(Source(self._path(index), offset, size), index, epoch, augment)

    def texts(self, index: int) -> Texts:
        places = self._table[index, 2:].reshape(-1, 2).tolist()
        for (offset, size), ending in zip(places, TEXT_ENDINGS, strict=True):
            if size >= 0:
                return read_texts(self._path(index), ending, offset, size)
        raise ValueError(f"{NO_CAPTION}: the tar holds neither a .txt nor a .json of its name")

    def describe(self, index: int) -> str:
        return f"{self._path(index)}/{self._names[index]}"

    def _path(self, index: int) -> str:
        return self._paths[int(np.searchsorted(self._firsts, index, side="right")) - 1]


def open_index(path: str) -> TarIndex:
    """The index of a tar. It is read from a file beside the tar or in the user's cache folder, if the size and the time
    of change in that file are still those of the tar; else it is made and, if possible, saved there. Any number of
    processes may do so at once.

    Raises ValueError, in one line, if the tar cannot be read, is damaged or cut off.
    """
    try:
        status = os.stat(path)
        key = np.array([_VERSION, status.st_size, status.st_mtime_ns], np.int64)
        for cache in _cache_files(path):
            if (index := _load_index(cache, key)) is not None:
                return index
        index = scan(path)
    except OSError as error:
        raise ValueError(f"cannot read the tar {path!r}: {reason_of(error)}") from None
    for cache in _cache_files(path):
        with contextlib.suppress(OSError):
            _save_index(cache, key, index)
            break
    return index


def scan(path: str) -> TarIndex:
    """Make the index of a tar. Only the headers of its members are read.

    Raises ValueError, in one line, if the tar is damaged or cut off, or two sounds have one name; OSError if it
    cannot be opened.
    """
    samples: dict[str, tuple[str, list[int]]] = {}
    for name, offset, size in _members(path):
        folder, _, base = name.rpartition("/")
        stem, _, _ = base.partition(".")
        lower = base.lower()
        kind = next((kind for kind, endings in enumerate(_KINDS) if lower.endswith(endings)), None)
        if kind is None or base.startswith("."):
            continue
        key = f"{folder}/{stem}"
        sound, places = samples.get(key, ("", [-1] * _COLUMNS))
        if kind == 0 and places[1] >= 0:
            raise ValueError(f"the tar {path!r} holds two sounds of one name, {sound!r} and {name!r}")
        places[2 * kind : 2 * kind + 2] = offset, size
        samples[key] = (name if kind == 0 else sound, places)
    sounds = [(name, places) for name, places in samples.values() if name]
    table = np.array([places for _, places in sounds], np.int64).reshape(-1, _COLUMNS)
    return TarIndex([name for name, _ in sounds], table)


def _members(path: str) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and size of every file in a tar."""
    with open(path, "rb", buffering=0) as file:
        n_bytes = os.fstat(file.fileno()).st_size
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined]  # the list would grow with the tar
                    if member.offset_data + (member.size if member.isreg() else 0) > n_bytes:
                        raise tarfile.ReadError(f"{member.name!r} lies beyond its end")
                    if member.isreg() and not member.issparse():
                        yield member.name, member.offset_data, member.size
                end = tar.offset
        except (tarfile.TarError, EOFError) as error:
            raise ValueError(f"the tar {path!r} is damaged or cut off: {error}") from None
        # Check the end, because tarfile stops silently at anything that is no header; a whole tar ends with zeros.
        if os.pread(file.fileno(), _BLOCK, min(end, n_bytes)) != bytes(_BLOCK):
            without_end = f"it ends at byte {n_bytes} without a mark of the end"
            where = f"no header at byte {end}" if end < n_bytes else without_end
            raise ValueError(f"the tar {path!r} is damaged or cut off: {where}")


def _cache_files(path: str) -> list[str]:
    """Where the index of a tar may be kept: beside it, or in the user's cache folder."""
    folder, name = os.path.split(os.path.abspath(path))
    user = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    number = hashlib.blake2b(os.fsencode(os.path.realpath(path)), digest_size=16).hexdigest()
    return [os.path.join(folder, f".{name}.index.npz"), os.path.join(user, "tandem", "tars", f"{number}.npz")]


def _load_index(cache: str, key: npt.NDArray[np.int64]) -> TarIndex | None:
    """The index in a file; None if there is no such file, or it is of another tar, or damaged."""
    try:
        with np.load(cache, allow_pickle=False) as stored:
            table, ends, text = stored["table"], stored["ends"], stored["names"].tobytes()
            is_table = table.shape == (len(ends), _COLUMNS) and table.dtype == np.int64
            if not (is_table and np.array_equal(stored["key"], key)):
                return None
        begins = [0, *ends.tolist()]
        return TarIndex([os.fsdecode(text[a:b]) for a, b in itertools.pairwise(begins)], table)
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile):
        return None


def _save_index(cache: str, key: npt.NDArray[np.int64], index: TarIndex) -> None:
    """Write the file whole or not at all. Raises OSError."""
    encoded = [os.fsencode(name) for name in index.names]
    content: dict[str, Any] = {
        "key": key,
        "table": index.table,
        "ends": np.cumsum([len(name) for name in encoded], dtype=np.int64),
        "names": np.frombuffer(b"".join(encoded), np.uint8),
    }
    os.makedirs(os.path.dirname(cache), exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(cache), prefix=".index-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, **content)
        os.chmod(temporary, 0o644)  # mkstemp makes a file that only its owner may read
        os.replace(temporary, cache)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _counted(paths: Sequence[str]) -> str:
    return repr(paths[0]) if len(paths) == 1 else f"{len(paths)} tars, the first {paths[0]!r}"
