"""Fields decode the parts of a record that a script trains on; a `SampleDataset` is a source and the fields of its
records. A field states what it reads by a `FieldSpec`, so that every field works with every source."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from tandem.data.decoding.images import CENTER, PILLOW_BILINEAR, Crop, decode_image, decode_picture, randomly_flipped
from tandem.data.decoding.images import ENDINGS as IMAGE_ENDINGS
from tandem.data.decoding.texts import TEXT_KEYS, Texts, clean_captions, read_single_text, read_texts, texts_of_row
from tandem.data.sources.demo.clips import FRAMES_PER_SECOND
from tandem.data.sources.record import FieldSpec, FileRef, Record, RecordSource
from tandem.data.sources.user_dataset import ITEM
from tandem.hashing import Draws, derive_key
from tandem.io.reading import parse_json
from tandem.sides import Sides

from .bad_samples import BadDatasetItem
from .decoding import channels, items, sounds, videos
from .tokenizers import Tokenizer

CLASS_KEYS = ("category", "label", "labels", "class")
TEXTS = FieldSpec("texts", "caption", (".json", ".txt"), (*TEXT_KEYS, "label"), as_cells=True)


class Field:
    """A part of each record that a script trains on. `fingerprint` becomes a part of that of the data set."""

    @property
    def spec(self) -> FieldSpec:
        raise NotImplementedError

    #: Item of a user's dataset -> its content for this field. Raises `BadDatasetItem` if the item has a wrong form.
    from_item: ClassVar[Callable[..., Any]]

    fingerprint: str = ""

    def content(self, record: Record) -> Any:
        """The record's content for this field, see `Record`; None if there is none."""
        return self.from_item(record[ITEM]) if ITEM in record else record.get(self.spec.name)

    def load(self, record: Record, index: int, epoch: int, augment: bool) -> dict[str, Any]:
        """The sample's entries of the batch. With `augment`, random choices depend only on the field's seed, the epoch
        and the index; without it nothing is random. Raises OSError, ValueError, in one line, or `SampleIncomplete`."""
        raise NotImplementedError


