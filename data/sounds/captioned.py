"""The sounds and captions of a run, for one process."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor

from ..contracts import Processes, skipped_of
from ..feed import Feed, split_seed_of
from ..hashing import Draws, derive_key
from ..own import OwnData, data_of
from ..stream import collate_entries
from ..tokenizers import Tokenizer
from .own import OwnSounds
from .sets import Sounds, open_sounds
from .sidecars import Texts


class SoundBatch(TypedDict):
    """waveforms: float32 (b, clip_samples) in [-1, 1]; tokens: int64 (b, max_text_tokens); lengths: how many tokens of
    each row count; captions: the texts of the tokens, in training one of each sound's captions, drawn for each epoch,
    in validation the first; caption_ids: int64 (b,), equal for equal captions; positions and ids: see `Feed`;
    all_captions: all captions of each sound; labels: the class of each sound, None if it has none."""

    waveforms: Tensor
    tokens: Tensor
    lengths: list[int]
    captions: list[str]
    caption_ids: Tensor
    positions: list[int]
    ids: list[int]
    all_captions: list[list[str]]
    labels: list[str | None]


class CaptionedSounds:
    """Sounds, each with the tokens of one of its captions; `seed` determines which captions training draws."""

    def __init__(self, sounds: Sounds, tokenizer: Tokenizer, seed: int) -> None:
        self.sounds, self.tokenizer, self.seed = sounds, tokenizer, seed
        self.fingerprint, self.skipped = sounds.fingerprint, skipped_of(sounds)

    def __len__(self) -> int:
        return len(self.sounds)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        """The sample's part of each entry of a `SoundBatch`. With `augment`, (seed, epoch, index) determine
        caption and clip; else they are the first caption and the middle of the sound.

        Raises OSError or ValueError if the sound or its caption cannot be read or, without `augment`, any of its
        captions or its label.
        """
        (captions, label), waveform = self._read(index, epoch, augment)
        caption = captions[Draws("caption", self.seed, epoch, index).below(len(captions)) if augment else 0]
        tokens, (length,) = self.tokenizer.encode([caption])
        if not augment:  # validation encodes them all: fail here, if the error names the sound
            self.tokenizer.encode([*captions, *([label] if label else [])])
        return {
            "waveforms": waveform, "tokens": tokens[0], "lengths": length,
            "captions": caption, "caption_ids": torch.tensor(caption_id(caption), dtype=torch.int64),
            "all_captions": captions, "labels": label,
        }  # fmt: skip

    def _read(self, index: int, epoch: int, augment: bool) -> tuple[Texts, Tensor]:
        if isinstance(self.sounds, OwnSounds):
            return self.sounds.read(index, epoch, augment)
        return self.sounds.texts(index), self.sounds.load(index, epoch, augment)

    def describe(self, index: int) -> str:
        return self.sounds.describe(index)


def caption_id(caption: str) -> int:
    """A caption -> 64 bits in [-2^63, 2^63)."""
    return derive_key("caption", caption) - (1 << 63)


def sound_feed(args: argparse.Namespace, processes: Processes, tokenizer: Tokenizer) -> Feed[SoundBatch]:
    """The feed of a script that trains on sounds and captions.

    `args` are `RunFlags` of `training/flags/shared.py`, and audio_data, sample_rate and clip_seconds. Raises what
    `Feed` raises.
    """
    source = data_of(args, "audio_data")

    def open_set(spec: str | OwnData = source) -> CaptionedSounds:
        hearing = {"sample_rate": args.sample_rate, "clip_seconds": args.clip_seconds}
        return CaptionedSounds(open_sounds(spec, **hearing, seed=args.seed), tokenizer, args.seed)

    return Feed(
        open_set, args, processes, split_seed=split_seed_of(args), noun="sound", source=str(source),
        collate=collate_entries, open_valid=partial(open_set, args.valid_folder) if args.valid_folder else None,
    )  # fmt: skip
