"""The sounds and captions of a run, for one process."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from ..feed import Feed, Processes
from ..hashing import Draws, derive_key
from ..tokenizers import Tokenizer
from .sets import Sounds, open_sounds

_ON_THE_DEVICE = ("waveforms", "tokens", "caption_ids")


class SoundBatch(TypedDict):
    """waveforms: float32 (b, clip_samples) in [-1, 1]; tokens: int64 (b, max_text_tokens); lengths: how many of them
    count; captions: what the tokens were, in training one of several drawn for each epoch, in validation the first;
    caption_ids: int64 (b,), equal where the captions are; positions and ids: as in `Batch`; all_captions, labels: all
    captions of each sound, and its class (None where it has none)."""

    waveforms: Tensor
    tokens: Tensor
    lengths: list[int]
    captions: list[str]
    caption_ids: Tensor
    positions: list[int]
    ids: list[int]
    all_captions: list[list[str]]
    labels: list[str | None]


@dataclass(frozen=True)
class CaptionedSound:
    """One sample: waveform (clip_samples,), its caption's tokens (1, max_text_tokens) and their number."""

    waveform: Tensor
    tokens: Tensor
    length: int
    caption: str
    captions: list[str]
    label: str | None


class CaptionedSounds:
    """Sounds with one of their captions each, in tokens. Made before the loader workers, which run it.

    Args:
        sounds: The set.
        tokenizer: Turns captions into tokens.
        seed: Of the captions that are drawn in training.
    """

    def __init__(self, sounds: Sounds, tokenizer: Tokenizer, seed: int) -> None:
        self.sounds, self.tokenizer, self.seed = sounds, tokenizer, seed

    def __len__(self) -> int:
        return len(self.sounds)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> CaptionedSound:
        """With `augment` clip and caption are drawn from (seed, epoch, index), else they are the first and the middle.

        Raises OSError or ValueError where the sound or its caption cannot be read; without `augment`, where any of its
        captions or its label cannot.
        """
        captions = self.sounds.captions(index)
        caption = captions[Draws("caption", self.seed, epoch, index).below(len(captions)) if augment else 0]
        tokens, (length,) = self.tokenizer.encode([caption])
        label = self.sounds.label(index)
        if not augment:  # a validation reads all of them: what cannot be is known here, where the sound is named
            self.tokenizer.encode([*captions, *([label] if label else [])])
        waveform = self.sounds.load(index, epoch, augment)
        return CaptionedSound(waveform, tokens, length, caption, captions, label)

    def describe(self, index: int) -> str:
        return self.sounds.describe(index)


def collate_sounds(samples: Sequence[CaptionedSound]) -> dict[str, Any]:
    """Samples -> the entries of a `SoundBatch` that come from them."""
    return {
        "waveforms": torch.stack([sample.waveform for sample in samples]),
        "tokens": torch.cat([sample.tokens for sample in samples]),
        "lengths": [sample.length for sample in samples],
        "captions": [sample.caption for sample in samples],
        "caption_ids": torch.tensor([caption_id(sample.caption) for sample in samples], dtype=torch.int64),
        "all_captions": [sample.captions for sample in samples],
        "labels": [sample.label for sample in samples],
    }


def caption_id(caption: str) -> int:
    """A caption -> 64 bits in [-2^63, 2^63)."""
    return derive_key("caption", caption) - (1 << 63)


class SoundFeed:
    """Opens a set of sounds, splits it by seed, and gives each process its part of every batch. Every process calls
    every method, in the same order.

    Args:
        args: The shared arguments (`add_run_arguments`), and audio_data, sample_rate, clip_seconds and split_seed.
        processes: Who trains.
        tokenizer: For the captions.

    Raises:
        UserMistake: one line, where there are no such sounds or too few.
    """

    def __init__(self, args: argparse.Namespace, processes: Processes, tokenizer: Tokenizer) -> None:
        def open_set() -> CaptionedSounds:
            sounds = open_sounds(
                args.audio_data, sample_rate=args.sample_rate, clip_seconds=args.clip_seconds, seed=args.seed
            )
            return CaptionedSounds(sounds, tokenizer, args.seed)

        self._processes = processes
        self._feed = Feed(open_set, args, processes, split_seed=args.split_seed, noun="sound", collate=collate_sounds)
        assert isinstance(self._feed.samples, CaptionedSounds)
        self.sounds: Sounds = self._feed.samples.sounds
        self.train_set, self.valid_set = self._feed.train_set, self._feed.valid_set
        self.bad_samples = self._feed.bad_samples  # a part of the checkpoint

    def start(self, start_samples: int) -> SoundBatch:
        """Begin at a position of the endless order of samples; the first batch, on the device. Ends here, on all
        processes, where nothing can be read."""
        batch, preview = self._feed.start(start_samples)
        self._preview = self._on_device(preview)
        return self._on_device(batch)

    def next(self) -> SoundBatch:
        """The next batch of the order, on the device."""
        return self._on_device(self._feed.next())

    def validation(self) -> Iterator[SoundBatch]:
        """The validation split once, over all processes together, on the device."""
        return (self._on_device(batch) for batch in self._feed.validation())

    def preview(self, count: int) -> dict[str, Any]:
        """At most `count` sounds, the same on every process: the first of the validation split, the same at every
        start, or of this start's first batch where there is none. Called right after `start`, once.

        Returns:
            waveforms, tokens, lengths, captions, all_captions and labels, as in `SoundBatch`.
        """
        tensors: dict[str, list[Tensor]] = {"waveforms": [], "tokens": []}
        lists: dict[str, list[Any]] = {"lengths": [], "captions": [], "all_captions": [], "labels": []}
        for batch in [self._preview, *map(self._on_device, self._feed.further_previews(count))]:
            # Those alone that are shown go around: of a large batch, the rest is many times as much.
            first = sum(position < count for position in batch["positions"])
            for key, parts in tensors.items():
                parts.append(self._processes.gather(batch[key][:first]))
            for key, values in lists.items():
                values += [value for part in self._processes.gather_objects(batch[key][:first]) for value in part]
        return {key: torch.cat(parts) for key, parts in tensors.items()} | lists

    def report_bad_samples(self, say: Callable[[str], None]) -> None:
        """Say what any process could not read since the last call, each file once. Collective.

        Raises:
            UserMistake: there are too many to go on.
        """
        self._feed.report_bad_samples(say)

    def _on_device(self, batch: dict[str, Any]) -> Any:
        """The batch without its bad samples: every list in it has an entry per sound, and can be cut like a tensor."""
        moved = {key: batch[key].to(self._processes.device, non_blocking=True) for key in _ON_THE_DEVICE}
        return {**{key: value for key, value in batch.items() if key != "bad"}, **moved}
