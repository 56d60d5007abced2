"""Webdataset tars, read in any order by an index of the members' offsets, which is built once from their headers."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import unicodedata
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.io.reading import READ_ERRORS, counted, error_text, wrong_kind_text

from .files import RandomAccessFile, is_url, redact
from .folder import about_skipped, ending_of, skipped_line
from .index import IndexData, PackedStrings, cached_index, fingerprint_of, largest
from .record import FieldSpec, FileRef, Record, open_range

# An index of fewer samples is not cached. Tars need one sooner than folders: each header may take a read of the disk.
_MIN_CACHED_SAMPLES = 100
_THREADS = 16
_BLOCK = 512  # bytes
_MAX_HEADER_BYTES = 1 << 20  # far more than a long name or the extended headers of a file need
_REQUEST_BYTES = 1 << 20  # of a tar on a server
# Of `_ForwardReader`: its shortest read, the distance of near headers, and its longest read.
_ONE_HEADER_BYTES, _NEAR_BYTES, _AHEAD_BYTES = 1 << 11, 1 << 14, 1 << 16
# Kinds of members. Links, devices and folders have no content, whatever size they state.
_FILES, _LONG_NAME, _EXTENDED = (b"0", b"\0", b"7"), b"L", (b"x", b"X")
_HEADERS = (*_EXTENDED, _LONG_NAME, b"K", b"g")
_CONTENTLESS = (b"1", b"2", b"3", b"4", b"5", b"6")
_LINKS = (b"1", b"2")
# Notes about the end of a tar. Tars that were appended to it are read, too, if no more zeros separate them than any
# program writes.
_NO_END_MARK = "without a mark of the end, perhaps cut off"
_MORE_BYTES = "with bytes behind the end, which are not read"
_MAX_ZERO_BYTES = 1 << 20
_PLACE_PARTS = ("size", "offset", "ending")  # of a member, see `TarScan.places`

MatchTail = Callable[[str], Sequence[tuple[int, int, int]]]  # see `_match_tail`


class TarSource:
    """The samples of several tars, in the order of tars and of their first members. Members whose names are equal up to
    the first dot after the folder are one sample. See `RecordSource` for the methods.

    A member belongs to a `FieldSpec` if its whole name after that dot is one of the endings. A member for the first
    `FieldSpec` or for texts may also only end with one, if there is no other: "0.mask.png" is an image only if there is
    no "0.png".

    `skipped`: a line about files beside the tars. Raises ValueError, in one line, if a tar cannot be read, is damaged
    or cut off, or none holds a sample.
    """

    def __init__(self, paths: Sequence[str], specs: Sequence[FieldSpec], skipped: str = "") -> None:
        self.paths, self._n_main = [*paths], len(specs)
        with_texts = [spec for spec in specs if spec.as_cells and len(spec.endings) > 1]
        beside = [spec._replace(name=_beside(spec), endings=spec.endings[-1:]) for spec in with_texts]
        self._specs = [*specs, *beside]
        with ThreadPoolExecutor(_THREADS) as threads:
            states = [*threads.map(_read_state, self.paths)]
        self._n_bytes = np.array([size for size, _ in states], np.int64)
        root, names = _root_and_names(self.paths)
        kind = json.dumps(["tars", names, [(spec.name, spec.endings, spec.further) for spec in self._specs]])
        index = cached_index(
            root, fingerprint_of([kind.encode()]), self._build_index, min_strings=_MIN_CACHED_SAMPLES,
            depends=fingerprint_of([json.dumps(states).encode()]),
        )  # fmt: skip
        self.fingerprint, self._names = index.fingerprint, index.strings("names")
        self._columns = {
            spec.name: [index.numbers(name, len(self)) for name in _column_names(spec)] for spec in self._specs
        }
        self._firsts = index.numbers("firsts", len(self.paths) + 1).to_numpy()
        if self._firsts[0] != 0 or self._firsts[-1] != len(self) or (np.diff(self._firsts) < 0).any():
            raise index.damaged_error()
        self._damaged_error, self.examples = index.damaged_error, index.examples
        try:
            lines = [skipped, skipped_line("member", str(self), *index.facts["skipped"])]
            for end, (count, first) in index.facts["ends"].items():
                lines.append(f"{counted(count, 'tar')} {end}: {'such as ' if count > 1 else ''}{self.paths[first]!r}")
        except READ_ERRORS:
            raise index.damaged_error() from None
        self.skipped = "; ".join(filter(None, lines))
        if not len(self):
            hint = self.skipped and f"; {self.skipped}"
            raise ValueError(f"no {specs[0].noun} ({' '.join(specs[0].endings)}) in {self}{hint}")

    def _build_index(self) -> IndexData:
        match_tail = functools.lru_cache(1 << 12)(functools.partial(_match_tail, self._specs))
        names, firsts = PackedStrings(), array("q", [0])
        columns = [array("q") for _ in range(len(_PLACE_PARTS) * len(self._specs))]
        skipped, unmatched = Counter[str](), list[str]()
        end_notes = dict[str, list[int]]()  # by note: the number of tars with it, and the index of the first one
        with ThreadPoolExecutor(_THREADS) as threads:
            for tar_scan in threads.map(lambda path: scan(path, self._specs, match_tail), self.paths):
                for name in tar_scan.names:
                    names.append(name)
                for column, numbers in zip(columns, tar_scan.places.T, strict=True):
                    column.frombytes(numbers.tobytes())
                skipped += tar_scan.skipped
                unmatched += tar_scan.unmatched
                for note in tar_scan.end_notes:
                    end_notes.setdefault(note, [0, len(firsts) - 1])[0] += 1
                firsts.append(len(names))
        # The fingerprint depends on the samples' names and tars, and on their members' endings (every third column) but
        # for the second files of texts.
        endings = columns[2 : len(_PLACE_PARTS) * self._n_main : len(_PLACE_PARTS)]
        parts = [*names.buffers, *(memoryview(part).cast("B") for part in (firsts, *endings))]
        column_names = itertools.chain(*map(_column_names, self._specs))
        description = about_skipped(skipped, self._specs[0].noun, len(unmatched), unmatched[0] if unmatched else "")
        facts = {
            "examples": {spec.name: largest(columns[len(_PLACE_PARTS) * n]) for n, spec in enumerate(self._specs)},
            "skipped": [skipped.total(), description],
            "ends": end_notes,
        }
        places = dict(zip(column_names, columns, strict=True))
        return IndexData({"names": names, "firsts": firsts, **places}, fingerprint_of(parts), facts)

    def __len__(self) -> int:
        return len(self._names)

    def __str__(self) -> str:
        first, n = repr(self.paths[0]), len(self.paths)
        return first if n == 1 else f"{n} tars, the first {first}"

    def record(self, index: int, epoch: int = 0, augment: bool = False) -> Record:
        path, n_bytes, name = self.path(index), self._n_bytes[self.shard(index)], self._names[index]
        record = dict[str, FileRef]()
        for spec in self._specs:
            size, offset, ending = (column[index] for column in self._columns[spec.name])
            if size < 0 and spec is not self._specs[0]:
                continue
            if not (size >= 0 and 0 <= offset <= n_bytes - size and 0 <= ending < len(spec.all_endings)):
                raise self._damaged_error()
            member = name if spec is self._specs[0] else f"{_key(name)}{spec.all_endings[ending]}"
            record[spec.name] = FileRef(path, offset, size, member=member)
        for spec in self._specs[: self._n_main]:
            if beside := record.pop(_beside(spec), None):
                if spec.name not in record:
                    raise self._damaged_error()
                record[spec.name] = record[spec.name]._replace(beside=beside)
        return record

    @property
    def shards(self) -> list[range]:
        return [range(int(first), int(end)) for first, end in itertools.pairwise(self._firsts)]

    def shard(self, index: int) -> int:
        """The index of the tar that holds a sample."""
        return int(np.searchsorted(self._firsts, index, side="right")) - 1

    def path(self, index: int) -> str:
        return self.paths[self.shard(index)]

    def name(self, index: int) -> str:
        return self._names[index]

    def describe(self, index: int) -> str:
        return f"{redact(self.path(index))}/{self._names[index]}"


def _beside(spec: FieldSpec) -> str:
    """The name under which the index holds the members of a spec's last ending, see `FileRef`."""
    return f"{spec.name} beside"


