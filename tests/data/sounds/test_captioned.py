"""The feed of sounds: captions and clips by seed, epoch and index, whoever loads them; bad files as for images."""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from data import Feed, SoundBatch, TrainingStream, ValidationStream, open_sounds, open_tokenizer, sound_feed, split
from data.order import TrainingOrder
from data.sounds.captioned import CaptionedSounds, caption_id, collate_sounds

RATE = 8000
TOKENIZER = open_tokenizer("clip", 24)


class Alone:
    """One process, as the scripts' backends present it."""

    rank, world_size, device = 0, 1, torch.device("cpu")

    def agreement(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def each(self, what: str, items: Iterable[Any]) -> Iterator[Any]:
        return iter(items)

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def waiting_for(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def arguments(audio_data: Path | str, **changed: Any) -> argparse.Namespace:
    settings: dict[str, Any] = {
        "audio_data": str(audio_data), "sample_rate": RATE, "clip_seconds": 0.5, "seed": 0, "split_seed": 42,
        "valid_fraction": 0.25, "batch_size": 4, "num_workers": 0, "on_bad_sample": "replace",
    }  # fmt: skip
    return argparse.Namespace(**{**settings, **changed})


def feed(audio_data: Path | str, **changed: Any) -> Feed[SoundBatch]:
    return sound_feed(arguments(audio_data, **changed), Alone(), TOKENIZER)


def folder_of_sounds(folder: Path, n: int, broken: Iterable[int] = (), n_captions: int = 5) -> Path:
    """Sound i lasts 0.2 s longer than sound i - 1; its sample k is (k + 1000 i) / 2^20."""
    folder.mkdir()
    for i in range(n):
        samples = (np.arange(round((0.3 + 0.2 * i) * RATE)) + 1000 * i) / 2**20
        soundfile.write(folder / f"{i:02d}.wav", samples, RATE, subtype="FLOAT")
        (folder / f"{i:02d}.txt").write_text("\n".join(f"sound {i} in words {c}" for c in range(n_captions)))
        if i in broken:
            (folder / f"{i:02d}.wav").write_bytes(b"no sound at all")
    return folder


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    return folder_of_sounds(tmp_path_factory.mktemp("sets") / "intact", 16)


BROKEN = (3, 11)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> Path:
    folder = folder_of_sounds(tmp_path_factory.mktemp("sets") / "damaged", 16, BROKEN)
    (folder / "07.txt").unlink()
    return folder


def batches(
    folder: Path, n: int, world_size: int = 1, num_workers: int = 0, seed: int = 0, start: int = 0
) -> list[dict]:
    """The first n global batches, put together from those of all ranks."""
    samples = CaptionedSounds(open_sounds(str(folder), sample_rate=RATE, clip_seconds=0.5, seed=seed), TOKENIZER, seed)
    everything, _ = split(len(samples), 0.0, 0, 1)
    streams = [
        TrainingStream(
            samples, everything, batch_size=8, rank=rank, world_size=world_size, seed=seed, start_samples=start,
            num_workers=num_workers, collate=collate_sounds, noun="sounds",
        )
        for rank in range(world_size)
    ]  # fmt: skip
    return [joined(parts) for parts in itertools.islice(zip(*streams, strict=True), n)]


def joined(parts: Iterable[dict]) -> dict:
    parts = list(parts)
    whole = {}
    for key, first in parts[0].items():
        values = [part[key] for part in parts]
        whole[key] = torch.cat(values) if isinstance(first, Tensor) else [entry for value in values for entry in value]
    return whole


def assert_same(some: list[dict], others: list[dict]) -> None:
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() - {"bad"}:
            assert torch.equal(one[key], other[key]) if isinstance(one[key], Tensor) else one[key] == other[key], key
        assert {sample.index for sample in one["bad"]} == {sample.index for sample in other["bad"]}


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
@pytest.mark.parametrize("world_size, num_workers", [(2, 0), (4, 0), (1, 2), (2, 2)])
def test_captions_and_clips_do_not_depend_on_ranks_and_workers(request, name, world_size, num_workers):
    folder = request.getfixturevalue(name)
    assert_same(batches(folder, 6, world_size, num_workers), batches(folder, 6))


def test_resumed_feed_equals_uninterrupted_feed(intact):
    assert_same(batches(intact, 8)[5:], batches(intact, 3, start=40, num_workers=1))


def test_caption_and_clip_are_drawn_anew_in_every_epoch(intact):
    captions: dict[int, list[str]] = {}
    firsts: dict[int, list[float]] = {}
    for batch in batches(intact, 24):  # twelve epochs
        for index, caption, waveform in zip(batch["ids"], batch["captions"], batch["waveforms"], strict=True):
            captions.setdefault(index, []).append(caption)
            firsts.setdefault(index, []).append(float(waveform[0]))
    assert all(len(drawn) == 12 and len(set(drawn)) >= 3 for drawn in captions.values())
    assert {caption for drawn in captions.values() for caption in drawn} > {f"sound 5 in words {c}" for c in range(5)}
    assert all(len(set(firsts[index])) > 6 for index in range(2, 16)), "longer than a clip"
    assert {float(first) * 2**20 for index in range(1) for first in firsts[index]} == {0}
    assert_same(batches(intact, 24), batches(intact, 24))
    assert batches(intact, 2)[1]["captions"] != batches(intact, 2, seed=1)[1]["captions"]


def test_validation_hears_the_middle_and_reads_the_first_caption(intact):
    opened = feed(intact)
    opened.start(0)
    seen = {}
    for batch in opened.validation():
        for index, caption, captions, waveform in zip(
            batch["ids"], batch["captions"], batch["all_captions"], batch["waveforms"], strict=True
        ):
            assert caption == captions[0] == f"sound {index} in words 0"
            seen[index] = waveform
    assert sorted(seen) == sorted(opened.valid_set[i] for i in range(len(opened.valid_set)))
    for index, waveform in seen.items():
        assert torch.equal(waveform, opened.samples.sounds.load(index))


def test_split_depends_on_its_own_seed_alone(intact):
    def valid(**changed: int) -> set[int]:
        subset = feed(intact, **changed).valid_set
        return {subset[i] for i in range(len(subset))}

    assert valid() == valid(seed=5) != valid(split_seed=43)
    assert feed(intact, seed=5).start(0)["ids"] != feed(intact).start(0)["ids"]


@pytest.mark.parametrize("valid_fraction", [0.25, 0.0])
def test_preview_is_the_beginning_of_validation_or_of_the_first_batch(intact, valid_fraction):
    opened = feed(intact, valid_fraction=valid_fraction)
    first = opened.start(0)
    expected = next(opened.validation()) if valid_fraction else first
    for count in (1, 3):
        shown = opened.preview(count)
        assert torch.equal(shown["waveforms"], expected["waveforms"][:count])
        assert torch.equal(shown["tokens"], expected["tokens"][:count])
        assert shown.keys() == expected.keys()
        for key in ("captions", "lengths", "all_captions", "labels", "positions", "ids"):
            assert shown[key] == expected[key][:count]


def test_preview_goes_on_beyond_a_batch_to_the_end_of_validation(intact):
    opened = feed(intact, valid_fraction=0.5)
    opened.start(0)
    shown, batches = opened.preview(100), list(opened.validation())
    assert len(batches) > 1 and len(shown["waveforms"]) == len(opened.valid_set)
    for key in ("waveforms", "tokens"):
        assert torch.equal(shown[key], torch.cat([batch[key] for batch in batches]))
    for key in ("captions", "lengths", "all_captions", "labels"):
        assert shown[key] == [value for batch in batches for value in batch[key]]


def test_bad_sounds_are_replaced_by_the_next_of_the_order_counted_and_told(damaged):
    opened = feed(damaged, valid_fraction=0.0)
    order = TrainingOrder(opened.train_set, 0)
    batch = opened.start(0)
    got = batch["ids"] + [index for _ in range(3) for index in opened.next()["ids"]]
    for position, index in enumerate(got):
        following = (order(position, skip)[1] for skip in range(16))
        assert index == next(candidate for candidate in following if candidate not in (*BROKEN, 7))
    said: list[str] = []
    with pytest.raises(ValueError, match="3 of 16 samples could not be read"):  # 2 are passed over
        opened.report_bad_samples(said.append)
    assert opened.bad_samples.count == 3
    broken = "libsndfile cannot read it: Format not recognised."
    assert sorted(said) == [
        f"cannot read {damaged}/03.wav: {broken}; the next sound takes its place",
        f"cannot read {damaged}/07.wav: it has no caption: there is neither a .txt nor a .json beside it; "
        "the next sound takes its place",
        f"cannot read {damaged}/11.wav: {broken}; the next sound takes its place",
    ]  # fmt: skip


def test_bad_sound_stops_the_run_where_that_was_asked(damaged):
    opened = feed(damaged, on_bad_sample="error", valid_fraction=0.0)
    with pytest.raises(ValueError, match="--on_bad_sample replace goes on without it"):
        opened.start(0)
        for _ in range(4):
            opened.next()


def test_text_without_a_token_is_a_bad_sample(intact, tmp_path):
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"sound": 0, "in": 1}, unk_token=None))
    words.save(str(tmp_path / "tokenizer.json"))
    opened = sound_feed(arguments(intact), Alone(), open_tokenizer(str(tmp_path / "tokenizer.json"), 8))
    with pytest.raises(ValueError, match="none of 12 sounds could be read"):
        opened.start(0)


