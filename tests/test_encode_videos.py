"""encode.py of videos: the codes are those of the whole clips, and the videos are the codes'. What all scripts that
fill folders do is in test_filled_folders.py."""

# ruff: noqa: F811  (fixtures are imported)
from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import av
import filling
import numpy as np
import pytest
import torch
from filling import SIZE, TOKENIZE_VIDEOS, VIDEOS, index, stamps, video_tokenizer
from filling_fixtures import model, on_one_cpu, source  # noqa: F401
from filling_fixtures import whole as codes  # noqa: F401
from PIL import Image
from torch import Tensor

from tandem.data.decoding.videos import ClipDecoder
from tandem.data.feed import to_unit_range
from tandem.data.sources.demo.source import DemoSource
from tandem.data.sources.record import FileRef
from tandem.models import VideoTokenizer
from tests.data.decoding.films import write_video, write_widths
from tests.scripts import files, lines
from tests.training.disk import left_by_kills

FILMS = [name for name, frames in VIDEOS.items() if frames > 1]


@pytest.fixture(scope="module")
def script() -> filling.Script:
    return TOKENIZE_VIDEOS


def clip(path: Path, frames: int, **speed: Any) -> Tensor:
    """A whole file (1, 3, f, h, w) in [0, 1]; its last frame is held until the frames fill the codes of 1 + 2 n."""
    n = frames + (1 - frames) % 2
    decoder = ClipDecoder(SIZE, n + 2, short_clips="hold", **speed)  # longer than the file, so from its beginning
    return to_unit_range(decoder.load(FileRef(str(path)), 0))[None, :, :n]


def decode(model: Path, codes: Path, output: Path, *more: str) -> Path:
    TOKENIZE_VIDEOS.main([*map(str, TOKENIZE_VIDEOS.use(model, codes, output)), *more])
    return output


def pixels(codes: np.ndarray, frames: int) -> np.ndarray:
    """The frames (f, h, w, 3) that the model decodes from the codes of a video, at once."""
    videos = video_tokenizer().decode(torch.from_numpy(codes.astype(np.int64))[None])[0, :, :frames]
    return (videos.clamp(0, 1) * 255).round().byte().permute(1, 2, 3, 0).numpy()


def shown(path: Path) -> tuple[list[float], np.ndarray]:
    """The times of the frames of a video in seconds, counted from the first, and the frames (f, h, w, 3)."""
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
    return [f.time - frames[0].time for f in frames], np.stack([f.to_ndarray(format="rgb24") for f in frames])


# Encoding.


def test_codes_are_those_of_the_whole_clips(codes, source):
    found = TOKENIZE_VIDEOS.rows(codes)
    assert list(found) == list(VIDEOS)
    for name, frames in VIDEOS.items():
        expected = video_tokenizer().encode(clip(source / name, frames))[0].numpy()
        assert found[name].dtype == np.uint16 and len(np.unique(expected)) > 8
        np.testing.assert_array_equal(found[name], expected, name)
    assert (index(codes)["coded_videos"], index(codes)["videos"], index(codes)["num_codes"]) == (9, 9, 512)


@pytest.mark.parametrize(("flag", "speed", "frames", "fps"), [
    ("--fps", {"fps": 10.0}, 8, 10.0), ("--frame_stride", {"frame_stride": 3}, 7, 8.333333),
])  # fmt: skip
def test_frames_are_taken_by_rate_or_stride(flag, speed, frames, fps, model, source, tmp_path):
    folder = TOKENIZE_VIDEOS.fill(model, source, tmp_path / "codes", flag, *speed.values())
    line = lines(folder / "index.jsonl")[6]
    assert (line["path"], line["frames"], line["fps"]) == ("e.mp4", frames, fps)  # of 20 frames in 0.8 s
    expected = video_tokenizer().encode(clip(source / "e.mp4", frames, **speed))[0].numpy()
    np.testing.assert_array_equal(TOKENIZE_VIDEOS.rows(folder)["e.mp4"], expected)
    assert lines(folder / "index.jsonl")[5]["frames"] == 1


