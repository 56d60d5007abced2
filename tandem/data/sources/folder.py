"""The files of a folder, each with the files beside it that differ only in the ending."""

from __future__ import annotations

import collections
import heapq
import itertools
import json
import operator
import os
import re
import stat
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from tandem.io.reading import READ_ERRORS, counted, printable

from .index import Dependencies, IndexData, PackedStrings, cached_index, fingerprint_of, largest, status_of
from .record import FieldSpec, FileRef, Record

_LONGEST_RUN = 1 << 20  # names that are sorted at a time, in about a second
_TAR = ".tar"
_ENDING = re.compile(r"\.[a-z0-9_-]{1,12}")
_MOST_ENDINGS = 8
_LIST_ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson")  # that may be manifests
_UNICODE_FORMS = ("", "NFC", "NFD")  # Unicode forms of a name: unchanged, composed or decomposed
_NO_FILE = -1
# For each spec of files beside a sample: the index of the file's spelling, and its size in bytes. A spelling, such as
# "NFC.TXT", is the Unicode form of the stem and the ending as written; it gives the file's name from the sample's.
_SideFiles = list[tuple[int, int]]


class NothingFoundError(ValueError):
    """A folder holds no file of the required kind."""


class FolderSource:
    """All files below a folder with one of `specs[0].all_endings`, numbered in the order of the relative
    paths. The files of the other specs are found beside them: their names are equal but for the ending and the Unicode
    form, in which systems differ. Of names that differ only in the case of the ending, the last one is taken. See
    `RecordSource` for the methods.

    Links to folders are followed, but each real folder is visited once; names that begin with a dot are skipped. No
    file is opened; long lists are cached for later starts (`cached_index`). `tars` are the paths of tars in the folder.

    Raises ValueError, in one line, if the folder is missing, no folder or not readable, or holds neither samples nor
    tars; the message recommends `demo`, such as "demo:shapes", to try without a folder.
    """

    shards: Sequence[range] | None = None

    def __init__(self, folder: str, specs: Sequence[FieldSpec], demo: str = "") -> None:
        self.folder, (self._main, *self._sides) = folder, specs
        _check_folder(folder, f"{self._main.noun}s", f", or {demo} to try without one" if demo else "")
        kind = json.dumps(["folder", *((spec.name, spec.all_endings) for spec in specs)])
        index = cached_index(folder, kind, lambda: _Tree(folder, self._main, self._sides).build_index())
        self.fingerprint, self._names = index.fingerprint, index.strings("names")
        self._damaged_error, self.examples = index.damaged_error, index.examples
        self.tars = [os.path.join(folder, self._check_inside(name)) for name in index.strings("tars")]
        self._spelling_numbers = {spec.name: index.numbers(f"which {spec.name}", len(self)) for spec in self._sides}
        try:
            self._spellings = [*map(str, index.facts["spellings"])]
            self.skipped = skipped_line("file", repr(folder), *index.facts["skipped"])
        except READ_ERRORS:
            raise index.damaged_error() from None

    def __len__(self) -> int:
        return len(self._names)

    def record(self, index: int, epoch: int = 0, augment: bool = False) -> Record:
        path = os.path.join(self.folder, self.name(index))
        record = {self._main.name: FileRef(path)}
        for spec in self._sides:
            if (number := self._spelling_numbers[spec.name][index]) != _NO_FILE:
                spelling = self._spellings[number] if 0 <= number < len(self._spellings) else ""
                form, dot, ending = spelling.partition(".")
                if f".{ending.lower()}" not in spec.endings or form not in _UNICODE_FORMS:
                    raise self._damaged_error()
                folder, name = os.path.split(os.path.splitext(path)[0])
                record[spec.name] = FileRef(os.path.join(folder, _normalize(form, name) + dot + ending))
        return record

    def name(self, index: int) -> str:
        return self._check_inside(self._names[index])

    def describe(self, index: int) -> str:
        return os.path.join(self.folder, self._names[index])

    def _check_inside(self, name: str) -> str:
        """A relative path. Raises ValueError, in one line, if it leads out of the folder: indices may be forged."""
        if name.startswith("/") or ".." in name.split("/"):
            raise self._damaged_error()
        return name


