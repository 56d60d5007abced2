"""Sound files of any length, each as a few clips that stand for all of it."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from ..bad_samples import BadSample
from ..listing import list_files
from ..packed import PackedStrings
from ..workers import START_METHOD, become_worker, signals_held_back
from .decoding import ENDINGS as DECODED_ENDINGS
from .decoding import ClipDecoder, Source, require_decoders
from .sets import Sounds, open_sounds

# What libsndfile reads and hardly any other program writes; of raw samples nobody knows the rate.
ENDINGS = (
    *DECODED_ENDINGS, ".aifc", ".au", ".snd", ".caf", ".w64", ".rf64", ".voc", ".avr", ".sph", ".nist", ".sd2", ".svx",
    ".8svx", ".paf", ".pvf", ".sds", ".xi", ".htk", ".ircam",
)  # fmt: skip

# A sound's clips (k, clip_samples), or why there are none.
Clips = Tensor | BadSample


class LongSounds(Protocol):
    """Numbered sounds, each to be heard in a few clips."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What stands for the sound in an index: its path below the folder."""
        ...

    def describe(self, index: int) -> str:
        """The name by which a user finds the sound: its path."""
        ...

    def clips(self, index: int) -> Tensor:
        """float32 (k, clip_samples) in [-1, 1], 1 <= k.

        Raises OSError or ValueError, in one line, where the sound cannot be read.
        """
        ...


def open_long_sounds(spec: str, decoder: ClipDecoder, max_clips: int) -> LongSounds:
    """A folder of sounds, which need no captions; or another set that `open_sounds` knows, of which the middle of each
    sound is heard.

    Raises ValueError, in one line, where there is no such set or nothing in it.
    """
    path = os.path.expanduser(spec)
    if os.path.isdir(path):
        names, _ = list_files(path, ENDINGS, "sounds", "demo:tones")
        if names:
            require_decoders()
            return FolderOfLongSounds(path, names, decoder, max_clips)
    seconds = decoder.clip_samples / decoder.sample_rate
    return MiddlesOf(open_sounds(spec, sample_rate=decoder.sample_rate, clip_seconds=seconds))


class FolderOfLongSounds:
    """Sound files of a folder, each in at most max_clips clips. See `LongSounds` for the methods."""

    def __init__(self, folder: str, names: Sequence[str], decoder: ClipDecoder, max_clips: int) -> None:
        self._folder, self._names, self._decoder, self._max_clips = folder, PackedStrings(names), decoder, max_clips

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        return self._names[index]

    def describe(self, index: int) -> str:
        return os.path.join(self._folder, self._names[index])

    def clips(self, index: int) -> Tensor:
        return read_clips(self.describe(index), self._decoder, self._max_clips)


class MiddlesOf:
    """The middle clip of each sound of a set. See `LongSounds` for the methods."""

    def __init__(self, sounds: Sounds) -> None:
        self._sounds = sounds

    def __len__(self) -> int:
        return len(self._sounds)

    def name(self, index: int) -> str:
        return self._sounds.describe(index)

    def describe(self, index: int) -> str:
        return self._sounds.describe(index)

    def clips(self, index: int) -> Tensor:
        return self._sounds.load(index)[None]


