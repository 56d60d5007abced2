"""A user's own dataset (--dataset): found, asked and checked; its items are treated as files are."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from data.bad_samples import NotASample
from data.fields import KINDS
from data.records.own import OwnData
from data.sets import open_conditioned, open_images, open_sounds, open_videos, widths_of
from data.tokenizers import open_tokenizer
from tests.data.helpers import OfOne, global_batches, one_line
from tests.scripts import TOKENIZER

N = 12
WORDS = open_tokenizer(str(TOKENIZER), 8)


class Items:
    """A map-style dataset of what a function gives for an index."""

    def __init__(self, item: Callable[[int], Any], n: int = N) -> None:
        self.item, self.n = item, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


@pytest.fixture
def own(monkeypatch) -> Callable[..., OwnData]:
    """`own(item)`: what --dataset own_items:make names, a dataset of these items."""
    module = ModuleType("own_items")
    monkeypatch.setitem(sys.modules, "own_items", module)

    def name(item: Callable[[int], Any] | Any, n: int = N, **args: Any) -> OwnData:
        made = Items(item, n) if callable(item) else item
        module.make = lambda args: made  # type: ignore[attr-defined]
        return OwnData("own_items:make", argparse.Namespace(**{"seed": 0, **args}))

    return name


def pixels(index: int, shape: tuple[int, ...] = (20, 24, 3)) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 256, shape, np.uint8)


def planar(index: int) -> np.ndarray:
    return pixels(index).transpose(2, 0, 1)


def opened(spec: Any, **options: Any) -> OfOne:
    return OfOne(open_images(spec, **{"image_size": 16, "flip": True, "seed": 5, **options}), "images")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "files"
    path.mkdir()
    for index in range(N):
        Image.fromarray(pixels(index)).save(path / f"{index:02d}.png")
    return path


# What an item may be.


def test_items_of_every_form_are_images_as_those_of_a_folder(own, folder):
    files = opened(str(folder))
    for item in (
        lambda i: Image.fromarray(pixels(i)),
        lambda i: Image.open(folder / f"{i:02d}.png"),
        planar,
        lambda i: torch.from_numpy(planar(i).copy()),
        lambda i: torch.from_numpy(planar(i).copy()).float() / 255,
        lambda i: planar(i).astype(np.float64) / 255,
        lambda i: {"image": planar(i), "label": 3},
        lambda i: (planar(i), 3),
        lambda i: [Image.fromarray(pixels(i))],
    ):
        rows = opened(own(item))
        assert len(rows) == N and rows.describe(3) == "own_items:make[3]"
        for epoch, augment in ((0, False), (0, True), (1, True)):
            assert torch.equal(rows.load(3, epoch, augment), files.load(3, epoch, augment))
            assert torch.equal(rows.load(4, epoch, augment), files.load(4, epoch, augment))


def test_grey_images_and_transparent_ones_have_the_channels_of_the_model(own):
    grey = opened(own(lambda i: planar(i)[:1]))
    assert torch.equal(grey.load(0)[0], grey.load(0)[2])
    clear = opened(own(lambda i: np.zeros((4, 20, 24), np.uint8)))
    assert clear.load(0).eq(255).all(), "white stands behind transparent pixels"
    assert opened(own(lambda i: np.zeros((4, 20, 24), np.uint8)), channels=4).load(0).eq(0).all()


@pytest.mark.parametrize(
    ("item", "found"),
    [
        (None, "None"), ({"pixels": 1}, "a mapping with pixels: int"),
        (np.zeros((20, 24, 3), np.uint8), "(20, 24, 3)"), (torch.zeros(3, 4, 4, dtype=torch.int64), "type int64"),
        (np.full((3, 4, 4), np.nan), "from nan to nan"), (np.full((3, 4, 4), 200.0), "from 200 to 200"),
    ],
)  # fmt: skip
def test_an_item_that_is_no_image_is_named_and_no_other_takes_its_place(item, found, own):
    rows = opened(own(lambda i: item if i == 7 else planar(i)))
    said = one_line(rows.load, 7)
    assert said.startswith("--dataset: own_items:make[7] is ") and found in said
    with pytest.raises(NotASample):
        global_batches(rows.samples, 2)


def test_conditioned_images_have_captions_and_embeddings(own):
    def item(index: int) -> dict[str, Any]:
        rows = np.full((2 + index % 3, 4), index, np.float32)
        return {"image": planar(index), "text": f"a  {index}", "image_embed": rows[0] + 1, "text_encodings": rows + 1}

    def conditioned(item: Any, **takes: Any) -> Any:
        return open_conditioned(own(item), **{"image_size": 16, "takes": KINDS, "longest_text": 8, **takes})

    rows = conditioned(item)
    assert widths_of(rows) == {"image_embed": 4, "text_encodings": (8, 4)}
    sample = rows.load(4)
    assert sample["captions"] == "a 4" and sample["image_embed"].tolist() == [5.0] * 4
    assert sample["text_encodings"].shape == (8, 4) and sample["text_encodings"].sum() == 3 * 4 * 5
    tokens = conditioned(lambda i: (planar(i), "ab"), tokenize=lambda texts: torch.tensor([[len(t)] for t in texts]))
    assert tokens.load(1)["tokens"].tolist() == [2] and tokens.load(1)["captions"] == "ab"
    assert 'an "image" and a "image_embed"' in one_line(conditioned, planar)
    longer = conditioned(lambda i: {**item(i), "text_encodings": np.ones((9 if i else 3, 4), np.float32)})
    assert "--max_text_len" in one_line(longer.load, 1)
    small = conditioned(lambda i: {**item(i), "image": planar(i)[:, :9]})
    assert "9 pixels, fewer than 16" in one_line(small.load, 1)


def waves(index: int, n: int = 5000) -> np.ndarray:
    return (0.3 * np.sin(np.arange(n) * 0.01 * (1 + index))).astype(np.float32)


def hearing(spec: Any) -> OfOne:
    return OfOne(open_sounds(spec, sample_rate=8000, clip_seconds=0.2, tokenizer=WORDS, seed=3), "waveforms")


def test_sounds_of_every_form_are_clips_as_those_of_a_folder(own, tmp_path):
    for index in range(N):
        stereo = np.stack([waves(index), waves(index + 1)])
        soundfile.write(tmp_path / f"{index:02d}.wav", stereo.T, 11025, subtype="FLOAT")
        (tmp_path / f"{index:02d}.txt").write_text("one\ntwo")
    files = hearing(str(tmp_path))
    for item in (
        lambda i: (np.stack([waves(i), waves(i + 1)]), 11025, ["one", "two"], "a class"),
        lambda i: {"waveform": torch.from_numpy(np.stack([waves(i), waves(i + 1)])), "sample_rate": np.int64(11025),
                   "captions": ("one", "two"), "label": "a class"},
        lambda i: {"audio": {"array": np.stack([waves(i), waves(i + 1)]), "sampling_rate": 11025, "path": None},
                   "caption_1": "one", "caption_2": "two", "label": "a class"},
    ):  # fmt: skip
        rows = hearing(own(item))
        sample = rows.samples.load(5, 1, True)
        assert (sample["all_captions"], sample["labels"]) == (["one", "two"], "a class")
        assert torch.equal(sample["waveforms"], files.load(5, 1, True))
        assert torch.equal(rows.load(5), files.load(5)) and not torch.equal(rows.load(5), rows.load(4))
    mono = hearing(own(lambda i: (waves(i, 100), 8000, "short")))
    assert mono.load(2).shape == (1600,) and torch.equal(mono.load(2)[:100], mono.load(2)[100:200]), "it is repeated"


@pytest.mark.parametrize(
    "item",
    [
        (waves(0), 8000), (waves(0), 3, "a"), (waves(0).astype(int), 8000, "a"), (waves(0), 8000, 5),
        (waves(0)[:, None].repeat(2, 1), 8000, "a"), {"waveform": waves(0), "caption": "a"},
    ],
)  # fmt: skip
def test_an_item_that_is_no_captioned_sound_is_named(item, own):
    said = one_line(hearing(own(lambda i: item)).load, 2)
    assert said.startswith("--dataset: own_items:make[2] is ") or said == "it has no caption"


def seeing(spec: Any, **options: Any) -> OfOne:
    return OfOne(open_videos(spec, **{"image_size": 8, "num_frames": 3, "seed": 1, **options}), "videos")


def numbered(n: int) -> torch.Tensor:
    """Frame k is grey of the value k."""
    return torch.arange(n, dtype=torch.uint8)[:, None, None, None].expand(n, 3, 10, 12)


def frames_of(clip: torch.Tensor) -> list[int]:
    return clip[0, :, 0, 0].tolist()


def test_clips_are_cut_out_of_videos(own):
    clips = seeing(own(lambda i: numbered(20)))
    assert clips.load(0).shape == (3, 3, 8, 8) and frames_of(clips.load(0)) == [8, 9, 10]
    starts = {tuple(frames_of(clips.load(0, epoch, True))) for epoch in range(60)}
    assert all(b == a + 1 and c == a + 2 for a, b, c in starts) and len(starts) > 12
    assert frames_of(seeing(own(lambda i: {"video": numbered(20)}), frame_stride=4).load(0)) == [5, 9, 13]
    assert frames_of(seeing(own(lambda i: (numbered(20).float() / 255, "a label"))).load(0)) == [8, 9, 10]
    by_time = seeing(own(lambda i: {"video": numbered(21), "fps": 10.0}), fps=5.0)
    assert frames_of(by_time.load(0)) == [8, 10, 12]
    twice = seeing(own(lambda i: {"video": numbered(21), "fps": 10}), fps=20.0)
    assert frames_of(twice.load(0)) == [9, 10, 10]


def test_an_item_that_is_no_video_is_named(own):
    for item in ("x", planar(0), numbered(3).permute(0, 2, 3, 1), numbered(0), numbered(3).long()):
        assert one_line(seeing(own(lambda i, item=item: item)).load, 2).startswith("--dataset: own_items:make[2] is ")
    for item in (numbered(3), (numbered(1), "a label", 24.0), (numbered(1), 25, 30), [numbered(2), 0, 0, 25.0]):
        assert 'and its "fps"' in one_line(seeing(own(lambda i, item=item: item), fps=5.0).load, 2)


# Draws, fingerprints, errors.


def noisy(index: int) -> np.ndarray:
    """An image with noise of all three global generators."""
    grey = random.randrange(80) + np.random.randint(80) + int(torch.randint(80, ()))  # noqa: NPY002
    return np.full((3, 16, 16), grey, np.uint8)


def test_draws_differ_by_sample_and_seed_in_training_also_by_epoch_and_disturb_nobody(own):
    def grey(spec: OwnData, index: int, epoch: int = 0, augment: bool = False) -> int:
        return int(opened(spec).load(index, epoch, augment)[0, 0, 0])

    spec = own(noisy)
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert len({grey(spec, i) for i in range(N)}) > 8 and len({grey(spec, 0, e, True) for e in range(12)}) > 8
    assert len({grey(spec, 0, e) for e in range(12)}) == 1
    assert len({grey(own(noisy, seed=s), 0) for s in range(12)}) > 8
    assert state == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002


def test_any_error_of_an_item_makes_a_bad_sample_that_says_where(own):
    def item(index: int) -> Any:
        if index == 4:
            raise KeyError("no\nsuch key")
        if index == 5:
            raise FileNotFoundError(2, "No such file or directory", "x.png")
        return planar(index)

    rows = opened(own(item))
    said = one_line(rows.load, 4)
    assert said.startswith("KeyError: 'no\\nsuch key' (test_own.py, line ")
    batches = global_batches(rows.samples, 3, num_workers=1)
    bad = {sample.index: str(sample) for batch in batches for sample in batch["bad"]}
    assert (
        bad[5].startswith("own_items:make[5]: FileNotFoundError: [Errno 2]") and bad[4] == f"own_items:make[4]: {said}"
    )
    with pytest.raises(ValueError, match="--on_bad_sample replace goes on without it"):
        global_batches(rows.samples, 3, on_bad_sample="error")


# Finding it.


def test_a_module_of_the_current_folder_is_imported_and_its_function_gets_the_arguments(tmp_path, monkeypatch):
    (tmp_path / "pictures_of_mine.py").write_text(
        "class Grey:\n    def __init__(self, args):\n        self.value, args.value = args.value, 0\n"
        "    def __len__(self):\n        return 3\n    def __getitem__(self, i):\n"
        "        import numpy\n        return numpy.full((1, 9, 9), self.value, 'uint8')\n"
        "class Many:\n    make = Grey\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    args = argparse.Namespace(seed=0, value=7)
    for name in ("Grey", "Many.make"):
        assert opened(OwnData(f"pictures_of_mine:{name}", args)).load(0).eq(7).all() and args.value == 7
    sys.modules.pop("pictures_of_mine")


@pytest.mark.parametrize(
    ("spec", "code", "said"),
    [
        ("mine/a.py:make", "", "expected MODULE:FUNCTION"), ("data:make", None, "data is a name of this project"),
        ("mine_c:make", "import not_there_at_all", "importing mine_c failed: ModuleNotFoundError: No module named"),
        ("mine_e:make", "x = (", "importing mine_e failed: SyntaxError: '(' was never closed (mine_e.py, line 1)"),
        ("mine_z:make", "import sys\ndef make(args):\n    sys.exit('no')", "the function failed: SystemExit: no"),
        ("mine_j:make", "def make(args):\n    return []", "what the function returned is empty"),
    ],
)  # fmt: skip
def test_what_cannot_be_found_or_made_is_one_line(spec, code, said, tmp_path, monkeypatch):
    if code is not None:
        (tmp_path / f"{spec.partition(':')[0].replace('/', '_')}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    line = one_line(opened, OwnData(spec, argparse.Namespace(seed=0)))
    assert line.startswith(f"--dataset {spec}: ") and said in line, line