def test_parts_of_one_file_in_a_manifest_are_videos_of_their_own(model, source, tmp_path):
    manifest = tmp_path / "parts.csv"
    shutil.copy(source / "e.mp4", tmp_path)
    manifest.write_text("path,start_seconds,end_seconds\ne.mp4,0,0.2\ne.mp4,0.2,\n")
    folder = TOKENIZE_VIDEOS.fill(model, manifest, tmp_path / "codes")
    assert [line["frames"] for line in lines(folder / "index.jsonl")] == [5, 15]
    videos = decode(model, folder, tmp_path / "videos")
    assert sorted(files(videos)) == ["e.mp4-0.mp4", "e.mp4-1.mp4", "settings.json"]


# Width and height of films whose codes have 4 x 4 pixels, and what of them is encoded: left, top, width and height.
SHAPES = {
    "square.mkv": ((16, 16), (0, 0, 16, 16)), "still.png": ((49, 16), (0, 0, 48, 16)),
    "tall.mkv": ((16, 39), (0, 1, 16, 36)), "wide.mkv": ((32, 16), (0, 0, 32, 16)),
}  # fmt: skip


@pytest.fixture(scope="module")
def shapes(model, tmp_path_factory) -> tuple[dict[str, np.ndarray], Path]:
    """The parts (f, h, w, 3) of films without loss that are encoded, and the folder of codes of all of them."""
    folder = tmp_path_factory.mktemp("shapes")
    (folder / "films").mkdir()
    parts = {}
    for seed, (name, ((width, height), (left, top, across, down))) in enumerate(SHAPES.items()):
        n, noise = 1 if name == "still.png" else 4 + seed, np.random.default_rng(seed)
        frames = noise.integers(0, 256, (n, height, width, 3), np.uint8)
        if n == 1:
            frames[:, :, -1] = frames[:, :, -2]  # what is left out of an image is half a column on either side
            Image.fromarray(frames[0]).save(folder / "films" / name)
        else:
            write_video(folder / "films" / name, n, pictures=frames, codec="ffv1", pix_fmt="bgr0")
        parts[name] = frames[:, top : top + down, left : left + across]
    return parts, TOKENIZE_VIDEOS.fill(model, folder / "films", folder / "codes", "--keep_aspect", "--report")


def test_films_that_keep_their_shape_are_encoded_whole_but_for_what_fills_no_code(shapes):
    parts, folder = shapes
    found = TOKENIZE_VIDEOS.rows(folder)
    assert list(found) == list(SHAPES) and index(folder)["grid"] == []
    assert [line["grid"] for line in lines(folder / "index.jsonl")] == [[4, 4], [4, 12], [9, 4], [4, 8]]
    for name, part in parts.items():
        if name == "still.png":
            continue
        held = np.concatenate([part, part[-1:]][: 2 - len(part) % 2])  # 1 + 2 n frames
        videos = to_unit_range(torch.from_numpy(held).permute(3, 0, 1, 2))[None]
        np.testing.assert_array_equal(found[name], video_tokenizer().encode(videos)[0].numpy(), name)


def test_films_are_decoded_in_their_own_shape(shapes, model, tmp_path):
    parts, folder = shapes
    codes = TOKENIZE_VIDEOS.rows(folder)
    pngs, gifs, films = (decode(model, folder, tmp_path / form, "--format", form) for form in ("png", "gif", "mp4"))
    for name, part in parts.items():
        exact = pixels(codes[name], len(part))
        assert exact.shape == part.shape
        if name == "still.png":
            np.testing.assert_array_equal(np.asarray(Image.open(pngs / name)), exact[0])
            continue
        stem = Path(name).stem
        for number, frame in enumerate(exact):
            np.testing.assert_array_equal(np.asarray(Image.open(pngs / f"{stem}.frames/{number:06d}.png")), frame)
        assert Image.open(gifs / f"{stem}.gif").size == part.shape[2:0:-1]
        frames = shown(films / f"{stem}.mp4")[1]
        assert frames.shape == exact.shape and np.abs(frames.astype(int) - exact).mean() < 4