def _check_folder(folder: str, noun: str, hint: str) -> None:
    try:
        mode = os.stat(folder).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"there is no folder {folder!r}: give the path of a folder of {noun}{hint}") from None
    except OSError as error:
        raise ValueError(f"cannot read the folder {folder!r}: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise ValueError(f"{folder!r} is a file, not a folder: give the path of the folder that holds the {noun}")


def skipped_line(noun: str, location: str, n: int, description: str) -> str:
    """A line about n files or members of a source that are not read; "" if there are none."""
    return f"{n:d} {noun}{' is' if n == 1 else 's are'} skipped in {location}: {printable(description)}" if n else ""


def about_skipped(counts: collections.Counter[str], noun: str = "", n_alone: int = 0, example: str = "") -> str:
    """How many files of each ending are not read, and how many of them (`n_alone`, with an example) would be read
    beside a sample of the same name."""
    parts = [f"{n} {ending}" for ending, n in counts.most_common(_MOST_ENDINGS) if n]
    parts += ["..."] if len(counts) > _MOST_ENDINGS else []
    note = f"; {n_alone} of them beside no {noun} of the same name, such as {example!r}" if n_alone else ""
    return ", ".join(parts) + note


class _Tree:
    """Lists the content of a folder, in order. At most `_LONGEST_RUN` names are sorted at a time, because sorting holds
    the interpreter's lock, for which the thread that sends heartbeats to rank 0 would wait."""

    def __init__(self, folder: str, sample_spec: FieldSpec, side_specs: Sequence[FieldSpec]) -> None:
        self._folder, self._main, self._sides = folder, sample_spec, side_specs
        self._dependencies, self._skipped = Dependencies(), collections.Counter[str]()
        self._n_alone, self._alone = 0, ""  # how many files stand beside no sample, and the first of them
        self._list_name = ""  # the first file that may be a manifest
        self._visited: set[tuple[int, int]] = set()
        self._spellings: dict[str, int] = {}
        self._sample_endings, self._main_endings = sample_spec.all_endings, (*sample_spec.all_endings, _TAR)
        self._side_endings = tuple(dict.fromkeys(ending for spec in side_specs for ending in spec.endings))

    def build_index(self) -> IndexData:
        """Raises ValueError, in one line, if a folder cannot be read, and NothingFoundError."""
        names, tars = PackedStrings(), PackedStrings()
        spellings, sizes = ([array("q") for _ in self._sides] for _ in range(2))
        for name, beside in self._walk():
            if beside is None:
                tars.append(name)
                continue
            names.append(name)
            for number, (spelling, size) in enumerate(beside):
                spellings[number].append(spelling)
                sizes[number].append(size)
        if not len(names) and not len(tars):
            others = counted(n, "other file") if (n := self._skipped.total()) else "nothing"
            raise NothingFoundError(
                f"no {self._main.noun} in {self._folder!r}, which holds {others}: files that end in "
                f"{' '.join(self._main_endings)} are read, in the folder and in those below it{self._hint()}"
            )
        columns: dict[str, Any] = {"names": names, "tars": tars}
        columns |= {f"which {spec.name}": numbers for spec, numbers in zip(self._sides, spellings, strict=True)}
        n_alone = self._n_alone if len(names) else 0  # a folder of tars may hold files of other kinds
        description = about_skipped(self._skipped, self._main.noun, n_alone, self._alone)
        facts = {
            "spellings": [*self._spellings],
            "skipped": [self._skipped.total(), description + self._hint()],
            "examples": {spec.name: largest(n_bytes) for spec, n_bytes in zip(self._sides, sizes, strict=True)},
        }
        spelling_bytes = [json.dumps(facts["spellings"]).encode(), *(numbers.tobytes() for numbers in spellings)]
        return IndexData(columns, fingerprint_of([*names.buffers, *spelling_bytes]), facts, self._dependencies)

    def _hint(self) -> str:
        name = self._list_name
        return f"; if {name!r} in it lists {self._main.noun}s, give its path instead" if name else ""

    def _walk(self) -> Iterator[tuple[str, _SideFiles | None]]:
        """The sorted relative paths of samples, each with the files beside it, and of tars, with None."""
        open_folders = [("", self._list_folder(""))]
        while open_folders:
            relative, entries = open_folders[-1]
            for name, beside in entries:
                path = f"{relative}/{name}" if relative else name
                if name.endswith("/"):
                    open_folders.append((path[:-1], self._list_folder(path[:-1])))
                    break
                yield path, beside
            else:
                open_folders.pop()

    def _list_folder(self, relative: str) -> Iterator[tuple[str, _SideFiles | None]]:
        path = os.path.join(self._folder, relative)
        try:
            status = os.stat(path)
            self._dependencies.add(relative, status)  # before the folder is read, so that no later change is missed
            if (status.st_dev, status.st_ino) in self._visited:  # the folder's identity under any path
                return iter(())
            self._visited.add((status.st_dev, status.st_ino))
            folders, by_nfc = list[str](), dict[str, str]()
            runs = list(self._read_names(path, relative, folders, by_nfc))
        except OSError as error:
            raise ValueError(f"cannot read the folder {path!r}: {error.strerror}") from None
        # With a slash, a folder's name sorts among the files as the paths of its files do.
        inner = ((name, None) for name in sorted(f"{name}/" for name in folders))
        return heapq.merge(self._match_files(relative, heapq.merge(*runs), by_nfc), inner, key=operator.itemgetter(0))

    def _read_names(
        self, path: str, relative: str, folders: list[str], by_nfc: dict[str, str]
    ) -> Iterator[Iterable[str]]:
        """Sorted names of the files in a folder, in runs. Appends the names of its folders to `folders`, and adds to
        `by_nfc`, by composed form, the names that may belong to a sample in another Unicode form."""
        endings, files = (*self._main_endings, *self._side_endings), list[str]()
        with os.scandir(path) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith("."):
                    continue
                if entry.is_symlink():  # its target may change without a change of this folder
                    self._dependencies.add(os.path.join(relative, name), status_of(entry.path))
                is_folder, is_file = _is_folder_or_file(entry)
                if is_folder:
                    folders.append(name)
                elif name.lower().endswith(endings) and is_file:
                    files.append(name)
                    if not name.isascii() and _normalize("NFC", name) != _normalize("NFD", name):
                        by_nfc |= {_normalize("NFC", key): name for key in self._keys(name)}
                else:
                    self._skipped[ending_of(name)] += 1
                    if name.lower().endswith(_LIST_ENDINGS):
                        self._list_name = min(filter(None, (self._list_name, os.path.join(relative, name))))
                if len(files) == _LONGEST_RUN:
                    yield PackedStrings(sorted(files))
                    files.clear()
        yield sorted(files)

    def _keys(self, name: str) -> list[str]:
        """The names, with lower-case endings, by which a sample finds this file beside it."""
        lower = name.lower()
        if lower.endswith(self._main_endings):
            return []
        return [name[: -len(ending)] + ending for ending in self._side_endings if lower.endswith(ending)]

    def _match_files(
        self, relative: str, names: Iterable[str], by_nfc: Mapping[str, str]
    ) -> Iterator[tuple[str, _SideFiles | None]]:
        """The samples and tars among the files of a folder. Names that are equal up to their first dot are adjacent,
        except those in `by_nfc`."""
        accented = {*by_nfc.values()}  # counted after the last group, because a sample of any group may use them
        accented_used, accented_stems = set[str](), set[str]()
        for _, group in itertools.groupby(names, lambda name: name.partition(".")[0]):
            by_key, main, side, used = dict[str, str](), list[str](), set[str](), set[str]()
            for name in group:
                if keys := self._keys(name):
                    by_key.update(dict.fromkeys(keys, name))
                    side.add(name)
                else:
                    main.append(name)
            for name in main:
                if name.lower().endswith(self._sample_endings):
                    yield name, [self._find_beside(relative, name, by_key, by_nfc, used, spec) for spec in self._sides]
                else:
                    yield name, None
            if side or by_nfc:
                stems = {_normalize("NFC", os.path.splitext(name)[0]) for name in main}
                self._count_skipped(relative, side - accented - used, stems)
                accented_used |= used & accented
                accented_stems |= {stem for stem in stems if not stem.isascii()}
        self._count_skipped(relative, accented - accented_used, accented_stems)

    def _count_skipped(self, relative: str, names: Set[str], stems: Set[str]) -> None:
        """Count files that no sample uses. Those without a sample of the same stem are counted as lone files, too."""
        for name in sorted(names):
            self._skipped[ending_of(name)] += 1
            endings = filter(name.lower().endswith, self._side_endings)
            if not any(_normalize("NFC", name[: -len(ending)]) in stems for ending in endings):
                self._n_alone += 1
                self._alone = self._alone or os.path.join(relative, name)

    def _find_beside(
        self, relative: str, name: str, by_key: Mapping[str, str], by_nfc: Mapping[str, str], used: set[str],
        spec: FieldSpec,
    ) -> tuple[int, int]:  # fmt: skip
        """The index of the spelling and the size of the file beside a sample; adds its name to `used`. `by_key` and
        `by_nfc`: names of files there by the name with a lower-case ending (`_keys`), and by its composed form."""
        stem = os.path.splitext(name)[0]
        for ending in spec.endings if by_key or by_nfc else ():
            file = by_key.get(stem + ending) or by_nfc.get(_normalize("NFC", stem) + ending, "")
            for form in _UNICODE_FORMS:
                if file and file.startswith(start := _normalize(form, stem)):
                    used.add(file)
                    status = None if spec.as_cells else status_of(os.path.join(self._folder, relative, file))
                    spelling = self._spellings.setdefault(form + file[len(start) :], len(self._spellings))
                    return spelling, status.st_size if status else 0
        return _NO_FILE, -1


def _normalize(form: Any, name: str) -> str:
    return unicodedata.normalize(form, name) if form else name


def _is_folder_or_file(entry: os.DirEntry[str]) -> tuple[bool, bool]:
    """Whether an entry is a folder, and whether it is a file; a link to itself is neither."""
    try:
        return entry.is_dir(), entry.is_file()
    except OSError:
        return False, False


def ending_of(name: str) -> str:
    """The ending of a file as it is counted in messages."""
    ending = os.path.splitext(name)[1].lower()
    return ending if _ENDING.fullmatch(ending) else "without an ending" if not ending else "of another ending"
