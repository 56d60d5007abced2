"""Sound files of any length, each represented by a few clips."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.files.reading import open_regular

from ..bad_samples import BadSample, reason_of
from ..files.find import Folder
from ..files.opening import NothingFoundError, list_files
from ..files.packed import Strings
from ..files.source import parts_of
from ..files.table_files import saved_files, tables_below
from ..workers import load_groups
from .decoding import ENDINGS as DECODED_ENDINGS
from .decoding import ClipDecoder, Source, require_decoders
from .manifest import Manifest
from .sets import Sounds, open_sounds
from .sidecars import TEXT_ENDINGS, read_texts

# The usual formats and others that libsndfile reads, except raw samples, whose sample rate is unknown.
ENDINGS = (
    *DECODED_ENDINGS, ".aifc", ".au", ".snd", ".caf", ".w64", ".rf64", ".voc", ".avr", ".sph", ".nist", ".sd2", ".svx",
    ".8svx", ".paf", ".pvf", ".sds", ".xi", ".htk", ".ircam",
)  # fmt: skip

# A sound's clips (k, clip_samples), or why there are none.
Clips = Tensor | BadSample


class LongSounds(NamedTuple):
    """Numbered sounds, each represented by a few clips.

    names: the name of each sound in an index: its path relative to the folder.
    parts: if a manifest asks for parts of files, which part each sound is; else empty.
    clips: index -> float32 (k, clip_samples) in [-1, 1], 1 <= k; raises OSError or ValueError, in one line, if the
        sound cannot be read.
    describe: index -> the name by which a user finds the sound: its path.
    captions: index -> captions of the sound; empty if there are none that can be read.
    """

    names: list[str]
    parts: list[str]
    clips: Callable[[int], Tensor]
    describe: Callable[[int], str]
    captions: Callable[[int], list[str]]


def open_long_sounds(spec: str, decoder: ClipDecoder, max_clips: int) -> LongSounds:
    """Open a folder of sounds, which need no captions, each as at most max_clips clips; or another set that
    `open_sounds` knows, each sound as one clip, its middle.

    Raises ValueError, in one line, if there is no such set or nothing in it.
    """
    path = os.path.expanduser(spec)
    if os.path.isdir(path):
        listed = _sounds_in(path)
        if listed is not None:
            require_decoders()
            files = Folder(path, listed)
            clips = functools.partial(_clips_of, files, decoder, max_clips)
            return LongSounds(
                list(listed), [], clips, files.describe, lambda index: _captions_beside(files.source(index).path)
            )
    seconds = decoder.clip_samples / decoder.sample_rate
    sounds = open_sounds(spec, sample_rate=decoder.sample_rate, clip_seconds=seconds)
    numbers = range(len(sounds))
    names = [sounds.describe(index) for index in numbers]
    parts = parts_of(map(sounds.source, numbers)) if isinstance(sounds, Manifest) else []
    return LongSounds(
        names, parts, functools.partial(_middle_of, sounds), sounds.describe, lambda index: _captions_of(sounds, index)
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


def _clips_of(files: Folder, decoder: ClipDecoder, max_clips: int, index: int) -> Tensor:
    return read_clips(files.source(index).path, decoder, max_clips)


def _middle_of(sounds: Sounds, index: int) -> Tensor:
    return sounds.load(index)[None]


def _captions_of(sounds: Sounds, index: int) -> list[str]:
    with contextlib.suppress(OSError, ValueError):
        return sounds.texts(index).captions
    return []


def _captions_beside(path: str) -> list[str]:
    """The captions in a .json or .txt of the same name."""
    for ending in TEXT_ENDINGS:
        with contextlib.suppress(OSError, ValueError):
            return read_texts(beside := os.path.splitext(path)[0] + ending, beside).captions
    return []


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


def is_sound(query: str) -> bool:
    """Whether a query is the path of a sound file, not a sentence.

    Raises ValueError, in one line, if it has the ending of a sound file but no such file exists.
    """
    if os.path.isfile(query):
        return True
    if query.lower().endswith(ENDINGS):
        raise ValueError(f"there is no file {query!r}; a sentence that ends like one needs a full stop behind it")
    return False


def embed_file(
    decoder: ClipDecoder, embed: Callable[[Tensor], Tensor], max_clips: int, batch_size: int, path: str
) -> Tensor:
    """A sound file -> its unit vector (d,), bit for bit that of `embed_sounds`.

    Raises ValueError, in one line, if the file cannot be read.
    """
    require_decoders()
    try:
        clips = read_clips(path, decoder, max_clips)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {reason_of(error)}") from None
    (vectors,), _ = embed_sounds([clips], embed, batch_size)
    return torch.from_numpy(vectors[0])


def load_clips(sounds: LongSounds, ranges: Sequence[range], *, num_workers: int = 0) -> Iterator[Iterator[Clips]]:
    """Ranges of indices -> for each range an iterator over the clips of its sounds, to be exhausted before the next."""
    return load_groups(functools.partial(_clips_or_bad, sounds), ranges, num_workers)


def _clips_or_bad(sounds: LongSounds, index: int) -> Clips:
    try:
        return sounds.clips(index)
    except (OSError, ValueError) as error:
        return BadSample(index, sounds.describe(index), reason_of(error))


def embed_sounds(
    sounds: Iterable[Clips], embed: Callable[[Tensor], Tensor], batch_size: int
) -> tuple[list[npt.NDArray[np.float32]], list[BadSample]]:
    """Clips of sounds -> a list of one array (n, d) that holds, for each readable sound, the mean of its clips'
    embeddings, scaled to length 1 (the list is empty if no sound can be read); and the unreadable sounds.

    `embed` maps waveforms (batch_size, clip_samples) to unit vectors (batch_size, d) on the CPU, each of which depends
    only on its own row; the last batch is filled up with silence. Raises ValueError if an embedding is not finite.
    """
    bad: list[BadSample] = []
    counts: list[int] = []

    def all_clips() -> Iterator[Tensor]:
        for clips in sounds:
            if isinstance(clips, BadSample):
                bad.append(clips)
            else:
                counts.append(len(clips))
                yield from clips

    parts, pending = [], all_clips()
    while part := list(itertools.islice(pending, batch_size)):
        waveforms = torch.zeros(batch_size, len(part[0]))
        waveforms[: len(part)] = torch.stack(part)
        parts.append(embed(waveforms)[: len(part)].double())
    if not parts:
        return [], bad
    vectors = torch.cat(parts)
    if not vectors.isfinite().all():
        raise ValueError("the model gives embeddings that are not finite: with fp16, try --precision bf16 or fp32")
    means = torch.stack([of_one.mean(0) for of_one in vectors.split(counts)])
    return [F.normalize(means, dim=1).float().numpy()], bad
