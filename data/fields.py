"""Fields: what a script takes out of each record, decoded. A field knows what it wants of a source, and by which key
its augmentation draws; so every field works with every source."""

from __future__ import annotations

import glob
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .bad_samples import Incomplete, NotASample, Raised, reason_of
from .crops import CENTER, Crop
from .decoding import sounds, videos
from .decoding.arrays import Array, StoredArray, find_array
from .decoding.images import ENDINGS as IMAGE_ENDINGS
from .decoding.images import decode_image, decode_picture, randomly_flipped
from .decoding.texts import TEXT_KEYS, Texts, read_sentence, read_texts, texts_of_object, texts_of_row
from .demo import FRAMES_PER_SECOND
from .hashing import Draws, derive_key
from .records import own
from .records.opening import expanded
from .records.record import Entry, Record, Source, Wanted, shown
from .records.tars import TarSource, number_of, stem_of
from .tokenizers import Tokenizer

_MOST_CHANNELS = 64
_MOST_EXAMPLES = 100  # embeddings that are tried at the start
_OWN = "item"  # the key of a record of a user's dataset
IMAGE_NAMES = ("image", "img")
_IMAGE = (
    "a PIL image, or a tensor or array of uint8 or floats from 0 to 1 whose 1, 3 or 4 channels come first (c, h, w); "
    'or a mapping with such an "image", or a tuple that begins with one'
)
_CLIP = (
    "a tensor or array (frames, channels, height, width) of 1, 3 or 4 channels, uint8 or floats from 0 to 1; or a "
    'mapping with such a "video", or a tuple that begins with one'
)
_SOUND = (
    'a tuple (waveform, sample rate, caption or captions), or a mapping with "waveform", "sample_rate" and "caption" '
    'or "captions": the waveform a tensor or array of floats, (samples,) or (channels, samples), the rate a whole '
    f"number of Hz from {sounds.SAMPLE_RATES[0]} to {sounds.SAMPLE_RATES[1]}, a caption a text"
)


TEXTS = Wanted("texts", "caption", (".json", ".txt"), (*TEXT_KEYS, "label"), as_cells=True)


class Field:
    """What a script takes out of each record. `fingerprint` is equal where the same was found of a source."""

    @property
    def wanted(self) -> Wanted:
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        return ""

    def load(self, record: Record, index: int, epoch: int, augment: bool) -> dict[str, Any]:
        """A sample's part of entries of the batch. With `augment`, what is drawn depends on the field's seed and on
        (epoch, index) alone; else nothing is drawn. Raises OSError, ValueError, in one line, or `Incomplete`."""
        raise NotImplementedError