def test_no_length_of_a_sound_cuts_the_tokens_of_its_caption(intact):
    """A public loader curtails every tensor of a batch to its shortest, waveforms and tokens alike."""
    samples = CaptionedSounds(open_sounds(str(intact), sample_rate=RATE, clip_seconds=0.001), TOKENIZER, 0)
    batch = collate_sounds([samples.load(i) for i in (0, 15)])
    assert batch["waveforms"].shape == (2, 8)
    assert batch["tokens"].shape == (2, 24) and batch["lengths"] == TOKENIZER.encode(batch["captions"])[1]
    long = CaptionedSounds(open_sounds(str(intact), sample_rate=RATE, clip_seconds=9), TOKENIZER, 0)
    assert torch.equal(collate_sounds([long.load(i) for i in (0, 15)])["tokens"], batch["tokens"])


def test_an_empty_set_is_an_error_not_an_endless_loop(tmp_path, intact):
    (tmp_path / "set").mkdir()
    with pytest.raises(ValueError, match="no sound in"):
        feed(tmp_path / "set")
    (tmp_path / "set.csv").write_text("path,caption\n")
    with pytest.raises(ValueError, match="has no rows"):
        feed(tmp_path / "set.csv")
    with pytest.raises(ValueError, match="16 samples are too few"):
        feed(intact, batch_size=17)
    _, nothing = split(16, 0.0, 0, 1)
    samples = CaptionedSounds(open_sounds(str(intact), sample_rate=RATE, clip_seconds=0.5), TOKENIZER, 0)
    options: dict[str, Any] = {"batch_size": 4, "rank": 0, "world_size": 1, "collate": collate_sounds, "noun": "sounds"}
    with pytest.raises(ValueError, match="no sounds to train on"):
        TrainingStream(samples, nothing, seed=0, **options)
    assert list(ValidationStream(samples, nothing, **options)) == []