def test_a_film_whose_shape_changes_is_left_out(model, tmp_path):
    (films := tmp_path / "films").mkdir()
    filling.write_film(films / "longest.mkv", 0, 3, 16, 64)
    write_widths(films / "two_shapes.avi", 32, 32, 24, 32)
    folder = TOKENIZE_VIDEOS.fill(model, films, tmp_path / "codes", "--keep_aspect")
    assert [line["grid"] for line in lines(folder / "index.jsonl")] == [[4, 16]]
    (bad,) = TOKENIZE_VIDEOS.bad(folder)
    assert bad["path"] == "two_shapes.avi" and "frame 2 would be 24 x 16 pixels" in bad["reason"]
    squares = TOKENIZE_VIDEOS.fill(model, films, tmp_path / "squares")
    assert [line["frames"] for line in lines(squares / "index.jsonl")] == [3, 4]


def test_what_the_largest_shape_takes_is_asked_for(shapes, model, tmp_path, monkeypatch, capsys):
    """Of the memory that a machine has; it does not grow with the length of a film."""
    folder, room = shapes[1], "tandem.models.building._memory_bytes"
    monkeypatch.setattr(room, lambda: 16 * 3 * 16 * 64 * 4 - 1)
    flags = TOKENIZE_VIDEOS.flags(model, folder.parent / "films", tmp_path / "codes")
    assert "a piece of a video of 64 x 16 pixels: " in TOKENIZE_VIDEOS.refused(capsys, *flags, "--keep_aspect")
    TOKENIZE_VIDEOS.main(flags)
    monkeypatch.setattr(room, lambda: 8 * 3 * 16 * 36 * 4 - 1)
    use = TOKENIZE_VIDEOS.use(model, folder, tmp_path / "videos")
    assert "8 frames of 16 x 36 pixels: " in TOKENIZE_VIDEOS.refused(capsys, *use)


def test_a_long_film_is_never_in_memory(model, tmp_path, monkeypatch):
    (tmp_path / "films").mkdir()
    write_video(tmp_path / "films" / "long.mp4", 300, pictures=np.zeros((300, 16, 16, 3), np.uint8))
    read, given, waiting = [0], [0], [0]
    frames, encode_next = ClipDecoder.frames, VideoTokenizer.encode_next

    def counted(self: Any, source: FileRef, *shape: Any) -> Any:
        for frame in frames(self, source, *shape):
            read[0] += 1
            yield frame

    def encode(self: Any, videos: Tensor, state: Any) -> Tensor:
        waiting.append(read[0] - given[0])
        given[0] += videos.shape[2]
        return encode_next(self, videos, state)

    monkeypatch.setattr(ClipDecoder, "frames", counted)
    monkeypatch.setattr(VideoTokenizer, "encode_next", encode)
    TOKENIZE_VIDEOS.fill(model, tmp_path / "films", tmp_path / "codes")
    assert read[0] == 300 and given[0] == 301 and max(waiting) <= 2 * 16 + 1


