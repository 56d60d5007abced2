"""What fields make of files and of items of a user's own dataset, in every form that they may have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from tandem.data.bad_samples import BadDatasetItem
from tandem.data.decoding.images import FORMATS
from tandem.data.embeddings import KINDS
from tandem.data.fields import TEXTS, SoundField, read_sound_texts
from tandem.data.sets import open_conditioned, open_images, open_sounds, open_videos, widths_of
from tandem.data.sources.opening import open_source
from tandem.data.sources.record import FileRef
from tandem.data.sources.user_dataset import DatasetSpec
from tandem.data.tokenizers import open_tokenizer
from tests.data.decoding.films import SIDE, numbers, picture, write_video
from tests.data.helpers import Items, OfOne, global_batches, ids, named, one_line, write_tar
from tests.data.source_table import BATCH, VIDEOS, gif, image, training, video
from tests.scripts import TOKENIZER

N = 12
WORDS = open_tokenizer(str(TOKENIZER), 8)


def own(item: Any) -> DatasetSpec:
    """What --dataset names: a dataset of what a function gives for an index, or of one item."""
    return DatasetSpec(named(Items(item if callable(item) else lambda index: item)), argparse.Namespace(seed=0))


# Texts.


def test_a_set_of_sounds_without_captions_says_what_holds_them(tmp_path):
    """A folder with its list in it, and captions under other names."""
    for name, content in (("clips/a.wav", b""), ("clips/a.wav.txt", b"one"), ("manifest.csv", b"path,caption")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    said = one_line(open_sounds, str(tmp_path), sample_rate=8000, clip_seconds=1, tokenizer=WORDS)
    assert said.startswith("no sound of the 1 in") and "if 'manifest.csv' in it lists sounds, give its path" in said
    assert "1 of them beside no sound of the same name, such as 'clips/a.wav.txt'" in said


@pytest.mark.parametrize("name, content, captions, label", [
    ("a.txt", "one\n\n  two \none\n", ["one", "two"], None),
    ("a.JSON", '{"caption": "three", "label": "bell"}', ["three"], "bell"),
    ("a.json", '{"text": ["four", "five"], "label": 7}', ["four", "five"], "7"),
    ("a.json", '{"captions": "one|two | three"}', ["one", "two", "three"], None),
    ("a.json", '{"captions": "[music] | [applause]"}', ["[music]", "[applause]"], None),
    ("a.json", '{"caption": "one", "captions": ["two", "one", " "], "caption_5": "three"}', ["one", "two", "three"],
     None),
    ("a.json", '{"caption": "half a \\ud83d sign"}', ["half a ? sign"], None),
    ("a.txt", "\ufeffone\r\n\ufefftwo\u2028three\r\n", ["one", "two three"], None),
    ("a.json", '\ufeff{"captions": ["\\ufeffone"], "label": "\ufeffbell"}', ["one"], "bell"),
])  # fmt: skip
def test_captions_in_a_file_are_told_apart(name, content, captions, label, tmp_path):
    (tmp_path / name).write_text(content)
    assert read_sound_texts(FileRef(str(tmp_path / name))) == (captions, label)


def test_captions_of_a_row_may_be_a_list_in_a_cell_and_a_text_beside_them_is_another_thing(tmp_path):
    def read(columns: str, row: str) -> Any:
        (tmp_path / "set.csv").write_text(f"path,{columns}\na.wav,{row}\n")
        return read_sound_texts(hearing(str(tmp_path / "set.csv")).samples.source.record(0).get("texts"))

    assert read("captions", '"[""three"", ""four, five""]"') == (["three", "four, five"], None)
    numbered = "caption_1,caption_2,caption_3,caption_4,caption_5,text"
    assert read(numbered, "one,two,,four,five,what is said") == (["one", "two", "four", "five"], None)
    assert read("text,label", "one,bell") == (["one"], "bell")


@pytest.mark.parametrize("place", ["folder", "tar"])
def test_a_json_without_caption_leaves_the_captions_to_the_txt_beside_it(place, tmp_path):
    without, of_three = b'{"title": "x", "caption": " ", "label": "bell"}', b'{"caption": "three"}'

    def read(**files: bytes) -> Any:
        path = tmp_path / f"{len(files)} {len(files['json'])}"
        if place == "folder":
            path.mkdir()
            for ending, content in files.items():
                (path / f"a.{ending}").write_bytes(content)
        else:
            path = write_tar(path.with_suffix(".tar"), {"a": files})
        source = open_source(str(path), [SoundField.spec, TEXTS], demo="")
        assert not source.skipped or place == "folder"
        return read_sound_texts(source.record(0)["texts"])

    assert one_line(lambda: read(wav=b"", json=without)) == "it has no caption: a.json has none"
    assert read(wav=b"", json=without, txt=b"one\ntwo\n") == (["one", "two"], "bell")
    assert read(wav=b"", json=of_three, txt=b"one\ntwo\n") == (["three"], None)


@pytest.mark.parametrize("content", ["no json", "[]", '{"caption": 5}', "{}", '{"caption": " "}'])
def test_a_file_without_a_caption_is_bad(content, tmp_path):
    (tmp_path / "a.json").write_text(content)
    assert "caption" in one_line(read_sound_texts, FileRef(str(tmp_path / "a.json")))
    assert TEXTS.endings == (".json", ".txt") and ".txt nor a .json" in one_line(read_sound_texts, None)


# Images.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(N):
        Image.fromarray(pixels(index)).save(tmp_path / f"{index:02d}.png")
    return tmp_path


def pixels(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 256, (20, 24, 3), np.uint8)


def planar(index: int) -> np.ndarray:
    return pixels(index).transpose(2, 0, 1)


def opened(spec: Any, **options: Any) -> OfOne:
    return OfOne(open_images(spec, **{"image_size": 16, "flip": True, "seed": 5, **options}), "images")


def test_images_are_found_by_the_endings_of_all_formats(tmp_path):
    names = [f"{number}{ending}" for number, ending in enumerate(sum(FORMATS.values(), ()))]
    assert len(names) == 10
    for name in names:
        (tmp_path / name.upper()).touch()
    assert len(open_images(str(tmp_path), image_size=8)) == 10


def test_items_of_every_form_are_images_as_those_of_a_folder(folder):
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
        for epoch, augment in ((0, False), (0, True), (1, True)):
            for index in (3, 4):
                assert torch.equal(rows.load(index, epoch, augment), files.load(index, epoch, augment))


def test_grey_images_and_transparent_ones_have_the_channels_of_the_model():
    grey, clear = opened(own(lambda i: planar(i)[:1])).load(0), own(np.zeros((4, 20, 24), np.uint8))
    assert torch.equal(grey[0], grey[2])
    assert opened(clear).load(0).eq(255).all(), "white stands behind transparent pixels"
    assert opened(clear, channels=4).load(0).eq(0).all()


@pytest.mark.parametrize("item, found", [
    (None, "None"), ({"pixels": 1}, "a mapping with pixels: int"),
    (np.zeros((20, 24, 3), np.uint8), "(20, 24, 3)"), (torch.zeros(3, 4, 4, dtype=torch.int64), "type int64"),
    (np.full((3, 4, 4), np.nan), "from nan to nan"), (np.full((3, 4, 4), 200.0), "from 200 to 200"),
])  # fmt: skip
def test_an_item_that_is_no_image_is_named_and_no_other_takes_its_place(item, found):
    rows = opened(own(lambda i: item if i == 7 else planar(i)))
    said = one_line(rows.load, 7)
    assert said.startswith(f"--dataset: {rows.describe(7)} is ") and found in said
    with pytest.raises(BadDatasetItem):
        global_batches(rows.samples, 2)


def test_items_have_captions_and_embeddings():
    def item(index: int) -> dict[str, Any]:
        rows = np.full((2 + index % 3, 4), index, np.float32)
        return {"image": planar(index), "text": f"a  {index}", "image_embed": rows[0] + 1, "text_encodings": rows + 1}

    def conditioned(item: Any, **options: Any) -> Any:
        return open_conditioned(own(item), **{"image_size": 16, "kinds": KINDS, "longest_text": 8, **options})

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


# Sounds.


def waves(index: int, n: int = 5000) -> np.ndarray:
    return (0.3 * np.sin(np.arange(n) * 0.01 * (1 + index))).astype(np.float32)


def hearing(spec: Any) -> OfOne:
    return OfOne(open_sounds(spec, sample_rate=8000, clip_seconds=0.2, tokenizer=WORDS, seed=3), "waveforms")


def test_items_of_every_form_are_sounds_as_those_of_a_folder(tmp_path):
    def stereo(index: int) -> np.ndarray:
        return np.stack([waves(index), waves(index + 1)])

    for index in range(N):
        soundfile.write(tmp_path / f"{index:02d}.wav", stereo(index).T, 11025, subtype="FLOAT")
        (tmp_path / f"{index:02d}.txt").write_text("one\ntwo")
    files = hearing(str(tmp_path))
    for item in (
        lambda i: (stereo(i), 11025, ["one", "two"], "a class"),
        lambda i: {"waveform": torch.from_numpy(stereo(i)), "sample_rate": np.int64(11025), "captions": ("one", "two"),
                   "label": "a class"},
        lambda i: {"audio": {"array": stereo(i), "sampling_rate": 11025, "path": None}, "caption_1": "one",
                   "caption_2": "two", "label": "a class"},
    ):  # fmt: skip
        rows = hearing(own(item))
        sample = rows.samples.load(5, 1, True)
        assert (sample["all_captions"], sample["labels"]) == (["one", "two"], "a class")
        assert torch.equal(sample["waveforms"], files.load(5, 1, True))
        assert torch.equal(rows.load(5), files.load(5)) and not torch.equal(rows.load(5), rows.load(4))
    mono = hearing(own((waves(2, 100), 8000, "short"))).load(2)
    assert mono.shape == (1600,) and torch.equal(mono[:100], mono[100:200]), "it is repeated"


@pytest.mark.parametrize("item", [
    (waves(0), 8000), (waves(0), 3, "a"), (waves(0).astype(int), 8000, "a"), (waves(0), 8000, 5),
    (waves(0)[:, None].repeat(2, 1), 8000, "a"), {"waveform": waves(0), "caption": "a"},
])  # fmt: skip
def test_an_item_that_is_no_captioned_sound_is_named(item):
    rows = hearing(own(item))
    said = one_line(rows.load, 2)
    assert said.startswith(f"--dataset: {rows.describe(2)} is ") or said == "it has no caption"


# Videos.


def seeing(spec: Any, **options: Any) -> OfOne:
    return OfOne(open_videos(spec, **{"image_size": 8, "num_frames": 3, "seed": 1, **options}), "videos")


def test_a_folder_holds_videos_of_every_kind_and_images(tmp_path):
    codecs = {"avi": "ffv1", "webm": "libvpx-vp9"}
    for first, ending in enumerate(["avi", "m4v", "mkv", "mov", "mp4", "webm"]):
        pictures = [picture(10 * first + frame) for frame in range(4)]
        write_video(tmp_path / f"{ending}.{ending}", 4, codec=codecs.get(ending, "libx264"), pictures=pictures)
    frames = [Image.fromarray(picture(60 + frame)) for frame in range(4)]
    (tmp_path / "x.gif").write_bytes(gif(frames))
    frames[0].save(tmp_path / "x.png")
    videos = seeing(str(tmp_path), image_size=SIDE)
    assert len(videos) == 8 and len(seeing(str(tmp_path), short_clips="skip")) == 7
    for index in range(7):
        clip = videos.load(index)
        first = numbers(clip)[0]
        assert first in (10 * index, 10 * index + 1) and numbers(clip) == [first, first + 1, first + 2]
    assert numbers(videos.load(7)) == [60] * 3 and len(seeing(str(tmp_path), short_clips="skip", num_frames=1)) == 8


def test_an_image_in_a_tar_is_a_video_of_one_frame_where_no_video_has_its_name(tmp_path):
    tar = str(write_tar(tmp_path / "0.tar", {"0/a": {**video(0), **image(0)}, "0/b": image(1)}))
    videos = seeing(tar)
    assert [videos.name(i) for i in range(len(videos))] == ["0/a.gif", "0/b.png"]
    assert len(seeing(tar, short_clips="skip")) == 1


def numbered(n: int) -> torch.Tensor:
    """Frame k is grey of the value k."""
    return torch.arange(n, dtype=torch.uint8)[:, None, None, None].expand(n, 3, 10, 12)


def frames_of(item: Any, *which: Any, **options: Any) -> list[int]:
    """The values of the frames of a clip of an item."""
    clip = seeing(own(item), **options).load(0, *which)
    assert clip.shape == (3, 3, 8, 8)
    return clip[0, :, 0, 0].tolist()


def test_clips_are_cut_out_of_items():
    assert frames_of(numbered(20)) == [8, 9, 10]
    starts = {tuple(frames_of(numbered(20), epoch, True)) for epoch in range(60)}
    assert all(b == a + 1 and c == a + 2 for a, b, c in starts) and len(starts) > 12
    assert frames_of({"video": numbered(20)}, frame_stride=4) == [5, 9, 13]
    assert frames_of((numbered(20).float() / 255, "a label")) == [8, 9, 10]
    assert frames_of({"video": numbered(21), "fps": 10.0}, fps=5.0) == [8, 10, 12]
    assert frames_of({"video": numbered(21), "fps": 10}, fps=20.0) == [9, 10, 10]


def test_an_item_that_is_no_video_is_named():
    for item in ("x", planar(0), numbered(3).permute(0, 2, 3, 1), numbered(0), numbered(3).long()):
        clips = seeing(own(item))
        assert one_line(clips.load, 2).startswith(f"--dataset: {clips.describe(2)} is ")
    for item in (numbered(3), (numbered(1), "a label", 24.0), (numbered(1), 25, 30), [numbered(2), 0, 0, 25.0]):
        assert 'and its "fps"' in one_line(seeing(own(item), fps=5.0).load, 2)


def test_short_videos_are_left_out_silently_and_damaged_ones_counted(tmp_path):
    feed: Callable[..., Any] = lambda **flags: VIDEOS.feed(  # noqa: E731
        valid_fraction=0, short_clips="skip", video_folder=tmp_path, **flags
    )
    for i in range(24):
        write_video(tmp_path / f"{i:02d}.mp4", 2 if i % 3 == 0 else 4)
    (tmp_path / "05.mp4").write_text("no video")
    one, said = feed(), list[str]()
    assert all(index % 3 and index != 5 for index in ids(training(one, 3)))
    one.report_bad_samples(said.append)
    assert len(said) == 1 and "05.mp4" in said[0]
    (tmp_path / "05.mp4").unlink()
    assert len(feed(on_bad_sample="error").start(0)["ids"]) == BATCH, "leaving out is no error"
    for i in range(24):
        (tmp_path / f"{i:02d}.mp4").unlink(missing_ok=True)
    for i in range(8):
        write_video(tmp_path / f"{i}.mkv", 1)
    assert "it has 1 frame for a clip of 3" in one_line(feed().start, 0)
