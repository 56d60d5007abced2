"""Helpers to open a set of samples: the files of a folder, the names of generated sets, optional packages."""

from __future__ import annotations

import collections
import heapq
import os
import re
import stat
from collections.abc import Iterator
from typing import NamedTuple

from tandem.files.installed import missing_package as missing_package

from .cache import Lists, Watched, kept_lists
from .packed import PackedStrings, Strings

PREFIX = "demo:"
DEFAULT_SIZE, LARGEST_SIZE = 4096, 1 << 22
_LONGEST_QUOTE = 60
_LONGEST_RUN = 1 << 20  # names that are sorted at a time: about a second
_TAR = ".tar"
_ENDING = re.compile(r"\.[a-z0-9_-]{1,12}")
_COUNT = re.compile(r"[0-9]{1,18} [a-z0-9._ -]{1,40}")
_MOST_ENDINGS = 8


class NothingFoundError(ValueError):
    """A folder holds no file of the kind that is looked for."""


class Listing(NamedTuple):
    """Relative paths ('/' between the parts) of files in a folder, each list sorted: the samples, the files that may
    stand beside a sample, and tars. And how many other files there are, by ending: "12 .heic"."""

    samples: Strings
    beside: Strings
    tars: Strings
    skipped: Strings


def list_files(folder: str, endings: tuple[str, ...], what: str, demo: str, beside: tuple[str, ...] = ()) -> Listing:
    """The files below `folder` with such endings (lower case). No file is opened; long lists are kept for later starts
    (`cache.kept_lists`).

    Linked folders are followed, but each real folder is visited once; names that begin with a dot are skipped.
    Raises ValueError, in one line, if the folder is missing, no folder or not readable, or holds neither samples nor
    tars; the message asks for a folder of `what`, or the set `demo`.
    """
    try:
        mode = os.stat(folder).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"there is no folder {folder!r}: give the path of a folder of {what}, or {demo} to try without one"
        ) from None
    except OSError as error:
        raise ValueError(f"cannot read the folder {folder!r}: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise ValueError(f"{folder!r} is a file, not a folder: give the path of the folder that holds the {what}")

    def make() -> Lists:
        tree = _Tree(folder, (*endings, _TAR, *beside))
        samples, tars, others = PackedStrings(), PackedStrings(), PackedStrings()
        for name in tree.names():
            lower = name.lower()
            (samples if lower.endswith(endings) else tars if lower.endswith(_TAR) else others).append(name)
        if not len(samples) and not len(tars):
            raise _nothing_found(what, folder, len(others) + tree.skipped.total(), (*endings, _TAR))
        skipped = PackedStrings(f"{n} {ending}" for ending, n in tree.skipped.most_common())
        return Lists(Listing(samples, others, tars, skipped)._asdict(), tree.watched)

    return Listing(**kept_lists(folder, " ".join((*endings, "|", *beside)), Listing._fields, make))


class _Tree:
    """What a folder holds. A list of one folder's names is sorted at a time, and no longer one than `_LONGEST_RUN`,
    because sorting holds the interpreter: the thread that tells the root what this process does would wait for it."""

    def __init__(self, folder: str, endings: tuple[str, ...]) -> None:
        self.watched, self.skipped = Watched(), collections.Counter[str]()
        self._files: dict[str, list[PackedStrings]] = {}  # sorted names, in runs
        self._folders: dict[str, list[str]] = {}
        visited = set()
        pending = [""]
        while pending:
            relative = pending.pop()
            path = os.path.join(folder, relative)
            try:
                status = os.stat(path)
                self.watched.add(relative, status)  # before the folder is read, so that no change after it is missed
                if (status.st_dev, status.st_ino) in visited:  # they identify the folder under any path
                    continue
                visited.add((status.st_dev, status.st_ino))
                self._files[relative] = list(self._read(path, relative, endings))
            except OSError as error:
                raise ValueError(f"cannot read the folder {path!r}: {error.strerror}") from None
            # Of two links to one folder, follow the first in order.
            pending += [_joined(relative, name) for name in sorted(self._folders[relative], reverse=True)]

    def _read(self, path: str, relative: str, endings: tuple[str, ...]) -> Iterator[PackedStrings]:
        """Sorted names of the files in a folder, in runs."""
        folders, files = self._folders.setdefault(relative, []), list[str]()
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_symlink():  # what it leads to may change without a change of this folder
                    self.watched.add(_joined(relative, entry.name), _status_of(entry))
                is_folder, is_file = _kind(entry)
                if is_folder:
                    folders.append(entry.name)
                elif entry.name.lower().endswith(endings) and is_file:
                    files.append(entry.name)
                else:
                    self.skipped[_ending(entry.name)] += 1
                if len(files) == _LONGEST_RUN:
                    yield PackedStrings(sorted(files))
                    files.clear()
        yield PackedStrings(sorted(files))

    def names(self) -> Iterator[str]:
        """Relative paths of all files, sorted."""
        open_folders = [("", self._entries(""))]
        while open_folders:
            relative, entries = open_folders[-1]
            for entry in entries:
                if not entry.endswith("/"):
                    yield _joined(relative, entry)
                elif (inner := _joined(relative, entry[:-1])) in self._files:
                    open_folders.append((inner, self._entries(inner)))
                    break
            else:
                open_folders.pop()

    def _entries(self, relative: str) -> Iterator[str]:
        # With the slash, folders stand among files where the paths of their files do.
        return heapq.merge(*self._files[relative], sorted(f"{name}/" for name in self._folders[relative]))


def _joined(relative: str, name: str) -> str:
    return f"{relative}/{name}" if relative else name


def _status_of(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat()
    except OSError:
        return None


def _kind(entry: os.DirEntry[str]) -> tuple[bool, bool]:
    """Whether an entry is a folder, and whether it is a file; neither, if it is a link to itself."""
    try:
        return entry.is_dir(), entry.is_file()
    except OSError:
        return False, False


def _ending(name: str) -> str:
    ending = os.path.splitext(name)[1].lower()
    return ending if _ENDING.fullmatch(ending) else "without an ending" if not ending else "of another ending"


def said_of_skipped(folder: str, skipped: Strings) -> str:
    """The line about the files of a folder that are not read, "" if there are none. Raises ValueError if the list is a
    forged one."""
    counts = list(skipped)
    if not counts:
        return ""
    if not all(map(_COUNT.fullmatch, counts)):  # somebody else may have kept the list
        raise ValueError(f"the list that is kept of the files of {folder!r} is not true: delete it")
    n = sum(int(count.partition(" ")[0]) for count in counts)
    more = ", ..." if len(counts) > _MOST_ENDINGS else ""
    files = "1 file is" if n == 1 else f"{n} files are"
    return f"{files} skipped in {folder!r}: {', '.join(counts[:_MOST_ENDINGS])}{more}"


def _nothing_found(what: str, folder: str, n_others: int, endings: tuple[str, ...]) -> NothingFoundError:
    """The error for a folder without samples: it names the endings that are read and counts the other files."""
    return NothingFoundError(
        f"no {what.removesuffix('s')} in {folder!r}, which holds {n_others} other file{'' if n_others == 1 else 's'}: "
        f"files that end in {' '.join(endings)} are read, in the folder and in those below it"
    )


def demonstration_size(spec: str, name: str, noun: str) -> int | None:
    """How many samples the set `demo:<name>` or `demo:<name>:<number>` holds; None if `spec` names no demonstration.
    `noun` is what messages call the samples.

    Raises ValueError, in one line, if `spec` names another demonstration, or its number is not a positive integer.
    """
    if not spec.startswith(PREFIX):
        return None
    said, _, number = spec.removeprefix(PREFIX).partition(":")
    if said != name:
        raise ValueError(f"there is no demonstration set {spec!r}: the only one is {PREFIX}{name}")
    if number == "":
        return DEFAULT_SIZE
    is_number = number.isascii() and number.isdigit() and len(number) <= len(str(LARGEST_SIZE))
    if not (is_number and 0 < int(number) <= LARGEST_SIZE):
        raise ValueError(
            f"{spec[:_LONGEST_QUOTE]!r} asks for {number[:_LONGEST_QUOTE]!r} {noun}, which is no number from 1 to "
            f"{LARGEST_SIZE}: write e.g. {PREFIX}{name}:{DEFAULT_SIZE}"
        )
    return int(number)