def test_the_demonstration_needs_no_pyav(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    folder = TOKENIZE_VIDEOS.fill(model, "demo:moving:2", tmp_path / "codes")
    assert [(line["path"], line["frames"], line["fps"]) for line in lines(folder / "index.jsonl")] == [
        (f"demo:moving[{i}]", 41, 24.0) for i in range(2)
    ]
    scene = DemoSource("moving", 2).record(1)["clip"](SIZE, 41)
    expected = video_tokenizer().encode(to_unit_range(scene)[None])[0].numpy()
    np.testing.assert_array_equal(TOKENIZE_VIDEOS.rows(folder)["demo:moving[1]"], expected)
    assert len(files(decode(model, folder, tmp_path / "gifs", "--format", "gif"))) == 2 + 1


# Decoding.


def test_pngs_are_the_reconstructions_to_8_bits_and_decoding_goes_on_with_what_is_missing(codes, model, tmp_path):
    folder = decode(model, codes, tmp_path / "videos", "--format", "png", "--num_workers", "3")
    n_files = 0
    for name, rows in TOKENIZE_VIDEOS.rows(codes).items():
        frames = VIDEOS[name]
        place = (folder / name).with_suffix(".png" if frames == 1 else ".frames")
        paths = [place] if frames == 1 else [place / f"{number:06d}.png" for number in range(frames)]
        found = np.stack([np.asarray(Image.open(path)) for path in paths])
        np.testing.assert_array_equal(found, pixels(rows, frames), name)
        assert len(np.unique(found)) > 20
        n_files += frames
    expected, before, damaged = files(folder), stamps(folder, "**/*.*"), "e.frames/000007.png"
    assert len(expected) == n_files + 1
    (folder / damaged).unlink()
    (folder / "d.png").write_bytes(expected["d.png"][:-5])
    decode(model, codes, folder, "--format", "png")
    after = stamps(folder, "**/*.*")
    assert files(folder) == expected
    written = {name for name in before if before[name] != after[name]}
    assert {"d.png", "000007.png"} <= written <= {"settings.json", ".lock", "d.png", "000007.png", "e.frames"}


def test_videos_have_the_frames_of_the_codes_at_the_times_of_the_originals(codes, model, source, tmp_path):
    folder = decode(model, codes, tmp_path / "videos")
    outputs = {name: Path(name).with_suffix(".mp4" if name in FILMS else ".png") for name in VIDEOS}
    assert sorted(files(folder)) == sorted([*map(str, outputs.values()), "settings.json"])
    for name in FILMS:
        (times, _), (found, frames) = shown(source / name), shown(folder / outputs[name])
        assert found == pytest.approx(times, abs=1e-6), name
        exact = pixels(TOKENIZE_VIDEOS.rows(codes)[name], VIDEOS[name])
        assert frames.shape == exact.shape and np.abs(frames.astype(int) - exact).mean() < 4  # H.264 of little loss


def test_a_film_is_written_whole_or_not_at_all(codes, model, tmp_path):
    whole = files(decode(model, codes, tmp_path / "whole"))
    (tmp_path / "videos").mkdir()
    lengths = set()
    for left in left_by_kills(tmp_path / "videos", lambda: decode(model, codes, tmp_path / "videos")):
        partly = {name: content for name, content in files(left).items() if not name.endswith(".tmp")}
        assert partly.items() <= whole.items()
        assert len(partly) in lengths or files(decode(model, codes, left)) == whole
        lengths.add(len(partly))
    assert len(lengths) == 1 + len(whole)


# Mistakes.


def test_without_pyav_folders_and_mp4s_are_refused_in_one_line(codes, model, source, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "av", None)
    for flags in (
        TOKENIZE_VIDEOS.flags(model, source, tmp_path / "codes"), TOKENIZE_VIDEOS.use(model, codes, tmp_path / "videos")
    ):  # fmt: skip
        assert "(PyAV)" in TOKENIZE_VIDEOS.refused(capsys, *flags)
    assert len(files(decode(model, codes, tmp_path / "videos", "--format", "png"))) == sum(VIDEOS.values()) + 1
    assert json.loads((tmp_path / "videos" / "settings.json").read_text())["format"] == "png"


def write_click(path: Path, seconds: float, click: float, rate: int = 8000, codec: str = "aac") -> None:
    """A film of noise with silence, but for a click at a time."""
    noise = np.random.default_rng(0)
    heard = np.zeros((1, round(seconds * rate)), np.float32)
    heard[0, round(click * rate) : round(click * rate) + 200] = 0.9
    with av.open(str(path), "w") as container:
        picture, track = container.add_stream("libx264", rate=25), container.add_stream(codec, rate=rate)
        picture.width, picture.height, picture.pix_fmt, track.layout = 32, 32, "yuv420p", "mono"
        for _ in range(round(25 * seconds)):
            pixels = noise.integers(0, 256, (32, 32, 3), np.uint8)
            container.mux(picture.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        frame = av.AudioFrame.from_ndarray(heard, format="fltp", layout="mono")
        frame.sample_rate, frame.pts = rate, 0
        container.mux(track.encode(frame))
        for stream in (picture, track):
            container.mux(stream.encode())


def clicks(path: Path) -> list[float]:
    """When the loudest sample of a film is heard, in seconds from its first picture; none without sound."""
    with av.open(str(path)) as container:
        first = next(container.decode(video=0)).time
    with av.open(str(path)) as container:
        heard = (
            [(frame.time, frame.rate, abs(frame.to_ndarray()).max(axis=0)) for frame in container.decode(audio=0)]
            if container.streams.audio
            else []
        )
    loudest = max(heard, key=lambda part: part[2].max(), default=None)
    return [] if loudest is None else [loudest[0] + loudest[2].argmax() / loudest[1] - first]


def test_a_film_whose_sound_cannot_be_read_or_written_is_written_without_it_until_it_can(
    model, source, tmp_path, capsys
):
    films = tmp_path / "films"
    films.mkdir()
    write_click(films / "damaged.mp4", 2.0, 0.4)
    write_click(films / "fast.mkv", 2.0, 0.4, 192000, "pcm_f32le")
    write_click(films / "good.mp4", 2.0, 0.4)
    shutil.copy(source / "e.mp4", films / "silent.mp4")
    whole = (films / "damaged.mp4").read_bytes()
    with av.open(str(films / "damaged.mp4")) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux(audio=0) if packet.size]
    content = bytearray((films / "damaged.mp4").read_bytes())
    for position, size in packets[8:]:
        content[position : position + size] = b"\xff" * size
    (films / "damaged.mp4").write_bytes(content)
    folder = TOKENIZE_VIDEOS.fill(model, films, tmp_path / "codes", "--fps", "10")
    capsys.readouterr()
    videos = decode(model, folder, tmp_path / "videos", "--sound_from", str(films))
    damaged, fast = capsys.readouterr().err.splitlines()
    assert f"cannot read the sound of {films / 'damaged.mp4'}: " in damaged and "192000 samples" in fast
    assert {path.name: len(clicks(path)) for path in videos.glob("*.mp4")} == {
        "damaged.mp4": 0, "fast.mp4": 0, "good.mp4": 1, "silent.mp4": 0,
    }  # fmt: skip
    silent = decode(model, folder, tmp_path / "silent")
    assert (videos / "damaged.mp4").read_bytes() == (silent / "damaged.mp4").read_bytes()
    (films / "damaged.mp4").write_bytes(whole)
    before = stamps(videos, "*.mp4")
    decode(model, folder, videos, "--sound_from", str(films))
    assert len(clicks(videos / "damaged.mp4")) == 1 and "damaged" not in capsys.readouterr().err
    assert {name for name, stamp in stamps(videos, "*.mp4").items() if before[name] != stamp} == {"damaged.mp4"}


def test_decoded_films_get_their_sound_again_at_its_time(model, source, tmp_path, capsys):
    films = tmp_path / "films"
    films.mkdir()
    for name, click in (("a.mp4", 0.4), ("b.mp4", 1.6)):
        write_click(films / name, 2.0, click)
    shutil.copy(source / "e.mp4", films / "silent.mp4")
    folder = TOKENIZE_VIDEOS.fill(model, films, tmp_path / "codes", "--fps", "10")
    videos = decode(model, folder, tmp_path / "videos", "--sound_from", str(films))
    assert {name: clicks(videos / name) for name in ("a.mp4", "b.mp4", "silent.mp4")} == {
        "a.mp4": [pytest.approx(0.4, abs=0.05)], "b.mp4": [pytest.approx(1.6, abs=0.05)], "silent.mp4": [],
    }  # fmt: skip
    assert clicks(decode(model, folder, tmp_path / "mute") / "a.mp4") == []
    use = TOKENIZE_VIDEOS.use(model, folder, tmp_path / "more")
    for more, said in ((["--format", "gif"], "--sound_from has no effect"), ([], "nowhere/a.mp4")):
        assert said in TOKENIZE_VIDEOS.refused(capsys, *use, "--sound_from", tmp_path / "nowhere", *more)