@dataclass(frozen=True)
class ImageField(Field):
    """ "images": uint8 (channels, image_size, image_size).

    Args:
        channels: 3 (RGB) or 4 (RGBA).
        flip: Whether half of the augmented images are mirrored left to right.
        enlarge: Whether images whose shorter side has fewer than `image_size` pixels are enlarged; else they are
            `Incomplete`.
        crop: What is cut out of augmented images; out of others it is the middle. Nothing is cut out of drawn ones.
    """

    image_size: int
    channels: int = 3
    flip: bool = False
    seed: int = 0
    enlarge: bool = True
    crop: Crop = CENTER

    def __post_init__(self) -> None:
        if self.channels not in (3, 4):
            raise ValueError(f"images have 3 channels (RGB) or 4 (RGBA), not {self.channels}")

    wanted: ClassVar[Wanted] = Wanted(
        "image", "image", IMAGE_ENDINGS, (*IMAGE_NAMES, "jpg", "jpeg", "png", "webp"), feature="Image"
    )

    def load(self, record: Record, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        how = (self.image_size, self.channels, self.enlarge, self.crop.cut(epoch, index) if augment else None)
        if _OWN in record:
            picture = picture_of(own.part_of(record[_OWN], *IMAGE_NAMES))
            if picture is None:
                raise refused(record[_OWN], _IMAGE)
            image = decode_picture(picture, *how)
        elif isinstance(found := record["image"], Entry):
            image = decode_image(found, *how)
        else:
            image = found(self.image_size, self.channels)
        return {"images": randomly_flipped(image, self.seed, epoch, index) if self.flip and augment else image}


@dataclass(frozen=True)
class OneFrameField(ImageField):
    """ "videos": images as clips of one frame, uint8 (channels, 1, image_size, image_size)."""

    def load(self, record: Record, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        return {"videos": super().load(record, index, epoch, augment)["images"][:, None]}


@dataclass(frozen=True)
class ClipField(Field):
    """ "videos": uint8 (3, num_frames, image_size, image_size), as the decoder cuts them; an image is a video of one
    frame. `flip`: whether half of the augmented clips are mirrored left to right."""

    clips: videos.ClipDecoder
    flip: bool = False

    @property
    def wanted(self) -> Wanted:
        # An image is too short for a clip: leave it out by its name.
        takes_images = self.clips.short_clips != "skip" or self.clips.num_frames == 1
        return Wanted(
            "clip", "video", videos.ENDINGS, ("video", "clip", "mp4", "webm", "mkv"), feature="Video",
            further=IMAGE_ENDINGS if takes_images else (),
        )  # fmt: skip

    def load(self, record: Record, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        if _OWN in record:
            clip = self._clip_of(record[_OWN], index, epoch, augment)
        elif isinstance(found := record["clip"], Entry):
            clip = self.clips.load(found, index, epoch, augment)
        else:
            step = FRAMES_PER_SECOND / self.clips.fps if self.clips.fps else self.clips.frame_stride
            clip = found(self.clips.image_size, self.clips.num_frames, step)
        flip = self.flip and augment
        return {"videos": randomly_flipped(clip, self.clips.seed, epoch, index) if flip else clip}

    def _clip_of(self, item: Any, index: int, epoch: int, augment: bool) -> Tensor:
        video = own.as_array(own.part_of(item, "video"))
        if video is None or video.ndim != 4 or 0 in video.shape:
            raise refused(item, _CLIP)
        share = Draws("clip", self.clips.seed, epoch, index).uniform() if augment else 0.5
        pictures = [picture_of(video[number]) for number in self._numbers(len(video), item, share)]
        if any(picture is None for picture in pictures):
            raise refused(own.part_of(item, "video"), _CLIP)
        size, cut = self.clips.image_size, self.clips.crop.cut(epoch, index) if augment else None
        frames = [decode_picture(each, size, 3, cut=cut).permute(1, 2, 0).numpy() for each in pictures if each]
        return self.clips.filled(frames)

    def _numbers(self, n: int, item: Any, share: float) -> list[int]:
        """Which of n frames are those of a clip; fewer than num_frames if there are no more."""
        step = float(self.clips.frame_stride)
        if self.clips.fps:
            fps = own.part_of(item, "fps", place=None)
            if not (isinstance(fps, (int, float, np.number)) and 0 < float(fps) < math.inf):
                raise refused(item, 'for --fps, a mapping with a "video" and its "fps", above 0')
            step = float(fps) / self.clips.fps
        count = min(self.clips.num_frames, math.ceil(n / step))
        start = max(0.0, n - 1 - (count - 1) * step) * share
        if not self.clips.fps:
            start = math.floor(start)
        return [min(n - 1, math.floor(start + number * step + 1e-6)) for number in range(count)]


@dataclass(frozen=True)
class SoundField(Field):
    """ "waveforms": float32 (clip_samples,) in [-1, 1], as the decoder cuts them."""

    clips: sounds.ClipDecoder

    wanted: ClassVar[Wanted] = Wanted(
        "sound", "sound", sounds.ENDINGS, ("audio", "sound", "wav", "flac", "mp3", "ogg", "opus"), feature="Audio"
    )

    def load(self, record: Record, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        found = _file_of(record[_OWN]) if _OWN in record else record["sound"]
        if isinstance(found, Entry):
            return {"waveforms": self.clips.load(found, index, epoch, augment)}
        return {"waveforms": found(self.clips.sample_rate, self.clips.clip_samples)}


@dataclass(frozen=True)
class TextsField(Field):
    """The texts of a sound: the tokens of one of its captions, "tokens", "lengths", "captions" and "caption_ids"; and
    "all_captions" and "labels". In training, (seed, epoch, index) draw the caption; else it is the first."""

    tokenizer: Tokenizer
    seed: int = 0

    wanted: ClassVar[Wanted] = TEXTS

    def load(self, record: Record, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        captions, label = texts_of(record)
        caption = captions[Draws("caption", self.seed, epoch, index).below(len(captions)) if augment else 0]
        tokens, (length,) = self.tokenizer.encode([caption])
        if not augment:  # validation encodes them all: fail here, if the error names the sound
            self.tokenizer.encode([*captions, *([label] if label else [])])
        return {
            "tokens": tokens[0], "lengths": length, "captions": caption,
            "caption_ids": torch.tensor(caption_id(caption), dtype=torch.int64),
            "all_captions": captions, "labels": label,
        }  # fmt: skip


@dataclass(frozen=True)
class CaptionField(Field):
    """ "captions": the first caption of an image, "" if it has none; and, with `tokenize` (texts -> int64 (b, t)),
    "tokens"."""

    tokenize: Callable[[Sequence[str]], Tensor] | None = None

    wanted: ClassVar[Wanted] = Wanted("texts", "caption", (".txt",), TEXT_KEYS, as_cells=True)

    def load(self, record: Record, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        caption = self._caption(record)
        return {"captions": caption, **({"tokens": self.tokenize([caption])[0]} if self.tokenize else {})}

    def _caption(self, record: Record) -> str:
        if _OWN in record:
            return _caption_of(record[_OWN])
        found = record.get("texts", {})
        return read_sentence(found) if isinstance(found, Entry) else next(iter(texts_of_row(found).captions), "")


class Kind(NamedTuple):
    """A kind of embedding. `wanted.name` is the batch's entry; `dimensions` those of the array of one image."""

    wanted: Wanted
    dimensions: int
    flag: str

    @property
    def form(self) -> str:
        return {1: "(d,)", 2: "(tokens, d)"}[self.dimensions]


IMAGE = Kind(
    Wanted("image_embed", "image embedding", (".img_emb.npy", ".npy"), ("image_embed",)), 1, "--image_embeddings"
)
TEXT = Kind(
    Wanted("text_encodings", "text encoding", (".text_emb.npy", ".text.npy"), ("text_encodings",)),
    2,
    "--text_embeddings",
)
KINDS = (IMAGE, TEXT)


@dataclass(frozen=True)
class EmbeddingField(Field):
    """ "image_embed" or "text_encodings", which were computed beforehand: float32 of `shape`, which is that of one
    image: (d,), or (L, d) where no caption has more than L tokens; encodings of fewer tokens end with rows of 0. An
    image that has none, or zeros only, is `Incomplete`. `rows`: index -> array, if they do not stand in records."""

    kind: Kind
    shape: tuple[int, ...]
    rows: Callable[[int], Array] | None = None
    fingerprint: str = field(default="", kw_only=True)

    @property
    def wanted(self) -> Wanted:
        return self.kind.wanted

    def load(self, record: Record, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        noun, is_own = self.wanted.noun, _OWN in record
        array = self.rows(index) if self.rows else numbers_of(record, self.kind)
        if array is None:
            raise Incomplete(f"it has no {noun}")
        if array.shape[-1:] != self.shape[-1:] or array.ndim != len(self.shape) or len(array) > self.shape[0]:
            if is_own:
                most = "at most {} (--max_text_len)" if self.kind == TEXT else "{}, as in the first item"
                raise refused(array, f"a {noun} of {most.format(self.shape)}")
            raise ValueError(f"its {noun}: shape {array.shape}, where others have {self.shape}")
        if not np.isfinite(array).all():
            raise ValueError(f"its {noun}: not all numbers are finite")
        if not array.any() and not is_own:
            raise Incomplete(f"its {noun}: zeros only, which stand for none")
        whole = np.zeros(self.shape, np.float32)
        whole[: len(array)] = array
        return {self.wanted.name: torch.from_numpy(whole)}


def embedding_field(source: Source, kind: Kind, longest_text: int) -> EmbeddingField | None:
    """The embeddings that the records of a source hold, None if it has none. Raises ValueError, in one line, if none of
    the first `_MOST_EXAMPLES`, one of which gives the shape, can be read."""
    sizes = source.sizes(kind.wanted.name)
    if sizes.max() < 0:
        return None
    if kind == IMAGE:  # they have one size, but for a damaged one
        values, counts = np.unique(sizes[sizes >= 0], return_counts=True)
        examples = np.flatnonzero(sizes == values[counts.argmax()])
    else:  # texts are as long as the longest one
        examples = np.argsort(-sizes, kind="stable")[: np.count_nonzero(sizes >= 0)]
    failures: list[Raised] = []
    for example in examples[:_MOST_EXAMPLES].tolist():
        try:
            record = source.record(example)
            array = numbers_of(record, kind)
            if array is None:
                raise refused(record.get(_OWN), _embedded(kind)) if _OWN in record else ValueError("it is empty")
            _check_dimensions(kind, array.shape)
        except NotASample as error:
            raise NotASample(f"--dataset: {source.describe(example)} {error}") from None
        except (OSError, ValueError) as error:
            said = f"cannot read the {kind.wanted.noun} of {source.describe(example)!r}: {reason_of(error)}"
            failures.append(Raised(said, getattr(error, "traceback", "")))
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                break  # such as a server that does not answer
            continue
        # Of files, the longest is known; of rows and items, what the model takes.
        found = record.get(kind.wanted.name)
        is_longest = kind == IMAGE or isinstance(found, Entry) or callable(found)
        shape = array.shape if is_longest else (longest_text, *array.shape[1:])
        return EmbeddingField(kind, shape, fingerprint=str(array.shape))
    raise failures[0]


def embedding_rows(source: Source, kind: Kind, spec: str, *, index_width: int) -> EmbeddingField:
    """Embeddings in one file of rows for each tar, such as img_emb_0012.npy, (n, d), for 00012.tar: the last
    `index_width` digits of an image's key are the number of its row.

    Args:
        spec: The files: a folder, a pattern (`emb/*.npy`), a range (`emb/i_{0000..0099}.npy`), or a name with `{}`.

    Raises ValueError, in one line, if a tar has no such file, or they do not fit to one another.
    """
    if not isinstance(source, TarSource):
        ending = kind.wanted.endings[-1]
        raise ValueError(
            f"{kind.flag} is for tars; in a folder, put a {ending} file beside each image; in a table, a column "
            f"{kind.wanted.name}"
        )
    files = {number_of(path, kind.flag): path for path in _row_files(spec)}
    wanted = [number_of(path, "--image_folder") for path in source.paths]
    if missing := [path for path, number in zip(source.paths, wanted, strict=True) if number not in files]:
        raise ValueError(
            f"{kind.flag} {spec!r} has no file for {len(missing)} of {len(wanted)} tars, the first is {missing[0]!r}: "
            f"add it, or select tars that have one by --start_shard and --end_shard"
        )
    arrays: list[StoredArray] = []
    for number in wanted:
        try:
            arrays.append(find_array(Entry(files[number])))
            _check_dimensions(kind, arrays[-1].shape[1:])
        except (OSError, ValueError) as error:
            noun = kind.wanted.noun
            raise ValueError(f"cannot read the {noun}s in {files[number]!r}: {reason_of(error)}") from None
        if arrays[-1].shape[1:] != arrays[0].shape[1:]:
            ours, theirs = (f"{array.shape[1:]} in {array.entry.path!r}" for array in (arrays[-1], arrays[0]))
            raise ValueError(f"{kind.wanted.noun}s have the shape {ours}, but {theirs}")
    for path, indices in zip(source.paths, source.shards or (), strict=True):
        if indices:
            row_of(source.name(indices[0]), index_width, path)
    shapes = [array.shape for array in arrays]
    return EmbeddingField(kind, shapes[0][1:], _Rows(source, arrays, index_width), fingerprint=str(shapes))


class _Rows:
    """Index of an image -> its embedding in the file of its tar. A class, because it may be sent to another process."""

    def __init__(self, tars: TarSource, arrays: Sequence[StoredArray], index_width: int) -> None:
        self._tars, self._arrays, self._index_width = tars, arrays, index_width

    def __call__(self, index: int) -> Array:
        array = self._arrays[self._tars.shard(index)]
        row = row_of(self._tars.name(index), self._index_width)
        if row >= array.shape[0]:
            raise ValueError(f"it is row {row} of {shown(array.entry.path)}, which has only {array.shape[0]}")
        return array.row(row)


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


def _row_files(spec: str) -> list[str]:
    path = os.path.expanduser(spec)
    if os.path.isdir(path):
        path = os.path.join(glob.escape(path), "*.npy")
    return [path] if os.path.isfile(path) else expanded(path.replace("{}", "[0-9]*"))


def numbers_of(record: Record, kind: Kind) -> Array | None:
    """The array of an embedding that a record holds, None if it holds none; (1, d) becomes (d,), because some programs
    write a batch of one."""
    name = kind.wanted.name
    if _OWN in record:
        return _array_of(record[_OWN], kind)
    found = record.get(name)
    if isinstance(found, Entry):
        array = find_array(found).read()
        shape = array.shape[-kind.dimensions :]
        return array.reshape(shape) if array.size == math.prod(shape) else array
    return np.asarray(found()) if callable(found) else found


def texts_of(record: Record) -> Texts:
    """The captions of a record, and its class. Raises OSError or ValueError, in one line, if it has no caption."""
    if _OWN in record:
        texts = _texts_of(record[_OWN])
    else:
        found = record.get("texts", {})
        texts = read_texts(found) if isinstance(found, Entry) else texts_of_row(found)
    if not texts.captions:
        beside = "" if _OWN in record or "texts" in record else ": there is neither a .txt nor a .json beside it"
        raise ValueError(f"it has no caption{beside}")
    return texts


def caption_id(caption: str) -> int:
    """A caption -> 64 bits in [-2^63, 2^63)."""
    return derive_key("caption", caption) - (1 << 63)


def refused(found: Any, expected: str) -> NotASample:
    """The error for an item of a user's dataset that is none that the script trains on: what follows its name."""
    return NotASample(f"is {own.shown(found)}; it has to be {expected}")


def picture_of(part: Any) -> Image.Image | None:
    """A PIL image of a PIL image, or of a tensor or array (c, h, w); None for anything else."""
    if isinstance(part, Image.Image):
        return part
    array = own.as_array(part)
    if array is None or array.ndim != 3 or array.shape[0] not in (1, 3, 4) or 0 in array.shape:
        return None
    pixels = own.as_bytes(array)
    if pixels is None:
        return None
    return Image.fromarray(np.ascontiguousarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)))


def _check_dimensions(kind: Kind, shape: tuple[int, ...]) -> None:
    if len(shape) != kind.dimensions or 0 in shape:
        raise ValueError(f"that of one image has the shape {shape}, not {kind.form}")


def _array_of(item: Any, kind: Kind) -> Array | None:
    """The embedding of an item of a user's dataset."""
    name = kind.wanted.name
    if isinstance(item, Mapping) and item.get(name) is None:
        return None
    array = own.as_array(item.get(name) if isinstance(item, Mapping) else None)
    if array is None or array.dtype.kind != "f" or array.ndim != kind.dimensions or 0 in array.shape:
        raise refused(item, _embedded(kind))
    return array


def _embedded(kind: Kind) -> str:
    return f'a mapping with an "image" and a "{kind.wanted.name}", a tensor or array of floats {kind.form}'


def _caption_of(item: Any) -> str:
    """The caption of an item of a user's dataset: of a tuple of an image and its class there is none."""
    caption = own.part_of(item, "caption", "text", "captions", place=1)
    if isinstance(caption, (list, tuple)):
        caption = caption[0] if caption else None
    if isinstance(item, (tuple, list)) and not isinstance(caption, str):
        caption = None
    if not (caption is None or isinstance(caption, str)):
        raise refused(item, 'one whose "caption" is a text')
    return " ".join((caption or "").split())


def _texts_of(item: Any) -> Texts:
    """The texts of an item of a user's dataset."""
    if isinstance(item, (tuple, list)):
        item = {"caption": item[2] if len(item) > 2 else None, "label": item[3] if len(item) > 3 else None}
    if not isinstance(item, Mapping):
        raise refused(item, _SOUND)
    try:
        return texts_of_object({key: list(value) if isinstance(value, tuple) else value for key, value in item.items()})
    except ValueError:
        raise refused(item, _SOUND) from None


def _file_of(item: Any) -> Entry:
    """The sound of an item of a user's dataset as a file of floats in memory, of which clips are cut as of any other.
    A waveform and its rate are parts of the item, or the "array" and "sampling_rate" of its "audio"."""
    import soundfile

    waveform: Any = own.part_of(item, "waveform", "audio")
    rate: Any = own.part_of(item, "sample_rate", "sampling_rate", place=1)
    if isinstance(waveform, Mapping):  # as the library datasets decodes a sound
        waveform, rate = waveform.get("array"), waveform.get("sampling_rate")
    array = own.as_array(waveform)
    rate = rate.item() if hasattr(rate, "item") and getattr(rate, "size", 1) == 1 else rate
    least, most = sounds.SAMPLE_RATES
    is_rate = isinstance(rate, int) and not isinstance(rate, bool) and least <= rate <= most
    if array is None or array.dtype.kind != "f" or array.ndim not in (1, 2) or not is_rate:
        raise refused(waveform if is_rate and array is not None else item, _SOUND)
    if array.ndim == 2 and array.shape[0] > _MOST_CHANNELS:
        raise refused(array, "(channels, samples), channels first")
    if 0 in array.shape:
        raise ValueError("it holds no sound")
    content = io.BytesIO()
    soundfile.write(content, array.astype(np.float32).T, rate, format="WAV", subtype="FLOAT")
    return Entry.in_memory(content.getbuffer(), "")