@dataclass(frozen=True)
class ImageField(Field):
    """ "images": (channels, height, width) of `image_size`, uint8, or with `channels` other than 3 float32 in [0, 1].

    Args:
        channels: 3 (RGB), or another number, see `decode_channels`.
        flip: Whether half of the augmented images are mirrored left to right.
        enlarge: Whether images with fewer pixels are enlarged; else they are `SampleIncomplete`.
        crop: How augmented images are cropped; others get the centre crop. Images of a demonstration are not cropped.
        resize: How images that are not augmented are resized (`decode_image`).
    """

    image_size: Sides
    channels: int = 3
    flip: bool = False
    seed: int = 0
    enlarge: bool = True
    crop: Crop = CENTER
    resize: str = PILLOW_BILINEAR

    def __post_init__(self) -> None:
        if self.channels != 3 and self.resize != PILLOW_BILINEAR:
            raise ValueError(f"--resize {self.resize} is for images of 3 channels, not {self.channels}; leave it out")

    _columns: ClassVar = (*items.IMAGE_NAMES, "jpg", "jpeg", "png", "webp")

    @property
    def spec(self) -> FieldSpec:
        if self.channels == 3:
            return FieldSpec("image", "image", IMAGE_ENDINGS, self._columns, feature="Image")
        return FieldSpec("image", "image", channels.ENDINGS, (*self._columns, "npy", "tif", "tiff"), feature="Image")

    def content(self, record: Record) -> Any:
        if self.channels != 3 and ITEM in record:
            return items.channels_of(record[ITEM])
        return super().content(record)

    from_item = staticmethod(items.image_of)

    def load(self, record: Record, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        choose_box, content = self.crop.box_chooser(epoch, index), self.content(record)
        options: dict[str, Any] = {"choose_box": choose_box} if augment else {"resize": self.resize}
        if self.channels != 3:
            if callable(content):
                image = content(self.image_size, self.channels) / 255
            else:
                image = channels.decode_channels(content, self.image_size, self.channels, options.get("choose_box"))
        elif isinstance(content, FileRef):
            image = decode_image(content, self.image_size, self.channels, enlarge=self.enlarge, **options)
        elif isinstance(content, Image.Image):
            image = decode_picture(content, self.image_size, self.channels, enlarge=self.enlarge, **options)
        else:
            image = content(self.image_size, self.channels)
        return {"images": randomly_flipped(image, self.seed, epoch, index) if self.flip and augment else image}


@dataclass(frozen=True)
class OneFrameField(ImageField):
    """ "videos": images as clips of one frame, (channels, 1, height, width)."""

    def load(self, record: Record, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        return {"videos": super().load(record, index, epoch, augment)["images"][:, None]}


@dataclass(frozen=True)
class ClipField(Field):
    """ "videos": uint8 (3, num_frames, height, width), see `videos.ClipDecoder`; an image is a video of one frame. Of
    items of a user's dataset with `channels` other than 3: float32 (channels, num_frames, height, width) in [0, 1].
    `flip`: whether half of the augmented clips are mirrored left to right."""

    clips: videos.ClipDecoder
    flip: bool = False
    channels: int = 3

    @property
    def spec(self) -> FieldSpec:
        # Where short clips are skipped, images are not even listed.
        takes_images = self.clips.short_clips != "skip" or self.clips.num_frames == 1
        return FieldSpec(
            "clip", "video", videos.ENDINGS, ("video", "clip", "mp4", "webm", "mkv"), feature="Video",
            further=IMAGE_ENDINGS if takes_images else (),
        )  # fmt: skip

    def load(self, record: Record, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        content = self.content(record)
        if isinstance(content, FileRef):
            clip = self.clips.load(content, index, epoch, augment)
        elif isinstance(content, items.VideoItem):
            clip = self._make_clip(content, index, epoch, augment)
        else:
            clip = self._draw_clip(content)
        flip = self.flip and augment
        return {"videos": randomly_flipped(clip, self.clips.seed, epoch, index) if flip else clip}

    from_item = staticmethod(items.video_of)

    def frames(self, record: Record, multiple: int | None = None) -> Iterator[tuple[Tensor, float | None]]:
        """All frames of a video, see `videos.ClipDecoder.frames`; of a demonstration, which is endless, those of a
        clip."""
        content = record[self.spec.name]
        if isinstance(content, FileRef):
            return self.clips.frames(content, multiple)
        return ((frame, FRAMES_PER_SECOND / self._frames_per_step) for frame in self._draw_clip(content).unbind(1))

    @property
    def _frames_per_step(self) -> float:
        """Frames of a demonstration scene per frame of a clip."""
        return FRAMES_PER_SECOND / self.clips.fps if self.clips.fps else self.clips.frame_stride

    def _draw_clip(self, draw: Callable[..., Tensor]) -> Tensor:
        return draw(self.clips.image_size, self.clips.num_frames, self._frames_per_step)

    def _make_clip(self, video: items.VideoItem, index: int, epoch: int, augment: bool) -> Tensor:
        fraction = Draws("clip", self.clips.seed, epoch, index).uniform() if augment else 0.5
        numbers = self._frame_numbers(video, fraction)
        size, choose_box = self.clips.image_size, self.clips.crop.box_chooser(epoch, index) if augment else None
        if self.channels == 3:
            pictures = map(video.picture, numbers)
            frames = (decode_picture(picture, size, 3, choose_box=choose_box) for picture in pictures)
        else:
            arrays = (video.frames[number] for number in numbers)
            frames = (channels.decode_channels(array, size, self.channels, choose_box) for array in arrays)
        return self.clips.to_clip([frame.permute(1, 2, 0).numpy() for frame in frames])

    def _frame_numbers(self, video: items.VideoItem, fraction: float) -> list[int]:
        """The frame numbers of a clip; fewer than num_frames if the video has no more."""
        n, step = len(video.frames), video.fps / self.clips.fps if self.clips.fps else float(self.clips.frame_stride)
        count = min(self.clips.num_frames, math.ceil(n / step))
        start = max(0.0, n - 1 - (count - 1) * step) * fraction
        if not self.clips.fps:
            start = math.floor(start)
        return [min(n - 1, math.floor(start + number * step + 1e-6)) for number in range(count)]


@dataclass(frozen=True)
class SoundField(Field):
    """ "waveforms": float32 in [-1, 1], see `sounds.ClipDecoder`: (clip_samples,); with `max_clips`, (k, clip_samples),
    the 1 <= k <= max_clips clips that are spread over a sound, or over the part of it that a table selects."""

    clips: sounds.ClipDecoder
    max_clips: int | None = None

    spec: ClassVar[FieldSpec] = FieldSpec(
        "sound", "sound", sounds.ENDINGS, ("audio", "sound", "wav", "flac", "mp3", "ogg", "opus"), feature="Audio",
        further=sounds.FURTHER_ENDINGS,
    )  # fmt: skip

    def load(self, record: Record, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        content = self.content(record)
        if not isinstance(content, FileRef):
            clip = content(self.clips.sample_rate, self.clips.clip_samples)
            return {"waveforms": clip[None] if self.max_clips else clip}
        if self.max_clips:
            return {"waveforms": self.clips.load_clips(content, self.max_clips)}
        return {"waveforms": self.clips.load(content, index, epoch, augment)}

    from_item = staticmethod(items.sound_of)


@dataclass(frozen=True)
class TextsField(Field):
    """The texts of a sound: "tokens", "lengths", "captions" and "caption_ids" of one of its captions; "all_captions"
    and "labels". In training, (seed, epoch, index) choose the caption; else it is the first."""

    tokenizer: Tokenizer
    seed: int = 0

    spec: ClassVar[FieldSpec] = TEXTS

    from_item = staticmethod(items.texts_of)

    def load(self, record: Record, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        captions, label = read_sound_texts(self.content(record))
        caption = Draws("caption", self.seed, epoch, index).choice(captions) if augment else captions[0]
        tokens, (length,) = self.tokenizer.encode([caption])
        if not augment:  # validation encodes all: fail here, where the error names the sound
            self.tokenizer.encode([*captions, *([label] if label else [])])
        return {
            "tokens": tokens[0], "lengths": length, "captions": caption,
            "caption_ids": torch.tensor(derive_key("caption", caption) - (1 << 63), dtype=torch.int64),
            "all_captions": captions, "labels": label,
        }  # fmt: skip


class SoundCaptionsField(Field):
    """ "captions": those of a sound, an empty list if they cannot be read."""

    spec: ClassVar[FieldSpec] = TEXTS
    from_item = staticmethod(items.texts_of)

    def load(self, record: Record, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        try:
            return {"captions": read_sound_texts(self.content(record)).captions}
        except (OSError, ValueError):
            return {"captions": []}


class ClassesField(Field):
    """ "classes": those of a sound, each once, with spaces for underscores, from the first of its columns that is not
    empty: a list, or texts between |; and "fold": the part of the data that a column of this name states, or ""."""

    spec: ClassVar[FieldSpec] = FieldSpec("texts", "class", (".json",), (*CLASS_KEYS, "fold"), as_cells=True)

    def load(self, record: Record, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        content = self.content(record)
        cells = parse_json(content.read(1 << 20)) if isinstance(content, FileRef) else content
        cells = cells if isinstance(cells, Mapping) else {}
        cell = next((cells[key] for key in CLASS_KEYS if cells.get(key) not in (None, "", [])), "")
        names = cell if isinstance(cell, list) else str(cell).split("|")
        if not (classes := clean_captions(str(name).replace("_", " ") for name in names)):
            raise ValueError("it has no class")
        return {"classes": classes, "fold": str(cells.get("fold", ""))}


@dataclass(frozen=True)
class ImageCaptionField(Field):
    """ "captions": the first caption of an image, "" if it has none; and, with `tokenize` (texts -> int64 (b, t)),
    "tokens"."""

    tokenize: Callable[[Sequence[str]], Tensor] | None = None

    spec: ClassVar[FieldSpec] = FieldSpec("texts", "caption", (".txt",), TEXT_KEYS, as_cells=True)

    def load(self, record: Record, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        caption = self.content(record)
        if isinstance(caption, FileRef):
            caption = read_single_text(caption)
        elif not isinstance(caption, str):
            caption = next(iter(texts_of_row(caption or {}).captions), "")
        return {"captions": caption, **({"tokens": self.tokenize([caption])[0]} if self.tokenize else {})}

    from_item = staticmethod(items.caption_of)


def read_sound_texts(content: Any) -> Texts:
    """The captions and the class of a sound, from the content of its record for `TEXTS`. Raises OSError, and
    ValueError, in one line, if there is no caption."""
    texts = read_texts(content) if isinstance(content, FileRef) else content
    texts = texts if isinstance(texts, Texts) else texts_of_row(texts or {})
    if not texts.captions:
        hint = ": there is neither a .txt nor a .json beside it" if content is None else ""
        if isinstance(content, FileRef):
            hint = f": {os.path.basename(content.name)} has none"
        raise ValueError(f"it has no caption{hint}")
    return texts


class SampleDataset:
    """A numbered set of samples. Two sets with equal `fingerprint` have the same samples, by their names, in the same
    order; `skipped` is a line about files that are no samples, or "".

    The main field comes first in `fields`, but is decoded last, so that cheap fields fail before it is decoded.
    """

    def __init__(self, source: RecordSource, fields: Sequence[Field]) -> None:
        self.source, self.fields = source, list(fields)
        self.describe, self.name, self.skipped = source.describe, source.name, source.skipped
        self.fingerprint = source.fingerprint + "".join(field.fingerprint for field in fields)

    def __len__(self) -> int:
        return len(self.source)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        """The sample's entries of a batch. They depend only on the set's seed and the arguments, on `epoch` only with
        `augment`. Raises OSError or ValueError, in one line, if the sample cannot be read."""
        record = self.source.record(index, epoch, augment)
        try:
            parts = [field.load(record, index, epoch, augment) for field in reversed(self.fields)]
        except BadDatasetItem as error:
            raise BadDatasetItem(f"--dataset: {self.describe(index)} {error}") from None
        return {key: value for part in reversed(parts) for key, value in part.items()}


class SampleView(SampleDataset):
    """Samples of other sets. A subclass defines `locate`."""

    def locate(self, index: int) -> tuple[SampleDataset, int]:
        """The set of a sample, and its index there."""
        raise NotImplementedError

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        samples, index = self.locate(index)
        return samples.load(index, epoch, augment)

    def describe(self, index: int) -> str:
        samples, index = self.locate(index)
        return samples.describe(index)

    def name(self, index: int) -> str:
        samples, index = self.locate(index)
        return samples.name(index)


class ConcatSamples(SampleView):
    """The samples of two sets as one: those of `first`, then those of `second`."""

    def __init__(self, first: SampleDataset, second: SampleDataset) -> None:
        self.first, self.second = first, second
        self.fingerprint = first.fingerprint + second.fingerprint
        self.skipped = "; ".join(filter(None, (first.skipped, second.skipped)))

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def locate(self, index: int) -> tuple[SampleDataset, int]:
        n = len(self.first)
        return (self.first, index) if index < n else (self.second, index - n)