def _column_names(spec: FieldSpec) -> list[str]:
    return [f"{part} {spec.name}" for part in _PLACE_PARTS]


def stem_of(name: str) -> str:
    """The name of a member or a file without folders, up to its first dot."""
    return name.rpartition("/")[2].partition(".")[0]


def number_of(path: str, flag: str) -> int:
    """The number of a shard in its file's name: "img_emb_0012.npy" and "00012.tar" -> 12. Raises ValueError, in one
    line that begins with `flag`, if the name has none."""
    match = re.search(r"([0-9]+)$", stem_of(path))
    if match is None:
        raise ValueError(f"{flag}: the name of {path!r} does not end with the number of its shard, such as 00012")
    return int(match[1])


def _key(name: str) -> str:
    """The name of a member with its folders, up to the first dot after them: the key that members of a sample share."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


def _read_state(path: str) -> tuple[int, str]:
    """The size of a tar, and a text that changes with it."""
    try:
        if is_url(path):
            from . import remote

            return remote.RemoteFile(path).size, remote.version(path)
        status = os.stat(path)
    except OSError as error:
        raise ValueError(f"cannot read the tar {path!r}: {error_text(error)}") from None
    return status.st_size, str(status.st_mtime_ns)


def _root_and_names(paths: Sequence[str]) -> tuple[str, list[str]]:
    """The `path` for `cached_index`, which is a tar or the common folder of several, and the paths of the tars relative
    to it."""
    if is_url(paths[0]):
        return paths[0], [*paths]
    if len(paths) == 1:
        return paths[0], [""]
    root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    return root, [os.path.relpath(path, root) for path in paths]


def _match_tail(specs: Sequence[FieldSpec], tail: str) -> list[tuple[int, int, int]]:
    """The specs to which a member with this name after its stem may belong: for each the number in `specs`, the rank
    (of several members the one of the lowest rank is taken), and the number of the ending."""
    tail = tail.lower()
    for is_whole in (True, False):
        matches = []
        for number, spec in enumerate(specs):
            is_match = [tail == ending if is_whole else tail.endswith(ending) for ending in spec.all_endings]
            if any(is_match) and (is_whole or number == 0 or spec.as_cells):
                ending = is_match.index(True)
                rank = ending if number else int(ending >= len(spec.endings))
                matches.append((number, rank if is_whole else len(spec.all_endings) + rank, ending))
        if matches:
            return matches
    return []


class _Member(NamedTuple):
    """A member that may belong to a sample; of several, one of the lowest rank is taken."""

    rank: int
    name: str
    size: int
    offset: int
    ending: int


class TarScan(NamedTuple):
    """The content of a tar.

    names: of the first member of each sample, in the order of the tar.
    places: size, offset and ending of each sample's member for each spec, int64 (n, 3 * specs), -1 where it has none.
    skipped: how many members belong to no sample, by ending; also links, which are not read.
    unmatched: the names of those skipped members that could belong to a sample.
    end_notes: about an unusual end.
    """

    names: list[str]
    places: npt.NDArray[np.int64]
    skipped: Counter[str]
    unmatched: list[str]
    end_notes: list[str]


def scan(path: str, specs: Sequence[FieldSpec], match_tail: MatchTail) -> TarScan:
    """Read the headers of a tar's members.

    Raises ValueError, in one line, if the tar cannot be read, is damaged or cut off, or two samples have one name.
    """
    candidates: dict[str, list[_Member | None]] = {}  # by key: the member of each spec
    clashes: dict[str, tuple[int, str]] = {}
    skipped, tail_counts, end_notes = Counter[str](), Counter[str](), list[str]()
    for name, offset, size in members(path, skipped, end_notes):
        key = _key(name)
        if key.endswith("/") or not key:  # hidden names are skipped
            continue
        tail_counts[name[len(key) :]] += 1
        matches = match_tail(name[len(key) :])
        if not matches:
            continue
        sample = candidates.setdefault(key, [None] * len(specs))
        for number, rank, ending in matches:
            other = sample[number]
            if other is None or rank < other.rank or (rank == other.rank and number):
                sample[number] = _Member(rank, name, size, offset, ending)
            elif rank == other.rank:
                clashes.setdefault(key, (rank, name))
    for key, (rank, name) in clashes.items():
        first = candidates[key][0]
        if first and first.rank == rank:
            raise ValueError(f"the tar {path!r} holds two {specs[0].noun}s of one name, {first.name!r} and {name!r}")
    _join_forms(candidates)
    complete = {sample[0].name: sample for sample in candidates.values() if sample[0]}
    members_by_spec = [member for sample in complete.values() for member in sample]
    places = [(member.size, member.offset, member.ending) if member else (-1, -1, -1) for member in members_by_spec]
    for sample in complete.values():
        for name in {member.name for member in sample if member}:
            tail_counts[name[len(_key(name)) :]] -= 1
    for tail, n in (+tail_counts).items():
        skipped[ending_of(f"key{tail}")] += n  # without a stem, ".txt" would be a name without an ending
    incomplete = (sample for sample in candidates.values() if not sample[0])
    unmatched = sorted({member.name for sample in incomplete for member in sample if member})
    places_array = np.array(places, np.int64).reshape(-1, len(_PLACE_PARTS) * len(specs))
    return TarScan([*complete], places_array, skipped, unmatched, end_notes)


def _join_forms(samples: Mapping[str, list[_Member | None]]) -> None:
    """Join members to the sample whose name is equal but for the Unicode form, composed or decomposed."""
    firsts = {unicodedata.normalize("NFC", key): key for key, sample in samples.items() if sample[0]}
    for key, sample in samples.items():
        first = None if key.isascii() or sample[0] else samples.get(firsts.get(unicodedata.normalize("NFC", key), ""))
        for number, member in enumerate(sample if first else ()):
            if first and member and not first[number]:
                first[number], sample[number] = member, None


class _ForwardReader:
    """Reads a file forward in pieces: short ones for distant headers, longer and longer ones where headers are near
    each other."""

    def __init__(self, file: RandomAccessFile) -> None:
        self._file, self._begin, self._piece, self._size = file, 0, b"", _ONE_HEADER_BYTES

    def read(self, at: int, size: int) -> bytes:
        begin = at - self._begin
        if not 0 <= begin <= len(self._piece) - size:
            is_near = begin < len(self._piece) + _NEAR_BYTES
            self._size = min(2 * self._size, _AHEAD_BYTES) if is_near else _ONE_HEADER_BYTES
            self._piece, self._begin, begin = self._file.pread(max(size, self._size), at), at, 0
        return self._piece[begin : begin + size]


def members(path: str, skipped: Counter[str], end_notes: list[str]) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and size of every file in a tar, in its order. Counts links in `skipped`, and adds notes about
    an unusual end to `end_notes`.

    Raises ValueError, in one line, if it cannot be read, is damaged or cut off.
    """
    try:
        with open_range(FileRef(path), ahead=_REQUEST_BYTES) as file:
            yield from _read_members(_ForwardReader(file), file.size, skipped, end_notes)
    except OSError as error:
        raise ValueError(f"cannot read the tar {path!r}: {error_text(error)}") from None
    except ValueError as error:
        raise ValueError(f"the tar {path!r} is damaged or cut off: {error}") from None


