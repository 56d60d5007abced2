"""Image embeddings and text encodings that were computed beforehand: beside each image, or a file of rows for each tar.

In a tar or a folder, KEY.img_emb.npy (or KEY.npy) is the embedding (d,) of the image KEY.jpg, and KEY.text_emb.npy (or
KEY.text.npy) are the encodings (l, d) of its caption, one row per token. Or the embeddings of the images in 00012.tar
are the rows of a file such as img_emb_0012.npy, (n, d), or text_emb_0012.npy, (n, l, d): the last digits of an image's
key are the number of its row. A row of zeros there means that there is no embedding.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..bad_samples import Incomplete, reason_of
from ..files.arrays import Array, StoredArray, find_array
from ..files.find import expanded
from ..files.packed import fingerprint_of
from ..files.tars import Tars, stem_of

_DIGITS = re.compile(r"(\d+)$")


class Kind(NamedTuple):
    """A kind of embedding.

    key: of the batch's entry;
    noun: what messages call it;
    dimensions: of the array of one image;
    endings: of the files beside an image.
    """

    key: str
    noun: str
    dimensions: int
    endings: tuple[str, ...]


IMAGE = Kind("image_embed", "image embedding", 1, (".img_emb.npy", ".npy"))
TEXT = Kind("text_encodings", "text encoding", 2, (".text_emb.npy", ".text.npy"))
KINDS = (IMAGE, TEXT)


class Embeddings(Protocol):
    """One kind of embedding of every image of a set. `shape` is that of one image: (d,), or (L, d) where no caption has
    more than L tokens. `fingerprint` is equal where the same shapes were found."""

    shape: tuple[int, ...]
    fingerprint: str

    def load(self, index: int) -> Tensor:
        """float32, of `shape`; encodings of fewer tokens end with rows of 0.

        Raises OSError, ValueError, in one line, if it cannot be read or has another shape, and `Incomplete` if there is
        none.
        """
        ...


class StoredEmbeddings:
    """Embeddings that `read` takes from files: index -> array, None if there is none. `stored`: the shapes of the files
    that hold several. See `Embeddings`."""

    def __init__(
        self, kind: Kind, shape: tuple[int, ...], read: Callable[[int], Array | None], stored: Sequence[Any] = ()
    ) -> None:
        self.kind, self.shape, self._read = kind, shape, read
        self.fingerprint = fingerprint_of([repr((shape, *stored)).encode()])

    def load(self, index: int) -> Tensor:
        array = self._read(index)
        if array is None:
            raise Incomplete(f"it has no {self.kind.noun}")
        array = _without_ones(array, self.kind.dimensions)
        if array.shape[-1:] != self.shape[-1:] or array.ndim != len(self.shape) or len(array) > self.shape[0]:
            raise ValueError(f"its {self.kind.noun}: shape {array.shape}, where others have {self.shape}")
        if not np.isfinite(array).all():
            raise ValueError(f"its {self.kind.noun}: not all numbers are finite")
        if not array.any():
            raise Incomplete(f"its {self.kind.noun}: zeros only, which stand for none")
        whole = np.zeros(self.shape, np.float32)
        whole[: len(array)] = array
        return torch.from_numpy(whole)


def _without_ones(array: Array, dimensions: int) -> Array:
    """(1, d) -> (d,): some programs write a batch of one."""
    return array.reshape(array.shape[-dimensions:]) if array.size == np.prod(array.shape[-dimensions:]) else array


class Beside:
    """Embeddings in files of their own. `place`: index -> path, first byte and size of the file (None: all of it), or
    None if an image has none."""

    def __init__(self, place: Callable[[int], tuple[str, int, int | None] | None]) -> None:
        self._place = place

    def __call__(self, index: int) -> Array | None:
        place = self._place(index)
        return None if place is None else find_array(*place).read()


def embeddings_beside(
    kind: Kind, place: Callable[[int], tuple[str, int, int | None] | None], example: int, name: str
) -> StoredEmbeddings:
    """Embeddings in files beside the images, see `Beside`. The shape is that of the image with the index `example`,
    which messages call `name`.

    Raises ValueError, in one line, if that embedding cannot be read.
    """
    found = place(example)
    assert found is not None
    try:
        array = _without_ones(find_array(*found).read(), kind.dimensions)
        _check_dimensions(kind, array.shape)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the {kind.noun} of {name!r}: {reason_of(error)}") from None
    return StoredEmbeddings(kind, array.shape, Beside(place))


class Rows:
    """Embeddings in one file for each tar; the last `index_width` digits of an image's key number its row."""

    def __init__(self, tars: Tars, arrays: Sequence[StoredArray], index_width: int) -> None:
        self._tars, self._arrays, self._index_width = tars, arrays, index_width

    def __call__(self, index: int) -> Array:
        array = self._arrays[self._tars.shard(index)]
        row = row_of(self._tars.name(index), self._index_width)
        if row >= array.shape[0]:
            raise ValueError(f"it is row {row} of {array.path}, which has only {array.shape[0]}")
        return array.row(row)


