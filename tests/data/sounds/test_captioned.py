"""The feed of sounds: captions and clips by seed, epoch and index, whoever loads them; bad files as for images."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from data import Feed, SoundBatch, open_sounds, open_tokenizer, sound_feed
from data.sounds.captioned import CaptionedSounds, caption_id
from data.stream import collate_entries
from tests.data.helpers import global_batches
from tests.processes import Process

RATE = 8000
TOKENIZER = open_tokenizer("clip", 24)
BROKEN = (3, 11)


def feed(audio_data: Path | str, tokenizer=TOKENIZER, **changed: Any) -> Feed[SoundBatch]:
    settings: dict[str, Any] = {
        "audio_data": str(audio_data), "sample_rate": RATE, "clip_seconds": 0.5, "seed": 0, "split_seed": 42,
        "valid_fraction": 0.25, "batch_size": 4, "num_workers": 0, "on_bad_sample": "replace", "valid_folder": None,
        "valid_samples": 0,
    }  # fmt: skip
    return sound_feed(argparse.Namespace(**{**settings, **changed}), Process(), tokenizer)


def folder_of_sounds(folder: Path, broken: Iterable[int] = ()) -> Path:
    """16 sounds; i lasts 0.2 s longer than i - 1, and its sample k is (k + 1000 i) / 2^20."""
    for i in range(16):
        samples = (np.arange(round((0.3 + 0.2 * i) * RATE)) + 1000 * i) / 2**20
        soundfile.write(folder / f"{i:02d}.wav", samples, RATE, subtype="FLOAT")
        (folder / f"{i:02d}.txt").write_text("\n".join(f"sound {i} in words {c}" for c in range(5)))
        if i in broken:
            (folder / f"{i:02d}.wav").write_bytes(b"no sound at all")
    return folder


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    return folder_of_sounds(tmp_path_factory.mktemp("intact"))


def captioned(folder: Path, seconds: float = 0.5, seed: int = 0) -> CaptionedSounds:
    return CaptionedSounds(open_sounds(str(folder), sample_rate=RATE, clip_seconds=seconds, seed=seed), TOKENIZER, seed)


def batches(folder: Path, n: int, seed: int = 0, **options: Any) -> list[dict]:
    return global_batches(captioned(folder, seed=seed), n, seed=seed, collate=collate_entries, noun="sounds", **options)


def test_batch_is_what_the_contract_says(intact):
    opened = feed(intact)
    batch = opened.start(0)
    assert batch["waveforms"].shape == (4, RATE // 2) and batch["waveforms"].dtype == torch.float32
    assert batch["tokens"].shape == (4, 24) and batch["tokens"].dtype == torch.int64
    assert batch["caption_ids"].shape == (4,) and batch["caption_ids"].dtype == torch.int64
    assert batch["positions"] == [0, 1, 2, 3]
    tokens, lengths = TOKENIZER.encode(batch["captions"])
    assert torch.equal(batch["tokens"], tokens) and batch["lengths"] == lengths
    assert batch["caption_ids"].tolist() == [caption_id(caption) for caption in batch["captions"]]
    for caption, captions, index in zip(batch["captions"], batch["all_captions"], batch["ids"], strict=True):
        assert captions == [f"sound {index} in words {c}" for c in range(5)] and caption in captions
    assert opened.next()["ids"] != batch["ids"]
    assert all(len(value) == 4 for value in batch.values()), "every entry is cut into micro-batches alike"


def test_equal_captions_and_no_others_have_equal_ids():
    captions = [f"{a} {b}" for a in ("a", "the") for b in range(500)]
    ids = [caption_id(caption) for caption in captions]
    assert len(set(ids)) == 1000 and caption_id("a 3") == ids[3]
    assert -(2**63) <= min(ids) < -(2**60) and 2**60 < max(ids) < 2**63
