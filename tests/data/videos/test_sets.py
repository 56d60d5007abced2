"""Sets of videos: folders, manifests and tars of them, and what is no such set."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import webdataset
from PIL import Image

from data import open_sounds, open_videos
from data.bad_samples import Unsuitable
from tests.data.helpers import one_line
from tests.data.videos.files import SIDE, numbers, picture, write_video


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def opened(spec: Path | str, **changed):
    return open_videos(str(spec), **{"image_size": SIDE, "num_frames": 3, **changed})


def write_folder(folder: Path) -> Path:
    """Videos of every kind and an image, whose first frames state 10, 20, ..., in the order of their names."""
    (folder / "b" / "c").mkdir(parents=True)
    codecs = {".avi": "ffv1", ".webm": "libvpx-vp9"}
    for i, name in enumerate(["a.MP4", "b/1.avi", "b/2.mkv", "b/c/3.mov", "b/c/4.webm", "d.m4v"]):
        pictures = [picture(10 * i + j) for j in range(4)]
        path = folder / name
        write_video(
            path.with_suffix(path.suffix.lower()), 4, codec=codecs.get(path.suffix, "libx264"), pictures=pictures
        )
        path.with_suffix(path.suffix.lower()).rename(path)
    frames = [Image.fromarray(picture(60 + j)) for j in range(4)]
    frames[0].save(folder / "e.gif", save_all=True, append_images=frames[1:], duration=40)
    Image.fromarray(picture(70)).save(folder / "f.png")
    (folder / "notes.txt").write_text("no video")
    (folder / ".hidden.mp4").touch()
    return folder


def test_a_folder_holds_videos_of_every_kind_and_images(tmp_path):
    videos = opened(write_folder(tmp_path))
    names = ["a.MP4", "b/1.avi", "b/2.mkv", "b/c/3.mov", "b/c/4.webm", "d.m4v", "e.gif", "f.png"]
    assert [videos.name(i) for i in range(len(videos))] == names
    assert [videos.describe(i) for i in range(len(videos))] == [str(tmp_path / name) for name in names]
    for i in range(7):
        clip = videos.load(i)
        assert clip.shape == (3, 3, SIDE, SIDE) and clip.dtype == torch.uint8
        first = numbers(clip)[0]
        assert first in (10 * i, 10 * i + 1) and numbers(clip) == [first, first + 1, first + 2]
    assert numbers(videos.load(7)) == [70, 70, 70]
    assert (
        len(opened(tmp_path, short_clips="skip")) == 7 and len(opened(tmp_path, short_clips="skip", num_frames=1)) == 8
    )


def test_a_clip_is_mirrored_as_a_whole(tmp_path):
    write_video(tmp_path / "a.mp4", 3)
    plain = opened(tmp_path).load(0)
    clips = [opened(tmp_path, flip=True).load(0, epoch, True) for epoch in range(30)]
    mirrored = [torch.equal(clip, plain.flip(-1)) for clip in clips]
    assert all(is_mirrored or torch.equal(clip, plain) for clip, is_mirrored in zip(clips, mirrored, strict=True))
    assert 6 <= sum(mirrored) <= 24


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("set.csv", "path,start_seconds,end_seconds\nv/a.mp4,0.4,0.52\nv/a.mp4,1,1.12\nv/a.mp4,,0.12\n"),
        ("set.tsv", "start_seconds\tpath\tend_seconds\n0.4\tv/a.mp4\t0.52\n1\tv/a.mp4\t1.12\n\tv/a.mp4\t0.12\n"),
        ("set.jsonl", '{"path": "v/a.mp4", "start_seconds": 0.4, "end_seconds": 0.52}\n'
         '{"path": "v/a.mp4", "start_seconds": 1, "end_seconds": 1.12, "caption": "text"}\n'
         '{"path": "v/a.mp4", "end_seconds": 0.12}\n'),
    ],
)  # fmt: skip
def test_a_manifest_names_parts_of_files(name, rows, tmp_path):
    (tmp_path / "v").mkdir()
    write_video(tmp_path / "v" / "a.mp4", 40)
    (tmp_path / name).write_text(rows)
    videos = opened(tmp_path / name)
    assert [numbers(videos.load(i, 5, True)) for i in range(3)] == [[10, 11, 12], [25, 26, 27], [0, 1, 2]]
    assert (videos.name(0), videos.describe(0)) == ("v/a.mp4", str(tmp_path / "v" / "a.mp4"))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("file,caption\na.mp4,x\n", "the columns have to be path"),
        ("path,start_seconds,end_seconds\na.mp4,2,1\n", "not after its start"),
        ("path\na.mp4,b\n", 'paths with a comma stand in "double quotes"'),
    ],
)
def test_a_manifest_that_cannot_be_understood_is_named(rows, said, tmp_path):
    (tmp_path / "set.csv").write_text(rows)
    text = one_line(opened, tmp_path / "set.csv")
    assert said in text and str(tmp_path / "set.csv") in text


def test_videos_in_tars_are_those_of_files_and_sounds_beside_them_have_an_index_of_their_own(tmp_path):
    folder = write_folder(tmp_path / "videos")
    soundfile.write(tmp_path / "a.wav", np.random.default_rng(0).uniform(-0.5, 0.5, 8000), 8000)
    sound = (tmp_path / "a.wav").read_bytes()
    for shard, names in (("0", ["b/2.mkv", "a.MP4"]), ("1", ["e.gif"])):
        with webdataset.TarWriter(str(tmp_path / f"{shard}.tar"), encoder=False) as writer:
            for i, name in enumerate(names):
                content = {f"{Path(name).suffix[1:].lower()}": (folder / name).read_bytes()}
                thumbnail = (folder / "f.png").read_bytes()
                writer.write({"__key__": f"{shard}/{i}", "jpg": thumbnail, "txt": b"text", "wav": sound, **content})
    videos, files = opened(tmp_path / "{0..1}.tar"), opened(folder)
    assert len(videos) == 3
    for i, name in enumerate([2, 0, 6]):
        assert torch.equal(videos.load(i), files.load(name))
    assert videos.describe(0) == f"{tmp_path}/0.tar/0/0.mkv" and videos.name(2) == "1/0.gif"
    sounds = open_sounds(str(tmp_path / "{0..1}.tar"), sample_rate=8000, clip_seconds=0.5)
    assert len(sounds) == 3 and sounds.texts(2).captions == ["text"]
    assert len(opened(tmp_path / "{0..1}.tar")) == 3, "from the index"
    kept = {path.name for path in tmp_path.glob(".*.npz")}
    assert kept == {f".{i}.tar{kind}.index.npz" for i in (0, 1) for kind in ("", ".videos")}


def test_what_is_no_set_of_videos_is_named(tmp_path):
    assert "there is no folder" in one_line(opened, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    text = one_line(opened, tmp_path / "empty")
    assert text.startswith(f"no video in {str(tmp_path / 'empty')!r}, which holds 0 other files") and ".mkv" in text
    (tmp_path / "empty" / "a.txt").touch()
    assert "1 other file:" in one_line(opened, tmp_path / "empty")
    (tmp_path / "a.mp4").touch()
    assert "give a manifest" in one_line(opened, tmp_path / "a.mp4")
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        writer.write({"__key__": "0", "txt": "text"})
    assert "no video (.mp4" in one_line(opened, tmp_path / "a.tar")
    assert "exclude each other" in one_line(opened, "demo:moving", fps=8.0, frame_stride=2)
    assert "takes 206 GB" in one_line(opened, "demo:moving", num_frames=1 << 22, image_size=128)
    for number in ("0", "1000000000", "9" * 5000):
        assert "which is no number from 1 to 4194304" in one_line(opened, f"demo:moving:{number}")


def test_missing_package_says_how_to_install_it_and_the_demo_needs_none(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "a.mp4").touch()
    text = one_line(opened, tmp_path)
    assert "PyAV" in text and 'pip install "tandem-training[video]"' in text and 'pip install -e ".[video]"' in text
    assert opened("demo:moving").load(0).shape == (3, 3, SIDE, SIDE)


def test_a_clip_left_out_says_so(tmp_path):
    write_video(tmp_path / "a.mp4", 2)
    with pytest.raises(Unsuitable, match="it has 2 frames for a clip of 3"):
        opened(tmp_path, short_clips="skip").load(0)
