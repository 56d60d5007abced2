"""The feed of sounds: what its batches hold."""

from __future__ import annotations

import torch

from data import open_tokenizer
from data.sounds.captioned import caption_id
from tests.data.sources import BATCH, SOUNDS
from tests.scripts import TOKENIZER


def test_batch_is_what_the_contract_says():
    batch = SOUNDS.feed().start(0)
    assert batch["waveforms"].shape == (BATCH, 4000) and batch["waveforms"].dtype == torch.float32
    tokens, lengths = open_tokenizer(str(TOKENIZER), 8).encode(batch["captions"])
    assert torch.equal(batch["tokens"], tokens) and batch["lengths"] == lengths and tokens.dtype == torch.int64
    assert torch.equal(batch["caption_ids"], torch.tensor([caption_id(caption) for caption in batch["captions"]]))
    assert all(caption in captions for caption, captions in zip(batch["captions"], batch["all_captions"], strict=True))
    assert set(batch["labels"]) <= {"sine wave", "triangle wave", "square wave", "sawtooth wave", "noise"}


def test_equal_captions_and_no_others_have_equal_ids():
    captions = [f"{a} {b}" for a in ("a", "the") for b in range(500)]
    ids = [caption_id(caption) for caption in captions]
    assert len(set(ids)) == 1000 and caption_id("a 3") == ids[3]
    assert -(2**63) <= min(ids) < -(2**60) and 2**60 < max(ids) < 2**63
