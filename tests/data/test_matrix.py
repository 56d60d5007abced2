"""Every field takes the same out of every source, of a good sample and of others: a table of both."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from tandem.data.bad_samples import SampleIncomplete
from tandem.data.decoding import sounds, videos
from tandem.data.embeddings import IMAGE, TEXT, EmbeddingField
from tandem.data.fields import (
    ClipField,
    Field,
    ImageCaptionField,
    ImageField,
    SampleDataset,
    SoundCaptionsField,
    SoundField,
    TextsField,
)
from tandem.data.sets import open_records
from tandem.data.sources.user_dataset import DatasetSpec
from tandem.data.tokenizers import open_tokenizer
from tests.data.source_table import FILES, Record, encoded, gif, npy, wav
from tests.scripts import TOKENIZER

SIZE, RATE, CLIP = 8, 8000, 400  # no picture is resized and no sound resampled: what comes out is what went in
PLACES = [place for place, write in FILES.items() if write]
LEFT_OUT, BAD = SampleIncomplete, (ValueError, OSError)
Found = Mapping[str, Any]


def pixels(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def png(array: np.ndarray) -> bytes:
    return encoded(Image.fromarray(array), "png")


def grey(frames: np.ndarray) -> bytes:
    return gif(map(Image.fromarray, frames))


PICTURE, OTHER = pixels(0, SIZE, SIZE, 3), pixels(1, SIZE, SIZE, 3)
FRAMES = pixels(2, 4, SIZE, SIZE)
WAVE = np.random.default_rng(3).uniform(-1, 1, 2 * CLIP).astype(np.float32)
ROWS = np.random.default_rng(4).standard_normal((3, 6)).astype(np.float32)
ROW = ROWS[0]
IMAGED: Record = {"png": png(PICTURE)}
MARK = b"\xef\xbb\xbf"  # of the byte order, which editors write, and `cat` leaves within a text
HEARD: Record = {"wav": wav(WAVE[:CLIP], RATE)}


# The files of a sample, and what a field finds: some entries, or an error and a part of its text.
Sample = tuple[Record, Found | tuple[Any, str]]


class Case(NamedTuple):
    """A field, with the one that makes a sample before it, and samples of all conditions."""

    fields: Callable[[], Sequence[Field]]
    good: Sample
    damaged: Sample
    too_small: Sample
    without_caption: Sample
    part: Found | None = None  # of the good sample, from second 0.025 to 0.075


def captions(*texts: str) -> Found:
    return {"captions": texts[0], "all_captions": list(texts)}


def planar(picture: np.ndarray) -> Found:
    return {"images": picture.transpose(2, 0, 1)}


FIELDS = {
    "image": Case(
        lambda: [ImageField(SIZE, enlarge=False), ImageCaptionField()],
        ({**IMAGED, "txt": MARK + b"a house\r\n"}, {**planar(PICTURE), "captions": "a house"}),
        ({"png": IMAGED["png"][:50], "txt": b"a tree"}, (BAD, "")),
        ({"png": png(OTHER[:, :5]), "txt": b"a dog"}, (LEFT_OUT, "5 pixels, fewer than 8")),
        ({"png": png(OTHER)}, {**planar(OTHER), "captions": ""}),
    ),
    "clip": Case(
        lambda: [ClipField(videos.ClipDecoder(SIZE, 4, short_clips="skip"))],
        ({"gif": grey(FRAMES), "txt": b"a dance"}, {"videos": np.stack([FRAMES] * 3)}),
        ({"gif": b"none", "txt": b"a walk"}, (BAD, "")),
        ({"gif": grey(FRAMES[:2]), "txt": b"a jump"}, (BAD, "2")),
        ({"gif": grey(FRAMES[::-1])}, {"videos": np.stack([FRAMES[::-1]] * 3)}),
    ),
    "still": Case(  # an image is a video of one frame
        lambda: [ClipField(videos.ClipDecoder(SIZE, 1))],
        (IMAGED, {"videos": PICTURE.transpose(2, 0, 1)[:, None]}),
        ({"png": IMAGED["png"][:50]}, (BAD, "")),
        ({"gif": grey(FRAMES[:1])}, {"videos": np.stack([FRAMES[:1]] * 3)}),
        ({"png": png(OTHER)}, {"videos": OTHER.transpose(2, 0, 1)[:, None]}),
    ),
    "sound": Case(
        lambda: [SoundField(sounds.ClipDecoder(RATE, CLIP))],
        ({"wav": wav(WAVE, RATE), "txt": b"a bell"}, {"waveforms": WAVE[CLIP // 2 : CLIP // 2 + CLIP]}),
        ({"wav": b"none", "txt": b"a horn"}, (BAD, "")),
        ({"wav": wav(WAVE[: CLIP // 4], RATE), "txt": b"a drum"}, {"waveforms": np.tile(WAVE[: CLIP // 4], 4)}),
        ({"wav": wav(WAVE[CLIP:], RATE)}, {"waveforms": WAVE[CLIP:]}),
        part={"waveforms": WAVE[RATE // 40 : RATE // 40 + CLIP]},
    ),
    "clips": Case(  # spread over a sound
        lambda: [SoundField(sounds.ClipDecoder(RATE, CLIP), max_clips=3), SoundCaptionsField()],
        ({"wav": wav(WAVE, RATE), "txt": b"a bell"}, {"waveforms": WAVE.reshape(2, CLIP), "captions": ["a bell"]}),
        ({"wav": b"none", "txt": b"a horn"}, (BAD, "")),
        ({"wav": wav(WAVE[: CLIP // 4], RATE), "txt": b"a drum"}, {"waveforms": np.tile(WAVE[: CLIP // 4], 4)[None]}),
        ({"wav": wav(WAVE[CLIP:], RATE)}, {"waveforms": WAVE[None, CLIP:], "captions": []}),
    ),
    "texts": Case(
        lambda: [SoundField(sounds.ClipDecoder(RATE, CLIP)), TextsField(open_tokenizer(str(TOKENIZER), 8))],
        ({**HEARD, "txt": MARK + b"bell  sound\r\n" + MARK + b"horn sound\n"}, captions("bell sound", "horn sound")),
        ({"wav": b"none", "txt": b"bell sound"}, (BAD, "")),
        ({**HEARD, "txt": b" \n"}, (BAD, "no caption")),
        (HEARD, (BAD, "no caption")),
    ),
    "embedding": Case(
        lambda: [ImageField(SIZE), EmbeddingField(IMAGE, ROW.shape)],
        ({**IMAGED, "img_emb.npy": npy(ROW)}, {"image_embed": ROW}),
        ({**IMAGED, "img_emb.npy": npy(ROW * np.nan)}, (BAD, "not all numbers are finite")),
        ({**IMAGED, "img_emb.npy": npy(ROW[:5])}, (BAD, "(5,)")),
        ({**IMAGED, "txt": b"a house"}, (LEFT_OUT, "it has no image embedding")),
    ),
    "encoding": Case(
        lambda: [ImageField(SIZE), EmbeddingField(TEXT, (3, 6))],
        ({**IMAGED, "text_emb.npy": npy(ROWS[:2])}, {"text_encodings": np.vstack([ROWS[:2], 0 * ROWS[2:]])}),
        ({**IMAGED, "text_emb.npy": npy(ROWS * np.inf)}, (BAD, "not all numbers are finite")),
        ({**IMAGED, "text_emb.npy": npy(ROWS[:, :5])}, (BAD, "(3, 5)")),
        ({**IMAGED, "img_emb.npy": npy(ROW)}, (LEFT_OUT, "it has no text encoding")),
    ),
}  # fmt: skip


def opened(case: Case, spec: Path | str) -> SampleDataset:
    fields = case.fields()
    own = DatasetSpec(spec, argparse.Namespace(seed=0)) if isinstance(spec, str) else str(spec)
    return SampleDataset(open_records(own, [field.spec for field in fields], "shapes", 0), fields)


def check(samples: SampleDataset, index: int, expected: Found | tuple[Any, str]) -> None:
    if isinstance(expected, Mapping):
        found = samples.load(index)
        for name, value in expected.items():
            same = torch.equal(found[name], torch.tensor(value.copy())) if isinstance(value, np.ndarray) else None
            assert same or found[name] == value, name
        return
    kind, text = expected
    with pytest.raises(kind) as error:
        samples.load(index)
    assert text in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) > 5


@pytest.mark.parametrize("field, place", [
    (field, place) for field in FIELDS for place in PLACES
    if field != "still" or place not in ("arrow", "parquet", "own")  # where a video is what the user says is one
])  # fmt: skip
def test_every_field_of_every_source_is_what_was_written_or_an_error_of_one_line(
    field: str, place: str, tmp_path: Path
) -> None:
    case, write = FIELDS[field], FILES[place]
    assert write
    conditions = case[1:5]
    spec = write(tmp_path / "set", dict(enumerate(record for record, _ in conditions)))
    samples = opened(case, spec)
    assert len(samples) == 4
    for some in (samples, samples if place == "own" else pickle.loads(pickle.dumps(samples))):
        for index, (_, expected) in enumerate(conditions):
            check(some, index, expected)
    if case.part and place in ("arrow", "parquet", "csv", "manifest"):
        times: Any = {"start_seconds": [0.025, 0.05], "end_seconds": [0.075, None]}
        parts = opened(case, write(tmp_path / "parts", {0: case.good[0], 1: case.good[0]}, **times))
        check(parts, 0, case.part)
        check(parts, 1, {"waveforms": WAVE[CLIP:]})
