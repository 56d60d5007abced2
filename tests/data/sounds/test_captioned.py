"""The feed of sounds: captions and clips by seed, epoch and index, whoever loads them; bad files as for images."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import tokenizers
import torch

from data import Feed, SoundBatch, TrainingStream, ValidationStream, open_sounds, open_tokenizer, sound_feed, split
from data.order import TrainingOrder
from data.sounds.captioned import CaptionedSounds, caption_id
from data.stream import collate_entries
from tests.data.helpers import WORLDS_AND_WORKERS, assert_same, global_batches, joined, one_line
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


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> Path:
    folder = folder_of_sounds(tmp_path_factory.mktemp("damaged"), BROKEN)
    (folder / "07.txt").unlink()
    return folder


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


@pytest.mark.parametrize("name", ["intact", "damaged"])
@pytest.mark.parametrize("world_size, num_workers", WORLDS_AND_WORKERS)
def test_captions_and_clips_do_not_depend_on_ranks_and_workers(request, name, world_size, num_workers):
    folder = request.getfixturevalue(name)
    assert_same(batches(folder, 6, world_size=world_size, num_workers=num_workers), batches(folder, 6))


def test_resumed_feed_equals_uninterrupted_feed(intact):
    assert_same(batches(intact, 8)[5:], batches(intact, 3, start_samples=40, num_workers=1))


def test_caption_and_clip_are_drawn_anew_in_every_epoch(intact):
    captions, firsts = defaultdict(list), defaultdict(list)
    for batch in batches(intact, 24):  # twelve epochs
        for index, caption, waveform in zip(batch["ids"], batch["captions"], batch["waveforms"], strict=True):
            captions[index].append(caption)
            firsts[index].append(float(waveform[0]))
    assert all(len(drawn) == 12 and len(set(drawn)) >= 3 for drawn in captions.values())
    assert {caption for drawn in captions.values() for caption in drawn} > {f"sound 5 in words {c}" for c in range(5)}
    assert all(len(set(firsts[index])) > 6 for index in range(2, 16)), "longer than a clip"
    assert set(firsts[0]) == {0}
    assert_same(batches(intact, 24), batches(intact, 24))
    assert batches(intact, 2)[1]["captions"] != batches(intact, 2, seed=1)[1]["captions"]


def test_validation_hears_the_middle_and_reads_the_first_caption(intact):
    opened = feed(intact)
    opened.start(0)
    whole = joined(list(opened.validation()))
    assert sorted(whole["ids"]) == sorted(opened.valid_set)
    for index, caption, captions, waveform in zip(
        whole["ids"], whole["captions"], whole["all_captions"], whole["waveforms"], strict=True
    ):
        assert caption == captions[0] == f"sound {index} in words 0"
        assert torch.equal(waveform, opened.samples.sounds.load(index))


def test_split_depends_on_its_own_seed_alone(intact):
    valid = [set(feed(intact, **changed).valid_set) for changed in ({}, {"seed": 5}, {"split_seed": 43})]
    assert valid[0] == valid[1] != valid[2]
    assert feed(intact, seed=5).start(0)["ids"] != feed(intact).start(0)["ids"]


@pytest.mark.parametrize("valid_fraction, count", [(0.25, 1), (0.25, 3), (0.0, 1), (0.0, 3), (0.5, 100)])
def test_preview_is_the_beginning_of_validation_or_of_the_first_batch(intact, valid_fraction, count):
    opened = feed(intact, valid_fraction=valid_fraction)
    first = opened.start(0)
    shown = opened.preview(count)
    expected = joined(list(opened.validation())) if valid_fraction else first
    assert len(shown["captions"]) == min(count, len(expected["captions"]))
    assert_same([{**shown, "bad": []}], [{**{key: value[:count] for key, value in expected.items()}, "bad": []}])


def test_bad_sounds_are_replaced_by_the_next_of_the_order_counted_and_told(damaged):
    opened = feed(damaged, valid_fraction=0.0)
    order = TrainingOrder(opened.train_set, 0)
    got = opened.start(0)["ids"] + [index for _ in range(3) for index in opened.next()["ids"]]
    for position, index in enumerate(got):
        following = (order(position, skip)[1] for skip in range(16))
        assert index == next(candidate for candidate in following if candidate not in (*BROKEN, 7))
    said: list[str] = []
    assert one_line(opened.report_bad_samples, said.append).startswith("3 of 16 samples could not be read")
    assert opened.bad_samples.count == 3
    broken = "libsndfile cannot read it: Format not recognised."
    untold = "it has no caption: there is neither a .txt nor a .json beside it"
    reasons = {"03": broken, "07": untold, "11": broken}
    expected = [f"cannot read {damaged}/{i}.wav: {why}; the next sound takes its place" for i, why in reasons.items()]
    assert sorted(said) == expected


def test_text_without_a_token_is_a_bad_sample(intact, tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"sound": 0, "in": 1}, unk_token=None))
    words.save(str(tmp_path / "tokenizer.json"))
    opened = feed(intact, open_tokenizer(str(tmp_path / "tokenizer.json"), 8))
    assert "none of 12 sounds could be read" in one_line(opened.start, 0)


def test_no_length_of_a_sound_cuts_the_tokens_of_its_caption(intact):
    """A public loader curtails every tensor of a batch to its shortest, waveforms and tokens alike."""
    short, long = (collate_entries([captioned(intact, s).load(i) for i in (0, 15)]) for s in (0.001, 9))
    assert short["waveforms"].shape == (2, 8)
    assert short["tokens"].shape == (2, 24) and short["lengths"] == TOKENIZER.encode(short["captions"])[1]
    assert torch.equal(long["tokens"], short["tokens"])


def test_an_empty_set_is_an_error_not_an_endless_loop(tmp_path, intact):
    assert "no sound in" in one_line(feed, tmp_path)
    (tmp_path / "set.csv").write_text("path,caption\n")
    assert "has no rows" in one_line(feed, tmp_path / "set.csv")
    assert "16 samples are too few" in one_line(feed, intact, batch_size=17)
    nothing, samples = split(16, 0.0, 0, 1)[1], captioned(intact)
    options: dict[str, Any] = {
        "batch_size": 4,
        "rank": 0,
        "world_size": 1,
        "collate": collate_entries,
        "noun": "sounds",
    }
    assert "no sounds to train on" in one_line(TrainingStream, samples, nothing, seed=0, **options)
    assert list(ValidationStream(samples, nothing, **options)) == []


def test_equal_captions_and_no_others_have_equal_ids():
    captions = [f"{a} {b}" for a in ("a", "the") for b in range(500)]
    ids = [caption_id(caption) for caption in captions]
    assert len(set(ids)) == 1000 and caption_id("a 3") == ids[3]
    assert -(2**63) <= min(ids) < -(2**60) and 2**60 < max(ids) < 2**63


def test_demo_feeds_workers():
    batch = feed("demo:tones:64", num_workers=2, batch_size=16).start(0)
    assert batch["waveforms"].shape == (16, RATE // 2) and batch["waveforms"].std() > 0.01
    assert set(batch["labels"]) <= {"sine wave", "triangle wave", "square wave", "sawtooth wave", "noise"}
    assert all(len(captions) == 4 for captions in batch["all_captions"])