def _read_members(
    reader: _ForwardReader, n_bytes: int, skipped: Counter[str], end_notes: list[str]
) -> Iterator[tuple[str, int, int]]:
    position = 0
    extended: dict[str, bytes] = {}  # attributes of the next member, from extended headers
    while True:
        header = reader.read(position, _BLOCK)
        if header == bytes(_BLOCK):  # zeros mark the end
            end = position
            while position < n_bytes and position - end < _MAX_ZERO_BYTES and not header.strip(b"\0"):
                position += _BLOCK
                header = reader.read(position, _BLOCK)
            if position >= n_bytes or not _is_header(header):  # only another tar may follow
                end_notes += [_MORE_BYTES] if position < n_bytes else []
                return
        if position == n_bytes > 0 and not extended:
            end_notes.append(_NO_END_MARK)
            return
        if position >= n_bytes:
            raise ValueError(f"it ends at byte {n_bytes} without a mark of the end")
        if not _is_header(header):
            raise ValueError(("" if position else wrong_kind_text(header)) or f"no header at byte {position}")
        kind, begin, size = header[156:157], position + _BLOCK, _parse_number(header[124:136])
        if kind in _HEADERS:
            if not 0 <= size <= _MAX_HEADER_BYTES:
                raise ValueError(f"it claims a header of {size} bytes")
            if kind in _EXTENDED:
                extended |= _parse_extended(reader.read(begin, size))
            elif kind == _LONG_NAME:
                extended["path"] = reader.read(begin, size).partition(b"\0")[0]
        else:
            name = os.fsdecode(extended.get("path") or _parse_name(header))
            size = 0 if kind in _CONTENTLESS else int(extended.get("size", size))
            if kind == b"S" or any(key.startswith("GNU.sparse.") for key in extended):
                raise ValueError(f"{name!r} is a sparse file: write the tar without --sparse")
            if size < 0:
                raise ValueError(f"{name!r} has a size below 0")
            if begin + size > n_bytes:
                raise ValueError(f"{name!r} lies beyond its end")
            if kind in _FILES and not name.endswith("/"):
                yield name, begin, size
            elif kind in _LINKS:
                skipped["linked"] += 1
            extended = {}
        position = begin + (size + _BLOCK - 1) // _BLOCK * _BLOCK


