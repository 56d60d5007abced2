"""Sound files of any length, each represented by a few clips."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.files.reading import open_regular

from ..bad_samples import reason_of
from ..files.find import Folder
from ..files.opening import NothingFoundError, list_files
from ..files.packed import Strings
from ..files.source import parts_of
from ..files.table_files import saved_files, tables_below
from .decoding import ENDINGS as DECODED_ENDINGS
from .decoding import ClipDecoder, Source, require_decoders
from .manifest import Manifest
from .sets import Sounds, open_sounds
from .sidecars import TEXT_ENDINGS, Texts, read_texts

# The usual formats and others that libsndfile reads, except raw samples, whose sample rate is unknown.
ENDINGS = (
    *DECODED_ENDINGS, ".aifc", ".au", ".snd", ".caf", ".w64", ".rf64", ".voc", ".avr", ".sph", ".nist", ".sd2", ".svx",
    ".8svx", ".paf", ".pvf", ".sds", ".xi", ".htk", ".ircam",
)  # fmt: skip


class LongSounds(NamedTuple):
    """Numbered sounds, each represented by a few clips.

    names: the name of each sound in an index: its path relative to the folder.
    parts: if a manifest asks for parts of files, which part each sound is; else empty.
    load: index -> float32 (k, clip_samples) in [-1, 1], 1 <= k; and {"captions": [...]} if there are some that can be
        read. Raises OSError or ValueError, in one line, if the sound cannot be read.
    describe: index -> the name by which a user finds the sound: its path.
    """

    names: list[str]
    parts: list[str]
    load: Callable[[int], tuple[Tensor, dict[str, Any]]]
    describe: Callable[[int], str]


def open_long_sounds(spec: str, decoder: ClipDecoder, max_clips: int) -> LongSounds:
    """Open a folder of sounds, which need no captions, each as at most max_clips clips; or another set that
    `open_sounds` knows, each sound as one clip, its middle.

    Raises ValueError, in one line, if there is no such set or nothing in it.
    """
    path = os.path.expanduser(spec)
    if os.path.isdir(path) and (listed := _sounds_in(path)) is not None:
        require_decoders()
        files = Folder(path, listed)
        return LongSounds(list(listed), [], functools.partial(_load_file, files, decoder, max_clips), files.describe)
    seconds = decoder.clip_samples / decoder.sample_rate
    sounds = open_sounds(spec, sample_rate=decoder.sample_rate, clip_seconds=seconds)
    numbers = range(len(sounds))
    parts = parts_of(map(sounds.source, numbers)) if isinstance(sounds, Manifest) else []
    return LongSounds(
        [sounds.describe(index) for index in numbers], parts, functools.partial(_load_middle, sounds), sounds.describe
    )


def _sounds_in(folder: str) -> Strings | None:
    """The sounds in files of their own; None if the folder holds tars or a table."""
    try:
        listed = list_files(folder, ENDINGS, "sounds", "demo:tones").samples
        return listed if len(listed) else None
    except NothingFoundError:
        if saved_files(folder) or tables_below(folder):
            return None
        raise


def _load_file(files: Folder, decoder: ClipDecoder, max_clips: int, index: int) -> tuple[Tensor, dict[str, Any]]:
    path = files.source(index).path
    texts = [os.path.splitext(path)[0] + ending for ending in TEXT_ENDINGS]
    return read_clips(path, decoder, max_clips), _note(*(functools.partial(read_texts, text, text) for text in texts))


def _load_middle(sounds: Sounds, index: int) -> tuple[Tensor, dict[str, Any]]:
    return sounds.load(index)[None], _note(functools.partial(sounds.texts, index))


def _note(*reads: Callable[[], Texts]) -> dict[str, Any]:
    """The captions that the first function gives that can read some."""
    for read in reads:
        with contextlib.suppress(OSError, ValueError):
            return {"captions": captions} if (captions := list(read().captions)) else {}
    return {}


def clip_starts(frames: int, clip_frames: int, max_clips: int) -> list[int]:
    """Where the clips of a sound begin, in frames.

    There are as many clips as it takes to cover the sound, but at most max_clips, spread evenly from its beginning to
    its end; clips that cover all of it overlap a little. A single clip of a longer sound is its middle.
    """
    spare = frames - clip_frames
    if spare <= 0:
        return [0]
    count = min(max_clips, math.ceil(frames / clip_frames))
    return [spare // 2] if count == 1 else [i * spare // (count - 1) for i in range(count)]


def read_clips(path: str, decoder: ClipDecoder, max_clips: int) -> Tensor:
    """The clips of a file (k, clip_samples), 1 <= k <= max_clips: no other part of it is decoded.

    Raises OSError if the file cannot be opened and ValueError, in one line, if it cannot be decoded there.
    """
    rate, frames = _rate_and_frames(path)
    clip_frames = math.ceil(decoder.clip_samples * rate / decoder.sample_rate)
    starts = clip_starts(frames, clip_frames, max_clips)
    if len(starts) == 1:
        return decoder.load(Source(path), 0)[None]  # for a damaged file, this raises the error that says why
    parts = [Source(path, 0, None, start / rate, (start + clip_frames) / rate) for start in starts]
    return torch.stack([decoder.load(part, 0) for part in parts])


def _rate_and_frames(path: str) -> tuple[int, int]:
    """Sample rate in Hz and length in frames, as the header states them; (1, 0) if there is no header."""
    import soundfile

    try:
        # Open by descriptor, because file names need not be valid text.
        with open_regular(path) as file, soundfile.SoundFile(file.fileno(), closefd=False) as sound:
            return sound.samplerate, sound.frames
    except RuntimeError:
        return 1, 0


def clips_of_query(query: str, decoder: ClipDecoder, max_clips: int) -> Tensor | None:
    """The clips of the sound file that a query names; None if it is a sentence.

    Raises ValueError, in one line, if the file cannot be read, or the query has the ending of a sound file and there is
    none.
    """
    if os.path.isfile(query):
        require_decoders()
        try:
            return read_clips(query, decoder, max_clips)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read {query}: {reason_of(error)}") from None
    if query.lower().endswith(ENDINGS):
        raise ValueError(f"there is no file {query!r}; a sentence that ends like one needs a full stop behind it")
    return None


def unit_means(vectors: Sequence[Tensor]) -> Tensor:
    """The embeddings (k, d) of the clips of each of n sounds -> float32 (n, d): their means, of length 1. Raises
    ValueError if one is not finite."""
    means = torch.stack([of_one.double().mean(0) for of_one in vectors])
    if not means.isfinite().all():
        raise ValueError("the model gives embeddings that are not finite: with fp16, try --precision bf16 or fp32")
    return F.normalize(means, dim=1).float()