def embeddings_by_row(kind: Kind, tars: Tars, spec: str, flag: str, *, index_width: int) -> StoredEmbeddings:
    """Embeddings in one file for each tar.

    Args:
        spec: The files, as `embedding_files` takes it.
        flag: The flag that gave `spec`, for messages.
        index_width: Digits at the end of a key that are the number of a row.

    Raises ValueError, in one line, if a tar has no such file, or they do not fit to one another.
    """
    files = {number_of(path, flag): path for path in embedding_files(spec)}
    wanted = [number_of(path, "--image_folder") for path in tars.paths]
    if missing := [path for path, number in zip(tars.paths, wanted, strict=True) if number not in files]:
        raise ValueError(
            f"{flag} {spec!r} has no file for {len(missing)} of {len(wanted)} tars, the first is {missing[0]!r}: add "
            f"it, or select tars that have one by --start_shard and --end_shard"
        )
    arrays: list[StoredArray] = []
    for number in wanted:
        try:
            arrays.append(find_array(files[number]))
            _check_dimensions(kind, arrays[-1].shape[1:])
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read the {kind.noun}s in {files[number]!r}: {reason_of(error)}") from None
        if arrays[-1].shape[1:] != arrays[0].shape[1:]:
            ours, theirs = (f"{array.shape[1:]} in {array.path!r}" for array in (arrays[-1], arrays[0]))
            raise ValueError(f"{kind.noun}s have the shape {ours}, but {theirs}")
    for shard, indices in enumerate(tars.shards):
        if indices:
            row_of(tars.name(indices[0]), index_width, tars.paths[shard])
    shapes = [array.shape for array in arrays]
    return StoredEmbeddings(kind, shapes[0][1:], Rows(tars, arrays, index_width), shapes)


def _check_dimensions(kind: Kind, shape: tuple[int, ...]) -> None:
    if len(shape) != kind.dimensions or 0 in shape:
        needed = {1: "(d,)", 2: "(tokens, d)"}[kind.dimensions]
        raise ValueError(f"that of one image has the shape {shape}, not {needed}")


def row_of(name: str, index_width: int, tar: str = "") -> int:
    """Row of an image by its name: "00012/000120034.jpg" -> 34 for a width of 4.

    Raises ValueError, in one line, if the key does not end with so many digits.
    """
    key = stem_of(name)
    digits = key[-index_width:]
    if len(digits) < index_width or not (digits.isascii() and digits.isdigit()):
        where = f" in {tar!r}" if tar else ""
        raise ValueError(f"the key {key!r}{where} does not end with {index_width} digits, the row of its embedding")
    return int(digits)


def number_of(path: str, flag: str) -> int:
    """Number of a shard by its file's name: "img_emb_0012.npy" and "00012.tar" -> 12."""
    found = _DIGITS.search(stem_of(os.path.basename(path)))
    if found is None:
        raise ValueError(f"{flag}: the name of {path!r} does not end with the number of its shard, such as 00012")
    return int(found[1])


def embedding_files(spec: str) -> list[str]:
    """Files of a folder, a pattern (`emb/*.npy`), a range (`emb/i_{0000..0099}.npy`), or a name with `{}` for a number.

    Raises ValueError, in one line, if there is none.
    """
    path = os.path.expanduser(spec)
    if os.path.isdir(path):
        path = os.path.join(glob.escape(path), "*.npy")
    elif os.path.isfile(path):
        return [path]
    return expanded(path.replace("{}", "[0-9]*"))
