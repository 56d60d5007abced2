"""Sound files of any length, each represented by a few clips."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.files.reading import open_regular

from .bad_samples import reason_of
from .decoding.sounds import ENDINGS as DECODED_ENDINGS
from .decoding.sounds import ClipDecoder, require_decoders
from .demo import DemoSource
from .fields import TEXTS, SoundField, texts_of
from .records.folder import FolderSource
from .records.record import Entry
from .records.rows import parts_of
from .sets import open_records

# The usual formats and others that libsndfile reads, except raw samples, whose sample rate is unknown.
ENDINGS = (
    *DECODED_ENDINGS, ".aifc", ".au", ".snd", ".caf", ".w64", ".rf64", ".voc", ".avr", ".sph", ".nist", ".sd2", ".svx",
    ".8svx", ".paf", ".pvf", ".sds", ".xi", ".htk", ".ircam",
)  # fmt: skip


class LongSounds:
    """Numbered sounds, each represented by a few clips: of a folder of files, which need no captions, each by at most
    max_clips clips; of another source that a set of sounds has, each by its middle.

    `names` are those in an index: of files, their paths relative to the folder; `parts` say which part of its file each
    sound is, if a table asks for parts, else they are empty. Raises ValueError, in one line, if there is no such set or
    nothing in it.
    """

    def __init__(self, spec: str, decoder: ClipDecoder, max_clips: int) -> None:
        self._source = open_records(spec, [SoundField.wanted._replace(endings=ENDINGS), TEXTS], "tones", 0)
        is_folder = isinstance(self._source, FolderSource)
        if not isinstance(self._source, DemoSource):
            require_decoders()
        self._middle, self._decoder, self._max_clips = SoundField(decoder), decoder, max_clips if is_folder else 1
        self.describe = self._source.describe
        self.names = [*map(self._source.name if is_folder else self.describe, range(len(self._source)))]
        self.parts = parts_of(self._source)

    def load(self, index: int) -> tuple[Tensor, dict[str, Any]]:
        """The clips (k, clip_samples), and {"captions": [...]} if there are some that can be read. Raises OSError or
        ValueError, in one line, if the sound cannot be read."""
        record = self._source.record(index)
        if self._max_clips > 1:
            clips = read_clips(record["sound"], self._decoder, self._max_clips)
        else:
            clips = self._middle.load(record, index)["waveforms"][None]
        with contextlib.suppress(OSError, ValueError):
            return clips, {"captions": texts_of(record.get(TEXTS.name)).captions}
        return clips, {}


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


def read_clips(entry: Entry, decoder: ClipDecoder, max_clips: int) -> Tensor:
    """The clips of a file (k, clip_samples), 1 <= k <= max_clips: no other part of it is decoded.

    Raises OSError if the file cannot be opened and ValueError, in one line, if it cannot be decoded there.
    """
    rate, frames = _rate_and_frames(entry.path)
    clip_frames = math.ceil(decoder.clip_samples * rate / decoder.sample_rate)
    starts = clip_starts(frames, clip_frames, max_clips)
    if len(starts) == 1:
        return decoder.load(entry, 0)[None]  # for a damaged file, this raises the error that says why
    parts = [entry._replace(start_seconds=start / rate, end_seconds=(start + clip_frames) / rate) for start in starts]
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
            return read_clips(Entry(query), decoder, max_clips)
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