def test_set_of_nothing_but_broken_sounds_is_one_line(tmp_path):
    folder = folder_of_sounds(tmp_path / "set", 8, range(8))
    with pytest.raises(ValueError) as error:
        feed(folder, valid_fraction=0.0).start(0)
    assert str(error.value).startswith(f"none of 8 sounds could be read: {folder}") and "\n" not in str(error.value)


def test_one_epoch_hears_every_sound_once(intact):
    """A public trainer takes len(dataset) steps for one epoch, which is an epoch for every sample of a batch."""
    seen = [index for batch in batches(intact, 2) for index in batch["ids"]]
    assert sorted(seen) == list(range(16))


def test_equal_captions_and_no_others_have_equal_ids():
    captions = [f"{a} {b}" for a in ("a", "the") for b in range(500)]
    ids = [caption_id(caption) for caption in captions]
    assert len(set(ids)) == 1000 and caption_id("a 3") == ids[3]
    assert -(2**63) <= min(ids) < -(2**60) and 2**60 < max(ids) < 2**63


def test_demo_feeds_workers(intact):
    opened = feed("demo:tones:64", num_workers=2, batch_size=16)
    batch = opened.start(0)
    assert batch["waveforms"].shape == (16, RATE // 2) and batch["waveforms"].std() > 0.01
    assert set(batch["labels"]) <= {"sine wave", "triangle wave", "square wave", "sawtooth wave", "noise"}
    assert all(len(captions) == 4 for captions in batch["all_captions"])
