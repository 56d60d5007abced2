"""Images with captions, and with embeddings that were computed beforehand: in tars, or in a folder."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tandem.files.reading import open_regular

from ..crops import CENTER, Crop
from ..files.find import Folder, TarFiles, find_files
from ..files.opening import Listing, list_files
from ..files.table_columns import IMAGES
from ..files.table_files import TableFiles
from ..files.tables import Tables
from ..files.tars import Members, Tars
from ..sounds.sidecars import TEXT_KEYS, texts_of_row
from .decoding import ENDINGS
from .embeddings import IMAGE, KINDS, TEXT, Embeddings, Kind, embeddings_beside, embeddings_by_row, number_of
from .sets import ImageFiles, Images

_CAPTION = (".txt",)
_BESIDE = (_CAPTION, IMAGE.endings, TEXT.endings)
_CAPTIONS, _FIRST_EMBEDDING = 1, 2  # kinds of members, after that of images
_MEMBERS = Members("image", (ENDINGS, *_BESIDE), suffix=".captions", whole=True)
_LONGEST_CAPTION = 1 << 16  # bytes

Sizes = npt.NDArray[np.int64]
Place = tuple[str, int, int | None]  # path, first byte, size; None: to the end of the file


class Captioned(Images, Protocol):
    """A numbered set of images with captions. `shards`: the indices of each tar; None if there are no tars."""

    shards: Sequence[range] | None
    has_captions: bool

    def caption(self, index: int) -> str:
        """The caption, "" if there is none. Raises OSError or ValueError, in one line, if it cannot be read."""
        ...

    def embeddings(self, kind: Kind) -> Embeddings | None:
        """The embeddings of one kind, None if the set has none. Raises ValueError, in one line, if they do not fit."""
        ...


class Shards(NamedTuple):
    """Which tars are used, and where their embeddings are.

    first, last: numbers of the first tar and of the last one, which is included; None: no limit;
    width: digits of the number that `{}` stands for in the path of tars;
    index_width: digits at the end of an image's key that are the number of its row;
    embeddings: flag and files of each kind of embedding that has files of rows.
    """

    first: int = 0
    last: int | None = None
    width: int = 6
    index_width: int = 4
    embeddings: dict[str, tuple[str, str]] = {}  # noqa: RUF012  (nothing changes it)


ALL_SHARDS = Shards()


class CaptionedFiles:
    """Images in tars or in a folder, with what stands beside them. See `Captioned` for the methods."""

    def __init__(self, places: _InTars | _InFolder, images: ImageFiles, shards: Shards) -> None:
        self._places, self._shards = places, shards
        self.load, self.describe, self.name = images.load, images.describe, images.name
        self.shards = places.shards
        self.has_captions = places.has_any(_CAPTIONS)
        self.fingerprint, self.skipped = images.fingerprint, images.skipped

    def __len__(self) -> int:
        return len(self._places)

    def caption(self, index: int) -> str:
        place = self._places.beside(index, _CAPTIONS)
        return "" if place is None else _read_text(*place)

    def embeddings(self, kind: Kind) -> Embeddings | None:
        if kind.key in self._shards.embeddings:
            flag, spec = self._shards.embeddings[kind.key]
            if not isinstance(self._places, _InTars):
                raise ValueError(f"{flag} is for tars; in a folder, put a {kind.endings[-1]} file beside each image")
            return embeddings_by_row(kind, self._places.tars, spec, flag, index_width=self._shards.index_width)
        number = _FIRST_EMBEDDING + KINDS.index(kind)
        # Texts are as long as the longest one; image embeddings have one size, but for a damaged one.
        sizes = self._places.sizes(number)
        example = int(sizes.argmax())
        if sizes[example] < 0:
            return None
        if kind == IMAGE:
            values, counts = np.unique(sizes[sizes >= 0], return_counts=True)
            example = int((sizes == values[counts.argmax()]).argmax())
        return embeddings_beside(kind, _Beside(self._places, number), example, self.describe(example))


class CaptionedTable:
    """Images in the rows of Arrow or parquet files, each with the first of its captions, in columns of the names that
    a manifest of sounds has. Embeddings are not read. See `Captioned` for the methods."""

    shards: Sequence[range] | None = None

    def __init__(self, table: Tables, images: ImageFiles, shards: Shards) -> None:
        self._table, self._shards = table, shards
        self.load, self.describe, self.name = images.load, images.describe, images.name
        self.has_captions = bool(table.texts)
        self.fingerprint, self.skipped = images.fingerprint, images.skipped

    def __len__(self) -> int:
        return len(self._table)

    def caption(self, index: int) -> str:
        return next(iter(texts_of_row(self._table.cells(index)).captions), "")

    def embeddings(self, kind: Kind) -> Embeddings | None:
        if kind.key in self._shards.embeddings:
            raise ValueError(
                f"{self._shards.embeddings[kind.key][0]} is for tars: of a table, compute them with --clip"
            )
        return None


class _Beside:
    """Where the file of one kind beside each image is. A class, because loader processes may get a copy of it."""

    def __init__(self, places: _InTars | _InFolder, number: int) -> None:
        self._places, self._number = places, number

    def __call__(self, index: int) -> Place | None:
        return self._places.beside(index, self._number)


class _InTars:
    def __init__(self, paths: list[str]) -> None:
        self.tars = self.images = Tars(paths, _MEMBERS)
        self.shards: Sequence[range] | None = self.tars.shards

    def __len__(self) -> int:
        return len(self.tars)

    def beside(self, index: int, number: int) -> Place | None:
        found = self.tars.beside(index, number)
        return None if found is None else (self.tars.path(index), *found)

    def has_any(self, number: int) -> bool:
        """Whether a file of one kind stands beside any image."""
        return bool((self.sizes(number) >= 0).any())

    def sizes(self, number: int) -> Sizes:
        """Bytes of the file of one kind beside each image, -1 if there is none."""
        return self.tars.table[:, 2 * number + 1]


class _InFolder:
    shards: Sequence[range] | None = None

    def __init__(self, images: Folder) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def beside(self, index: int, number: int) -> Place | None:
        path = self.images.beside(index, _BESIDE[number - 1])
        return None if path is None else (path, 0, None)

    def has_any(self, number: int) -> bool:
        """As `_InTars.has_any`."""
        return self.images.has_any_beside(_BESIDE[number - 1])

    def sizes(self, number: int) -> Sizes:
        """As `_InTars.sizes`."""
        paths = self.images.all_beside(_BESIDE[number - 1])
        return np.fromiter(map(self._size, paths), np.int64, len(self))

    def _size(self, path: str | None) -> int:
        try:
            return -1 if path is None else os.path.getsize(path)
        except OSError:
            return 0


def open_captioned(
    spec: str, *, image_size: int, shards: Shards = ALL_SHARDS, flip: bool = False, seed: int = 0, crop: Crop = CENTER
) -> CaptionedFiles | CaptionedTable:
    """Open a set of images with captions: a folder, tars, Arrow or parquet files, named as for `open_images`, or by a
    path with `{}`. Images whose shorter side has fewer than `image_size` pixels are `Incomplete`: a model that draws
    would learn their blur. So nothing smaller is cut out of an image either.

    Raises ValueError, in one line, if there is no such set or nothing in it.
    """
    path = os.path.expanduser(spec)
    files = find_files(_numbered(path, shards), "images", _listed, manifests=False, tables=True)
    crop = dataclasses.replace(crop, least=image_size)
    alike: dict[str, Any] = {
        "image_size": image_size, "flip": flip, "seed": seed, "enlarge": False, "crop": crop
    }  # fmt: skip
    places: _InTars | _InFolder
    if isinstance(files, TarFiles):
        places = _InTars(_within(files.paths, shards))
    else:
        if shards.first or shards.last is not None:
            raise ValueError(f"--start_shard and --end_shard select tars, and {spec!r} holds none")
        if isinstance(files, TableFiles):
            table = Tables(files, IMAGES, TEXT_KEYS)
            images = ImageFiles(table, **alike)
            return CaptionedTable(table, images, shards)
        assert isinstance(files, Folder)
        places = _InFolder(files)
    return CaptionedFiles(places, ImageFiles(places.images, **alike), shards)


def _listed(folder: str) -> Listing:
    return list_files(folder, ENDINGS, "images", "demo:shapes", beside=tuple(itertools.chain(*_BESIDE)))


def _numbered(path: str, shards: Shards) -> str:
    """The pattern or range that a path with `{}` stands for; another path as it is."""
    if "{}" not in path:
        return path
    if shards.last is None:
        return path.replace("{}", "[0-9]" * shards.width)
    if shards.last < shards.first:
        raise ValueError(f"--end_shard {shards.last} is smaller than --start_shard {shards.first}")
    first, last = (f"{number:0{shards.width}d}" for number in (shards.first, shards.last))
    return path.replace("{}", f"{{{first}..{last}}}")


def _within(paths: list[str], shards: Shards) -> list[str]:
    if not shards.first and shards.last is None:
        return paths
    numbers = [number_of(path, "--image_folder") for path in paths]
    last = max(numbers) if shards.last is None else shards.last
    chosen = [path for path, number in zip(paths, numbers, strict=True) if shards.first <= number <= last]
    if not chosen:
        raise ValueError(
            f"no tar has a number from --start_shard {shards.first} to --end_shard {last}: they have {min(numbers)} to "
            f"{max(numbers)}"
        )
    return chosen


def _read_text(path: str, offset: int, size: int | None) -> str:
    """The text in a file or a part of one, with single spaces; at most 64 KiB are read."""
    with open_regular(path) as file:
        content = os.pread(file.fileno(), min(_LONGEST_CAPTION if size is None else size, _LONGEST_CAPTION), offset)
    try:
        return " ".join(content.decode("utf-8-sig").split())
    except UnicodeDecodeError as error:
        raise ValueError(f"its caption is no UTF-8 text ({error.reason})") from None
