"""Stored continuous latents: of images, as trainers of diffusion transformers read them, or of videos.

    latents/latents-00000.safetensors    "latents" (n, d, h, w), fp16, bf16 or fp32; "latents_flip", those of the images
                                         mirrored left to right; "labels" int64 (n,): LightningDiT's names
    latents/index.jsonl                  {"path": "cats/1.jpg", "shard": 0, "row": 0, "label": 0}, a line per image
    latents/index.json                   settings, shards and unreadable files; see shards.py
    latents/features/00000-00000.npy     with --format npy, fast-DiT's layout: SHARD-ROW.npy, a latent, fp32
                                         (1, d, h, w), and SHARD-ROW-flip.npy, that of the mirrored image
    latents/labels/00000-00000.npy       SHARD-ROW.npy, and SHARD-ROW-flip.npy: the label, int64 (1,)

Latents are means or samples of their Gaussians, or moments: (n, 2 d, h, w), means and then standard deviations.
"normalize" of index.json says what was done to them: "none"; "scale", (latent - shift_factor) * scaling_factor, with
the two numbers in its "config"; or "channels", (latent - latents_mean) / latents_std, with its two lists of d numbers,
or of d p^2, in patches of p x p places: number c p^2 + y p + x is for channel c at line y and column x of a patch.
Its "dtype" is that of the latents, and its "grid" the shape of one of them. The metadata of each shard say "normalize",
too; shards of earlier versions do not.

Of videos a shard has "latents" alone: a video has no label. A row is one frame of latents, (d, h, w), and a line is
that of codes of videos, see codes.py:

    {"path": "a.mp4", "shard": 0, "row": 12, "code_frames": 5, "frames": 17, "fps": 25.0}
    of_video = latents[line["row"]:][:line["code_frames"]]

Videos encoded with --keep_aspect have rows of a single position, (n, d), in the order of frames, lines and columns;
then "grid" of index.json is [d], and each line has the (h, w) of its frames:

    {"path": "b.mp4", "shard": 0, "row": 480, "code_frames": 5, "frames": 17, "fps": 25.0, "grid": [8, 14]}
    of_video = latents[line["row"]:][:5 * 8 * 14].reshape(5, 8, 14, -1).permute(0, 3, 1, 2)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from tandem.data.decoding.texts import normalize_text, read_single_text
from tandem.data.fields import Field, ImageField, SampleDataset
from tandem.data.sets import open_records
from tandem.data.sources.record import FieldSpec, FileRef, Record
from tandem.data.sources.rows import Rows
from tandem.data.sources.table import TableSource

from .codes import StoredCodes
from .films import FilmWriter
from .shards import Array, Column, row_blocks
from .writer import ShardWriter

if TYPE_CHECKING:
    from tandem.training.noise import Noise

LATENTS, FLIPPED, LABELS = "latents", "latents_flip", "labels"
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_DTYPES = (*DTYPES.values(), "int64")
_CLASS_NUMBER = re.compile(r"([0-9]{1,9})(\.0+)?")  # 4.0 is what pandas writes beside empty cells


@dataclass(frozen=True)
class LabelField(Field):
    """ "label": the class of an image, 0, 1, ...

    Args:
        is_stated: Whether the number, or the name of a table's class, is in a .cls beside the image, or in a column cls
            or label of its row. Otherwise the first folder of its name gives the class.
        numbers: The numbers of the classes by name. An image in no folder has the number after the last, which trainers
            of diffusion transformers take for no class.
        name_of: index -> the name of the image, see `RecordSource.name`.
        is_needed: Whether an image whose class is neither a number nor such a name is bad; if not, it has no label.
    """

    is_stated: bool
    numbers: Mapping[str, int]
    name_of: Callable[[int], str]
    is_needed: bool = True

    spec: ClassVar[FieldSpec] = FieldSpec("class", "class", (".cls",), ("cls", "label"), as_cells=True)

    def load(self, record: Record, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        if not self.is_stated:
            return {"label": self.numbers.get(_first_folder(self.name_of(index)), len(self.numbers))}
        cls = record.get(self.spec.name)
        if isinstance(cls, FileRef):
            text = read_single_text(cls)
        else:
            text = normalize_text(str(next(iter((cls or {}).values()), "")))
        number = _CLASS_NUMBER.fullmatch(str(self.numbers.get(text, text)))
        if not number:
            if not self.is_needed:
                return {}
            raise ValueError(f"its class is {text[:40]!r}: its .cls, or cls in its row, has to be a number from 0 on")
        return {"label": int(number[1])}


def _first_folder(name: str) -> str:
    """The first folder of a name; "" if there is none."""
    return "".join(PurePosixPath(name).parts[:-1][:1])


def open_labelled(spec: str, *, is_needed: bool = True, **options: Any) -> SampleDataset:
    """A set of images with their "label" (see `LabelField` for `is_needed`). A class that a table names has its number
    there. If no image has a class beside it, the folders, also those of members of tars, are numbered in sorted order,
    as torchvision's ImageFolder does. See `open_records` for `spec` and what is raised, and `ImageField` for the
    arguments."""
    image, class_names = ImageField(**options), list[str]()
    source = open_records(spec, [image.spec, LabelField.spec], "shapes", image.seed)
    is_stated = bool(source.examples(LabelField.spec.name))
    if is_stated:
        names = next(iter(source.classes.values()), []) if isinstance(source, Rows) else []
        class_names = [normalize_text(name) for name in names]
    elif not isinstance(source, TableSource):  # whose names are those of its files, and numbers
        class_names = sorted({_first_folder(source.name(index)) for index in range(len(source))} - {""})
    class_numbers = {name: number for number, name in enumerate(class_names)}
    return SampleDataset(source, [image, LabelField(is_stated, class_numbers, source.name, is_needed)])


def labels_line(labels: Collection[int | None]) -> str:
    """The line about the labels of a set; None stands for an image without a label."""
    classes = {label for label in labels if label is not None}
    if not classes:
        return "labels: none, because no class is a number"
    different = f"{len(classes)} different ones, {min(classes)} to {max(classes)}"
    text = different if len(classes) > 1 else f"all {min(classes)}"
    text += "; a class is a column cls or label, KEY.cls, or the first folder of a relative path" * (classes == {0})
    note = "; some images have none, because their class is no number" if None in labels else ""
    return f"labels: {text}{note}"


class LatentWriter(ShardWriter):
    """Shards of latents, from rows of moments fp32 (v, 2 d, h, w): those of an image and, if v is 2, of the mirrored
    image. A sample of the Gaussian depends only on the noise and the index of the image."""

    def __init__(self, noise: Noise, *arguments: Any, npy: bool) -> None:
        super().__init__(*arguments, npy=npy)
        self._noise = noise

    def columns(self, rows: Tensor, entries: Sequence[Any], items: Sequence[int]) -> dict[str, Tensor]:
        _, views, channels, *sides = rows.shape

        def draw() -> Tensor:
            shape = [channels // 2, *sides]
            return torch.stack([self._noise.normal(view, items, shape) for view in range(views)], 1)

        latents = _as_stored(rows, draw, self.output.settings)
        labels = torch.tensor([entry["label"] for entry in entries], dtype=torch.int64)
        return {**dict(zip((LATENTS, FLIPPED), latents.unbind(1), strict=False)), LABELS: labels}

    def arrays(self, shard: int, columns: Mapping[str, Tensor]) -> Iterator[tuple[str, Array]]:
        for name, ending in ((LATENTS, ""), (FLIPPED, "-flip")):
            for row, latent in enumerate(columns.get(name, ())):
                file = f"{shard:05d}-{row:05d}{ending}.npy"
                yield f"features/{file}", latent[None].float().numpy()
                yield f"labels/{file}", columns[LABELS][row, None].numpy()


class FilmLatentWriter(FilmWriter):
    """Shards of latents of films, from moments fp32 (f', 2 d, h', w'). A sample of the Gaussian depends only on the
    noise, the index of the film and the number of the frame of latents, however the film was cut."""

    def __init__(self, noise: Noise, *arguments: Any, npy: bool) -> None:
        super().__init__(*arguments, npy=npy)
        self._noise = noise

    def rows(self, codes: Tensor, index: int, first: int) -> Tensor:
        n, channels, *sides = codes.shape

        def draw() -> Tensor:
            return self._noise.normal(index, range(first, first + n), [channels // 2, *sides])

        latents = _as_stored(codes, draw, self.output.settings)
        return latents if len(self._empty.shape) > 2 else latents.movedim(1, -1).flatten(0, 2)


class StoredLatents(StoredCodes):
    """A complete folder of latents. Raises what `StoredCodes` raises. `open_shard` reads fp32 (n, d, h, w): the
    latents, or the means of moments, not normalised."""

    name = LATENTS

    def channel_statistics(self, shards: Sequence[int]) -> dict[int, list[list[float]]]:
        """For each shard and channel of the stored latents, or the means of moments: the count, the sum, the sum of
        squares, the minimum and the maximum."""
        statistics: dict[int, list[list[float]]] = {}
        for shard in shards:
            blocks = [_block_statistics(self._means(block)) for block in row_blocks(self.stored_rows(shard))]
            statistics[shard] = [_add_statistics(channel) for channel in zip(*blocks, strict=True)]
        return statistics

    def stored_rows(self, shard: int) -> Column:
        index, grid = self.index, self.index["grid"]
        with self.explain_errors(shard):
            if "latent_dtype" in index:  # in older folders the grid is (v, 2 d, h, w), the shape of moments
                grid = [grid[1] if index["latent"] == "moments" else grid[1] // 2, *grid[2:]]
            others = {FLIPPED: grid} if index["with_flip"] else {}
            if "frames_per_code" not in index:  # videos have no labels
                others[LABELS] = []
        return self.open_rows(shard, grid, _DTYPES, **others)

    def _means(self, rows: Tensor) -> Tensor:
        """The stored latents, or the means of moments, of rows, in fp32."""
        return (rows.chunk(2, dim=1)[0] if self.index["latent"] == "moments" else rows).float()

    def _decodable(self, rows: Tensor, sides: Sequence[int]) -> Tensor:
        latents = self._means(rows)
        if sides:
            latents = latents.reshape(-1, *sides, latents.shape[1]).movedim(-1, 1)
        scale, shift = _read_normalization(self.index)
        return latents / scale + shift


def _as_stored(moments: Tensor, draw: Callable[[], Tensor], settings: Mapping[str, Any]) -> Tensor:
    """Moments fp32 (..., 2 d, h, w) -> the latents that are written, or moments. `draw` gives the noise of a sample."""
    latents, deviations = moments.chunk(2, dim=-3)
    if settings["latent"] == "sample":
        latents = latents + deviations * draw()
    scale, shift = _read_normalization(settings)
    latents, deviations = (latents - shift) * scale, deviations * scale
    latents = torch.cat([latents, deviations], -3) if settings["latent"] == "moments" else latents
    latents = latents.to(getattr(torch, settings["dtype"]))
    if not latents.isfinite().all():
        raise ValueError(f"latents are not finite in {settings['dtype']}: give --latent_dtype bf16 or fp32")
    return latents


def _block_statistics(latents: Tensor) -> list[list[float]]:
    """Count, sum, sum of squares, minimum and maximum of each channel of latents (n, d, ...), n > 0."""
    channels = latents.double().transpose(0, 1).flatten(1)
    values = (channels.sum(1), channels.square().sum(1), channels.amin(1), channels.amax(1))
    return torch.stack([torch.full_like(values[0], channels.shape[1]), *values], 1).tolist()


def _add_statistics(parts: Sequence[Sequence[float]]) -> list[float]:
    """The statistics of a channel, from those of its parts."""
    counts, sums, squares, lowest, highest = zip(*parts, strict=True)
    return [*map(math.fsum, (counts, sums, squares)), min(lowest), max(highest)]


def channel_lines(statistics: Mapping[int, Sequence[Sequence[float]]]) -> Iterator[str]:
    """A line for each channel with mean, standard deviation and range, from `StoredLatents.channel_statistics`. The
    text does not depend on the spread of shards over processes."""
    channels = zip(*(statistics[shard] for shard in sorted(statistics) if statistics[shard]), strict=True)
    for channel, channel_statistics in enumerate(channels):
        count, total, squares, lowest, highest = _add_statistics(channel_statistics)
        mean = total / count
        deviation = math.sqrt(max(squares / count - mean**2, 0.0))
        yield f"channel {channel}: mean {mean:.4g}, deviation {deviation:.4g}, {lowest:.4g} to {highest:.4g}"


def _read_normalization(settings: Mapping[str, Any]) -> tuple[Any, Any]:
    """The factor of latents, and the shift that is subtracted before, by the settings of a folder: numbers, or tensors
    (d, 1, 1) or (d, h, w). Raises one of `READ_ERRORS` for damaged settings."""
    kind, config = settings["normalize"], settings["config"]
    if kind == "channels":
        channels = settings["grid"][0] // (2 if settings["latent"] == "moments" else 1)
        mean, std = (torch.tensor(list(map(float, settings[name]))) for name in ("latents_mean", "latents_std"))
        patch = math.isqrt(len(mean) // max(channels, 1))
        if not len(mean) == len(std) == channels * patch**2 > 0 or not (mean.isfinite() & (std > 0)).all():
            raise ValueError(f"its latents_mean and latents_std are not {channels} numbers each, the latter above 0")
        mean, std = (numbers.view(channels, patch, patch) for numbers in (mean, std))
        if patch > 1:
            height, width = settings["grid"][1:]
            tiles = (1, -(-height // patch), -(-width // patch))
            mean, std = (numbers.repeat(tiles)[:, :height, :width] for numbers in (mean, std))
        return 1 / std, mean
    if kind not in ("none", "scale"):
        raise ValueError(f"its normalize is {kind!r:.40}")
    return (config["scaling_factor"], config["shift_factor"] or 0.0) if kind == "scale" else (1.0, 0.0)
