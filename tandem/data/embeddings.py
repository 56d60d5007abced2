"""Stored embeddings of images and of their captions, as fields."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from tandem.data.sources.files import redact
from tandem.data.sources.opening import expand_pattern
from tandem.data.sources.record import FieldSpec, FileRef, Record, RecordSource
from tandem.data.sources.tar import TarSource, number_of, stem_of
from tandem.data.sources.user_dataset import ITEM
from tandem.io.reading import error_text

from .bad_samples import BadDatasetItem, SampleIncomplete, UserCodeError
from .decoding import items
from .decoding.arrays import Array, StoredArray, read_array_header
from .fields import Field


class Kind(NamedTuple):
    """A kind of embedding. `spec.name` is the key in a batch; `dimensions` is the number of dimensions of the array of
    one image; `flag` is the flag of its files of rows, see `embedding_rows`."""

    spec: FieldSpec
    dimensions: int
    flag: str


_IMAGE_SPEC = FieldSpec("image_embed", "image embedding", (".img_emb.npy", ".npy"), ("image_embed",))
_TEXT_SPEC = FieldSpec("text_encodings", "text encoding", (".text_emb.npy", ".text.npy"), ("text_encodings",))
IMAGE, TEXT = Kind(_IMAGE_SPEC, 1, "--image_embeddings"), Kind(_TEXT_SPEC, 2, "--text_embeddings")
KINDS = (IMAGE, TEXT)


@dataclass(frozen=True)
class EmbeddingField(Field):
    """Stored "image_embed" or "text_encodings" of an image: float32 of `shape`, which is (d,), or (L, d) where no
    caption has more than L tokens; shorter encodings are padded with rows of 0. An image that has none is
    `SampleIncomplete`; so is one that has only zeros, except in a user's dataset. `rows`: index -> array, if the arrays
    are not in the records."""

    kind: Kind
    shape: tuple[int, ...]
    rows: Callable[[int], Array] | None = None
    fingerprint: str = field(default="", kw_only=True)

    @property
    def spec(self) -> FieldSpec:
        return self.kind.spec

    def from_item(self, item: Any) -> Array | None:
        return items.array_of(item, self.spec.name, self.kind.dimensions)

    def read_array(self, record: Record) -> Array | None:
        """The array of a record, None if it has none. A file may hold a batch of one, (1, d), which becomes (d,)."""
        content = self.content(record)
        if isinstance(content, FileRef):
            array = read_array_header(content).read()
            shape = array.shape[-self.kind.dimensions :]
            return array.reshape(shape) if array.size == math.prod(shape) else array
        return np.asarray(content()) if callable(content) else content

    def load(self, record: Record, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        noun, is_user_item = self.spec.noun, ITEM in record
        array = self.rows(index) if self.rows else self.read_array(record)
        if array is None:
            raise SampleIncomplete(f"it has no {noun}")
        if array.shape[-1:] != self.shape[-1:] or array.ndim != len(self.shape) or len(array) > self.shape[0]:
            if is_user_item:
                is_text = self.kind == TEXT
                shape = f"at most {self.shape} (--max_text_len)" if is_text else f"{self.shape}, as in the first item"
                raise items.item_error(array, f"the {noun}, of {shape}")
            raise ValueError(f"its {noun}: shape {array.shape}, where others have {self.shape}")
        if not np.isfinite(array).all():
            raise ValueError(f"its {noun}: not all numbers are finite")
        if not array.any() and not is_user_item:
            raise SampleIncomplete(f"its {noun}: zeros only, which stand for none")
        padded = np.zeros(self.shape, np.float32)
        padded[: len(array)] = array
        return {self.spec.name: torch.from_numpy(padded)}


def embedding_field(source: RecordSource, kind: Kind, longest_text: int) -> EmbeddingField | None:
    """The embeddings in the records of a source, None if it has none. The shape is that of the first example that can
    be read: of texts the longest one comes first. Raises ValueError, in one line, if no example can be read."""
    examples = source.examples(kind.spec.name)
    if not examples:
        return None
    probe, failures = EmbeddingField(kind, ()), list[UserCodeError]()
    for example in examples if kind == TEXT else sorted(examples):
        try:
            record = source.record(example)
            array = probe.read_array(record)
            if array is None and ITEM in record:
                raise items.missing_array_error(record[ITEM], kind.spec.name, kind.dimensions)
            if array is None:
                raise ValueError("it is empty")
            _check_dimensions(kind, array.shape)
        except BadDatasetItem as error:
            raise BadDatasetItem(f"--dataset: {source.describe(example)} {error}") from None
        except (OSError, ValueError) as error:
            reason = f"cannot read the {kind.spec.noun} of {source.describe(example)!r}: {error_text(error)}"
            failures.append(UserCodeError(reason, getattr(error, "traceback", "")))
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                break  # an error of the disk or the server would meet the other examples, too
            continue
        # Files come longest text first, and all texts of a demonstration have one length. The lengths of table rows
        # and dataset items are unknown: take the model's limit.
        content = record.get(kind.spec.name)
        fits_all = kind == IMAGE or isinstance(content, FileRef) or callable(content)
        shape = array.shape if fits_all else (longest_text, *array.shape[1:])
        return EmbeddingField(kind, shape, fingerprint=str(array.shape))
    raise failures[0]


def embedding_rows(source: RecordSource, kind: Kind, spec: str, *, index_width: int) -> EmbeddingField:
    """Embeddings in one file of rows for each tar, such as img_emb_0012.npy, (n, d), for 00012.tar: the last
    `index_width` digits of an image's key are the number of its row.

    Args:
        spec: The files: a folder, a pattern (`emb/*.npy`), a range (`emb/i_{0000..0099}.npy`), or a name with `{}`.

    Raises ValueError, in one line, if a tar has no such file, or the files have different shapes.
    """
    if not isinstance(source, TarSource):
        ending = kind.spec.endings[-1]
        raise ValueError(
            f"{kind.flag} is for tars; in a folder, put a {ending} file beside each image; in a table, a column "
            f"{kind.spec.name}"
        )
    files = {number_of(path, kind.flag): path for path in _list_row_files(spec)}
    numbers = [number_of(path, "--image_folder") for path in source.paths]
    if missing := [path for path, number in zip(source.paths, numbers, strict=True) if number not in files]:
        raise ValueError(
            f"{kind.flag} {spec!r} has no file for {len(missing)} of {len(numbers)} tars, the first is {missing[0]!r}: "
            f"add it, or select tars that have one by --start_shard and --end_shard"
        )
    arrays: list[StoredArray] = []
    for number in numbers:
        try:
            arrays.append(read_array_header(FileRef(files[number])))
            _check_dimensions(kind, arrays[-1].shape[1:])
        except (OSError, ValueError) as error:
            noun = kind.spec.noun
            raise ValueError(f"cannot read the {noun}s in {files[number]!r}: {error_text(error)}") from None
        if arrays[-1].shape[1:] != arrays[0].shape[1:]:
            last, first = (f"{array.shape[1:]} in {array.ref.path!r}" for array in (arrays[-1], arrays[0]))
            raise ValueError(f"{kind.spec.noun}s have the shape {last}, but {first}")
    for path, indices in zip(source.paths, source.shards or (), strict=True):
        if indices:
            row_of(source.name(indices[0]), index_width, path)
    shapes = [array.shape for array in arrays]
    return EmbeddingField(kind, shapes[0][1:], partial(_load_row, source, arrays, index_width), fingerprint=str(shapes))


def _load_row(tars: TarSource, arrays: Sequence[StoredArray], index_width: int, index: int) -> Array:
    """The embedding of an image in the file of its tar."""
    array = arrays[tars.shard(index)]
    row = row_of(tars.name(index), index_width)
    if row >= array.shape[0]:
        raise ValueError(f"it is row {row} of {redact(array.ref.path)}, which has only {array.shape[0]}")
    return array.row(row)


def row_of(name: str, index_width: int, tar: str = "") -> int:
    """The row of an image by its name: "00012/000120034.jpg" -> 34 for a width of 4.

    Raises ValueError, in one line, if the key does not end with so many digits.
    """
    key = stem_of(name)
    digits = key[-index_width:]
    if len(digits) < index_width or not (digits.isascii() and digits.isdigit()):
        location = f" in {tar!r}" if tar else ""
        raise ValueError(f"the key {key!r}{location} does not end with {index_width} digits, the row of its embedding")
    return int(digits)


def _list_row_files(spec: str) -> list[str]:
    path = os.path.expanduser(spec)
    if os.path.isdir(path):
        path = os.path.join(glob.escape(path), "*.npy")
    return [path] if os.path.isfile(path) else expand_pattern(path.replace("{}", "[0-9]*"))


def _check_dimensions(kind: Kind, shape: tuple[int, ...]) -> None:
    if len(shape) != kind.dimensions or 0 in shape:
        raise ValueError(f"that of one image has the shape {shape}, not {items.ARRAY_SHAPES[kind.dimensions]}")
