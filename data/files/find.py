"""Which files a path stands for: a manifest, tars, or the files of a folder."""

from __future__ import annotations

import glob
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from .manifest import ENDINGS as MANIFEST_ENDINGS
from .opening import Listing, NothingFoundError, said_of_skipped
from .packed import PackedStrings, Strings, is_among
from .source import Source
from .table_files import ENDINGS as TABLE_ENDINGS
from .table_files import TableFiles, saved_files, tables_below

_RANGE = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")
_MOST_FILES = 1 << 20  # that ranges stand for
_LONGEST_QUOTE = 200
NO_STRINGS = PackedStrings()


class ManifestFile(NamedTuple):
    """A manifest (`manifest.read_manifest`)."""

    path: str


class TarFiles(NamedTuple):
    """Tars (`tars.Tars`), in order."""

    paths: list[str]


class _InOrder:
    """Sorted strings in which others are looked up. Those that are asked for in order are found in one pass."""

    def __init__(self, strings: Strings) -> None:
        self._strings, self._rest, self._here, self._asked = strings, iter(strings), "", ""

    def __contains__(self, string: str) -> bool:
        if string < self._asked:  # the stems of "a.b.png" and "a.png" are in another order than these names
            return is_among(self._strings, string)
        self._asked = string
        while self._here < string:
            if (here := next(self._rest, None)) is None:
                return False
            self._here = here
        return self._here == string


class Folder:
    """The files of a folder, numbered in the order of their relative paths, `names`; `names_beside` are those of files
    that may stand beside them, sorted; `skipped` is a line about the files that are not read, or ""."""

    def __init__(self, folder: str, names: Strings, names_beside: Strings = NO_STRINGS, skipped: str = "") -> None:
        self.folder, self._names, self._names_beside, self.skipped = folder, names, names_beside, skipped

    @property
    def fingerprint(self) -> str:
        return self._names.fingerprint + self._names_beside.fingerprint

    def __len__(self) -> int:
        return len(self._names)

    def source(self, index: int) -> Source:
        return Source(os.path.join(self.folder, self.name(index)))

    def describe(self, index: int) -> str:
        return os.path.join(self.folder, self._names[index])

    def name(self, index: int) -> str:
        """Raises ValueError, in one line, if it leads out of the folder: somebody else may have kept the list."""
        return _inside(self.folder, self._names[index])

    def has_any_beside(self, endings: Sequence[str]) -> bool:
        """Whether `beside` finds a file for any index."""
        return any(path is not None for path in self.all_beside(endings))

    def all_beside(self, endings: Sequence[str]) -> Iterator[str | None]:
        """What `beside` finds for each index, in one pass over both lists: a million searches take minutes."""
        found = {e: _InOrder(self._names_beside) for e in endings if any(n.endswith(e) for n in self._names_beside)}
        for name in self._names if found else ():
            stem = os.path.splitext(_inside(self.folder, name))[0]
            ending = next((ending for ending, names in found.items() if stem + ending in names), None)
            yield None if ending is None else os.path.join(self.folder, stem + ending)
        if not found:
            yield from itertools.repeat(None, len(self))

    def beside(self, index: int, endings: Iterable[str]) -> str | None:
        """The path of a file that has the name of file `index` but for its ending, the first that there is."""
        stem = os.path.splitext(self.name(index))[0]
        found = next((stem + ending for ending in endings if is_among(self._names_beside, stem + ending)), None)
        return None if found is None else os.path.join(self.folder, found)


def find_files(
    path: str, what: str, list_folder: Callable[[str], Listing], *, manifests: bool = True, tables: bool = False
) -> ManifestFile | TarFiles | TableFiles | Folder:
    """What a path stands for: a manifest, one .tar, a folder of files or of tars, a pattern of tars (`tars/*.tar`) or a
    range of them (`{000..010}.tar`); or one .arrow or .parquet, a folder, a pattern or a range of them.

    Args:
        what: What messages call the samples, in the plural.
        list_folder: Lists a folder.
        manifests: Whether a manifest is allowed.
        tables: Whether Arrow and parquet files are.

    Raises ValueError, in one line, if there is nothing of the kind.
    """
    if "://" in path or path.startswith("pipe:"):
        raise ValueError(f"{path!r} is no path: files are read at random, so copy them to a disk of this machine first")
    if tables and path.lower().endswith(TABLE_ENDINGS) and not os.path.isdir(path):
        return TableFiles(expanded(path) if not os.path.exists(path) else [path])
    if os.path.isfile(path):
        if manifests and path.lower().endswith(MANIFEST_ENDINGS):
            return ManifestFile(path)
        return TarFiles(_only_tars([path], what, manifests))
    if not os.path.exists(path) and (_RANGE.search(path) or glob.has_magic(path)):
        return TarFiles(_only_tars(expanded(path), what, manifests))
    if tables and (saved := saved_files(path)) is not None:
        return saved
    try:
        listing = list_folder(path)
    except NothingFoundError:
        if tables and (found := tables_below(path)) is not None:
            return found
        raise
    if len(listing.tars) and len(listing.samples):
        raise ValueError(
            f"{path!r} holds tars and loose files, such as {listing.tars[0]!r} and {listing.samples[0]!r}: "
            f"give the one or the other, e.g. {os.path.join(path, '*.tar')!r}"
        )
    if len(listing.tars):  # what stands beside tars is nothing of a sample
        return TarFiles([os.path.join(path, _inside(path, name)) for name in listing.tars])
    return Folder(path, listing.samples, listing.beside, said_of_skipped(path, listing.skipped))


def _inside(folder: str, name: str) -> str:
    """The relative path of a file in a folder. Raises ValueError, in one line, if it leads out of the folder."""
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"the list that is kept of the files of {folder!r} is not true: delete it")
    return name


def _only_tars(paths: list[str], what: str, manifests: bool) -> list[str]:
    for path in paths:
        if not path.lower().endswith(".tar"):
            manifest = f"a manifest ({' '.join(MANIFEST_ENDINGS)}), " if manifests else ""
            hint = f"give {manifest}a folder of {what}, or tars"
            if path.lower().endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")):
                hint = "decompress it first: a compressed tar cannot be read at random"
            raise ValueError(f"{path!r} is no set of {what}: {hint}")
    return paths


def expanded(pattern: str) -> list[str]:
    """Paths of `{000..010}` and `*`, in order."""
    ranges = [int(last) - int(first) + 1 for first, last in _RANGE.findall(pattern)]
    if math.prod(max(1, count) for count in ranges) > _MOST_FILES:
        raise ValueError(f"{pattern[:_LONGEST_QUOTE]!r} stands for more than {_MOST_FILES} files: name fewer at a time")
    paths = [pattern]
    while _RANGE.search(paths[0]):
        paths = [counted for path in paths for counted in _counted(path)]
    if glob.has_magic(pattern):
        found = sorted(match for path in paths for match in glob.glob(path))
        if not found:
            raise ValueError(f"no file is named like {pattern!r}")
        return found
    if missing := [path for path in paths if not os.path.exists(path)]:
        n_missing = f"{len(missing)} of the {len(paths)} files of {pattern!r} are missing"
        raise ValueError(f"{n_missing}, the first is {missing[0]!r}")
    return paths


def _counted(path: str) -> list[str]:
    match = _RANGE.search(path)
    assert match is not None
    first, last = match.groups()
    if int(last) < int(first):
        raise ValueError(f"the range {match[0]} in {path!r} is empty: write the smaller number first")
    numbers = range(int(first), int(last) + 1)
    return [f"{path[: match.start()]}{number:0{len(first)}d}{path[match.end() :]}" for number in numbers]