def _is_header(block: bytes) -> bool:
    """Whether a block is a member's header: its checksum is the sum of all bytes, signed in some programs, with spaces
    in the place of the checksum."""
    if len(block) != _BLOCK:
        return False
    spaced = block[:148] + b" " * 8 + block[156:]
    try:
        stated = _parse_number(block[148:156])
    except ValueError:
        return False
    # The lower half of Adler-32 is the sum of bytes, plus 1, modulo 65521, and several times faster than `sum`.
    return (stated + 1) % 65521 == zlib.adler32(spaced) & 0xFFFF or stated == int(np.frombuffer(spaced, np.int8).sum())


def _parse_number(field: bytes) -> int:
    """A number of a header: octal digits, or big-endian bytes if the digits do not suffice. Raises ValueError."""
    if field[:1] in (b"\x80", b"\xff"):
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[:1] == b"\xff" else 0)
    digits = field.partition(b"\0")[0].strip() or b"0"
    if not re.fullmatch(rb"[0-7]+", digits):
        raise ValueError("invalid header")
    return int(digits, 8)


def _parse_name(header: bytes) -> bytes:
    name, prefix = (header[begin:end].partition(b"\0")[0] for begin, end in ((0, 100), (345, 500)))
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _parse_extended(content: bytes) -> dict[str, bytes]:
    """The lines of an extended header, "LENGTH key=value"; LENGTH is that of the whole line. Raises ValueError."""
    pairs, offset = dict[str, bytes](), 0
    while content[offset : offset + 1] not in (b"", b"\0"):
        digits = content[offset : offset + 20].partition(b" ")[0]
        end = offset + int(digits)
        key, equals, value = content[offset + len(digits) + 1 : end - 1].partition(b"=")
        if not (equals and offset < end <= len(content)):  # the loop must advance
            raise ValueError("an extended header is invalid")
        pairs[key.decode(errors="replace")], offset = value, end
    return pairs
