"""Sets of videos: folders, manifests and tars of them, and what is no such set."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

from data.sets import open_videos
from tests.data.decoding.films import SIDE, numbers, picture, write_video
from tests.data.helpers import OfOne, write_tar
from tests.data.sources import image, video


def opened(spec: Path | str, **changed):
    return OfOne(open_videos(str(spec), **{"image_size": SIDE, "num_frames": 3, **changed}), "videos")


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


def test_a_manifest_names_parts_of_files(tmp_path):
    (tmp_path / "v").mkdir()
    write_video(tmp_path / "v" / "a.mp4", 40)
    rows = "path,start_seconds,end_seconds\nv/a.mp4,0.4,0.52\nv/a.mp4,1,1.12\nv/a.mp4,,0.12\n"
    (tmp_path / "set.csv").write_text(rows)
    videos = opened(tmp_path / "set.csv")
    assert [numbers(videos.load(i, 5, True)) for i in range(3)] == [[10, 11, 12], [25, 26, 27], [0, 1, 2]]
    assert (videos.name(0), videos.describe(0)) == ("v/a.mp4", str(tmp_path / "v" / "a.mp4"))


def test_an_image_in_a_tar_is_a_video_of_one_frame_where_no_video_has_its_name(tmp_path):
    write_tar(tmp_path / "0.tar", {"0/a": {**video(0), **image(0)}, "0/b": image(1)})
    videos = opened(tmp_path / "0.tar")
    assert [videos.name(i) for i in range(len(videos))] == ["0/a.gif", "0/b.png"]
    assert len(opened(tmp_path / "0.tar", short_clips="skip")) == 1