def clip_starts(frames: int, clip_frames: int, max_clips: int) -> list[int]:
    """Where the clips of a sound begin, in frames.

    As many as it takes to hear all of it, at most max_clips, spread evenly from its beginning to its end; those that
    fill it overlap a little. A single one of a longer sound is its middle. What is no longer than a clip is one clip.
    """
    spare = frames - clip_frames
    if spare <= 0:
        return [0]
    count = min(max_clips, math.ceil(frames / clip_frames))
    return [spare // 2] if count == 1 else [i * spare // (count - 1) for i in range(count)]


def read_clips(path: str, decoder: ClipDecoder, max_clips: int) -> Tensor:
    """The clips of a file (k, clip_samples), 1 <= k <= max_clips: no other part of it is decoded.

    Raises OSError where the file cannot be opened and ValueError, in one line, where it cannot be decoded there.
    """
    source = Source(path)
    rate, frames = _rate_and_frames(path)
    clip_frames = math.ceil(decoder.clip_samples * rate / decoder.sample_rate)
    starts = clip_starts(frames, clip_frames, max_clips)
    if len(starts) == 1:
        return decoder.load(source, 0)[None]  # its middle, or all; and here it says what is wrong with a damaged file
    return torch.stack(
        [
            decoder.load(source, 0, start_seconds=start / rate, end_seconds=(start + clip_frames) / rate)
            for start in starts
        ]
    )


def _rate_and_frames(path: str) -> tuple[int, int]:
    """Sample rate and length as the header states them, (1, 0) where there is none."""
    import soundfile

    try:
        # By its descriptor, as names need not be text.
        with open(path, "rb") as file, soundfile.SoundFile(file.fileno(), closefd=False) as sound:
            return sound.samplerate, sound.frames
    except RuntimeError:
        return 1, 0


def is_sound(query: str) -> bool:
    """Whether a query is the path of a sound file, not a sentence.

    Raises ValueError, in one line, where it is a path of nothing, as its ending tells.
    """
    if os.path.isfile(query):
        return True
    if query.lower().endswith(ENDINGS):
        raise ValueError(f"there is no file {query!r}; a sentence that ends like one needs a full stop behind it")
    return False


def file_embedder(
    decoder: ClipDecoder, embed: Callable[[Tensor], Tensor], max_clips: int, batch_size: int
) -> Callable[[str], Tensor]:
    """Path of a sound file -> its unit vector (d,), the bits that `embed_sounds` gives.

    It raises ValueError, in one line, where the file cannot be read.
    """

    def embed_file(path: str) -> Tensor:
        require_decoders()
        try:
            clips = read_clips(path, decoder, max_clips)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
        vectors, _ = embed_sounds([(0, clips)], embed, batch_size)
        return torch.from_numpy(vectors[0])

    return embed_file


class ClipSequence:
    """Ranges of `sounds`: of each range an iterator over (index, clips) of its sounds, to be used up before the next.

    Args:
        sounds: What to load from.
        ranges: Indices.
        num_workers: Processes that load ahead; 0: load here.
    """

    def __init__(self, sounds: LongSounds, ranges: Sequence[range], *, num_workers: int = 0) -> None:
        self._sizes = [len(indices) for indices in ranges]
        self._loader = DataLoader(
            _Loader(sounds),
            batch_size=None,  # one request is one sound
            sampler=list(itertools.chain(*ranges)),
            collate_fn=_unchanged,
            num_workers=num_workers,
            worker_init_fn=become_worker,
            multiprocessing_context=START_METHOD if num_workers else None,
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[Iterator[tuple[int, Clips]]]:
        with signals_held_back():
            sounds = iter(self._loader)
        return (itertools.islice(sounds, size) for size in self._sizes)


class _Loader(Dataset):
    def __init__(self, sounds: LongSounds) -> None:
        self._sounds = sounds

    def __getitem__(self, index: int) -> tuple[int, Clips]:
        try:
            return index, self._sounds.clips(index)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            return index, BadSample(index, self._sounds.describe(index), reason)


def _unchanged(item: Any) -> Any:
    return item


def embed_sounds(
    sounds: Iterable[tuple[int, Clips]], embed: Callable[[Tensor], Tensor], batch_size: int
) -> tuple[npt.NDArray[np.float32], list[BadSample]]:
    """Sounds to unit vectors (n, d): of each the mean of its clips' embeddings, of length 1 again; and what cannot be
    read. Without any sound that can be read, (0, 0).

    Args:
        sounds: In order; see `ClipSequence`.
        embed: Waveforms (batch_size, clip_samples) -> unit vectors (batch_size, d) on the CPU, each a function of its
            own row.
        batch_size: Rows of every call; what is missing in the last one is silence.

    Raises:
        ValueError: an embedding that is not finite.
    """
    bad: list[BadSample] = []
    counts: list[int] = []

    def all_clips() -> Iterator[Tensor]:
        for _, clips in sounds:
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
        return np.zeros((0, 0), np.float32), bad
    vectors = torch.cat(parts)
    if not vectors.isfinite().all():
        raise ValueError("the model gives embeddings that are not finite: with fp16, try --precision bf16 or fp32")
    means = torch.stack([of_one.mean(0) for of_one in vectors.split(counts)])
    return F.normalize(means, dim=1).float().numpy(), bad
