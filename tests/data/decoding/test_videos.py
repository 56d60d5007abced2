"""Clips of video files: exactly the frames that time stamps demand, upright, over white, and none read needlessly."""

from __future__ import annotations

import bisect
import io
import itertools
import math
import struct
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from tandem.data.bad_samples import SampleSkipped
from tandem.data.decoding.videos import ClipDecoder
from tandem.data.sources.files import FileWindow
from tandem.data.sources.record import FileRef, open_range
from tandem.sides import height_and_width
from tests.data.decoding.films import RATE, SIDE, TICKS, number_of, numbers, picture, write_video, write_widths
from tests.data.helpers import one_line
from tests.data.source_table import encoded

N = 60
REGULAR = [i * TICKS // RATE for i in range(N)]
UNEVEN = np.cumsum([0, *np.random.default_rng(0).integers(15, 140, N - 1)]).tolist()  # ms
FILES = {
    "ffv1.mkv": {"codec": "ffv1", "gop": 12},
    "gop1.mp4": {"gop": 1},
    "gop12.mp4": {"gop": 12},
    "b_frames.mp4": {"gop": 12, "b_frames": 3},
    "b_frames.mkv": {"gop": 250, "b_frames": 3, "audio": True},
    "open_gop.mp4": {"gop": 8, "b_frames": 3, "x264": "open-gop=1"},
    "uneven_b_frames.mkv": {"gop": 9, "b_frames": 3, "stamps": UNEVEN},
    "uneven.webm": {"codec": "libvpx-vp9", "stamps": UNEVEN},
    "late.mkv": {"gop": 12, "b_frames": 2, "stamps": [stamp + 3000 for stamp in UNEVEN]},
}
SPEEDS = [{}, {"frame_stride": 3}, {"fps": 29.97}]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("videos")
    return {name: write_video(folder / name, N, **options) for name, options in FILES.items()}


def expected(stamps: list[int], start: float, n: int, fps: float | None = None, frame_stride: int = 1) -> list[int]:
    """Numbers of the frames of a clip that begins at `start`, in ms."""
    shown = [bisect.bisect_right(stamps, start + i * TICKS / (fps or 1) + 0.5) - 1 for i in range(n)]
    return shown if fps else [shown[0] + i * frame_stride for i in range(n)]


@pytest.mark.parametrize("speed", SPEEDS, ids=str)
@pytest.mark.parametrize("name", FILES)
def test_a_clip_holds_exactly_the_frames_that_its_times_demand(name, speed, files):
    stamps = [stamp - FILES[name].get("stamps", REGULAR)[0] for stamp in FILES[name].get("stamps", REGULAR)]
    clips = ClipDecoder(SIDE, 5, **speed)
    last = len(stamps) - 4 * speed.get("frame_stride", 1) - 12
    for first in range(0, last, 11):
        for start in (stamps[first], (stamps[first] + stamps[first + 1]) // 2):
            demanded = expected(stamps, start, 5, **speed)
            # A part that has just room for one clip.
            end = stamps[demanded[-1]] + 1 if not speed.get("fps") else start + 4 * TICKS / speed["fps"] + 1
            source = FileRef(str(files[name]), start_seconds=start / TICKS, end_seconds=end / TICKS)
            assert numbers(clips.load(source, 0)) == demanded, (start, first)


@pytest.mark.parametrize("name", FILES)
def test_the_frames_of_a_file_are_read_one_after_the_other(name, files):
    stamps = FILES[name].get("stamps", REGULAR)
    assert [number_of(frame) for frame, _ in ClipDecoder(SIDE, 5).frames(FileRef(str(files[name])))] == list(range(N))
    slower = [number_of(frame) for frame, _ in ClipDecoder(SIDE, 5, fps=7.0).frames(FileRef(str(files[name])))]
    assert slower == expected([stamp - stamps[0] for stamp in stamps], 0, len(slower), 7.0)
    assert len(slower) == pytest.approx((stamps[-1] - stamps[0]) * 7 / TICKS, abs=2)
    rates = [rate for _, rate in ClipDecoder(SIDE, 5).frames(FileRef(str(files[name])))]
    mean = (N - 1) * TICKS / (stamps[-1] - stamps[0])
    assert rates[-1] == pytest.approx(RATE if "stamps" not in FILES[name] else mean, rel=1e-3)
    assert {rate for _, rate in ClipDecoder(SIDE, 5, fps=7.0).frames(FileRef(str(files[name])))} == {7.0}
    part = FileRef(
        str(files[name]), start_seconds=(stamps[7] - stamps[0]) / 1000, end_seconds=(stamps[11] - stamps[0]) / 1000
    )
    assert [number_of(frame) for frame, _ in ClipDecoder(SIDE, 5).frames(part)] == [7, 8, 9, 10]


def test_training_begins_anywhere_and_validation_in_the_middle(files):
    clips, source = ClipDecoder(SIDE, 5), FileRef(str(files["gop12.mp4"]))
    assert numbers(clips.load(source, 0)) == [28, 29, 30, 31, 32] == numbers(clips.load(source, 9, 9))
    starts = [numbers(clips.load(source, index, epoch, True))[0] for index in range(20) for epoch in range(10)]
    assert min(starts) <= 2 and max(starts) >= N - 5 - 2 and max(starts) <= N - 5
    assert len({*starts}) > 40  # of 56
    again = [numbers(ClipDecoder(SIDE, 5).load(source, 0, epoch, True))[0] for epoch in range(10)]
    assert (
        again == starts[:10] != [numbers(ClipDecoder(SIDE, 5, seed=1).load(source, 0, e, True))[0] for e in range(10)]
    )


def test_clips_may_begin_at_key_frames_only(files):
    clips = ClipDecoder(SIDE, 5, clip_starts="keyframe")
    for name in ("gop12.mp4", "b_frames.mp4"):
        found = [numbers(clips.load(FileRef(str(files[name])), i, 0, True)) for i in range(40)]
        assert all(clip == [*range(clip[0], clip[0] + 5)] for clip in found)
        assert {clip[0] for clip in found} == {0, 12, 24, 36, 48}
        assert numbers(clips.load(FileRef(str(files[name])), 0)) == [28, 29, 30, 31, 32]
        part = FileRef(str(files[name]), start_seconds=0.64, end_seconds=2)
        assert {numbers(clips.load(part, i, 0, True))[0] for i in range(40)} == {16, 24, 36}


class _Written(io.BytesIO):
    """A file that cannot be gone back in, so that the length of a video is not written into it."""

    def seekable(self) -> bool:
        return False


def test_a_file_without_a_length_is_measured(tmp_path):
    opening = {"format": "matroska", "options": {"live": "1"}}
    output = write_video(_Written(), N, codec="ffv1", opening=opening)
    path = tmp_path / "live.mkv"
    path.write_bytes(output.getvalue())
    with av.open(str(path)) as container:
        assert not container.duration and not container.streams.video[0].duration
    assert numbers(ClipDecoder(SIDE, 5).load(FileRef(str(path)), 0)) == [28, 29, 30, 31, 32]


def noise(n: int, side: int = SIDE):
    rng = np.random.default_rng(0)
    return (rng.integers(0, 255, (side, side, 3), np.uint8) for _ in range(n))


@pytest.mark.parametrize(("name", "b_frames"), [("b.mp4", 3), ("c.mkv", 0)])
def test_only_the_packets_that_a_clip_needs_are_read(name, b_frames, tmp_path, monkeypatch):
    path = write_video(tmp_path / name, 80, pictures=noise(80), b_frames=b_frames, audio=True)
    read: list[int] = []
    readinto = FileWindow.readinto
    monkeypatch.setattr(FileWindow, "readinto", lambda self, buffer: read.append(readinto(self, buffer)) or read[-1])
    with open_range(FileRef(str(path))) as file, av.open(file) as container:
        n_opening = sum(read)  # FFmpeg reads some packets of every stream to know what it is
        sizes = [packet.size for packet in container.demux(video=0) if packet.size]
    for first in (0, 11, 12, 70):
        read.clear()
        source = FileRef(str(path), start_seconds=first / RATE, end_seconds=(first + 4) / RATE + 0.001)
        ClipDecoder(SIDE, 5).load(source, 0)
        keyframe, last = first // 12 * 12, first + 4 + 2 * (b_frames > 0) + b_frames  # in the order of the packets
        n_needed = sum(sizes[keyframe : last + 1])
        assert sum(read) <= n_opening + n_needed + 3 * 32768, first  # FFmpeg reads 32 kB at a time


def with_matrix(mp4: bytes, a: int, b: int, c: int, d: int) -> bytes:
    """With another matrix in the header of its track: (x, y) is shown at (a x + c y, b x + d y)."""
    one, at = 1 << 16, mp4.index(b"tkhd") + 4
    at += 4 + (20 if mp4[at] == 0 else 32) + 16
    assert struct.unpack(">9i", mp4[at : at + 36]) == (one, 0, 0, 0, one, 0, 0, 0, 1 << 30)
    numbers = (a * one, b * one, 0, c * one, d * one, 0, 0, 0, 1 << 30)
    return mp4[:at] + struct.pack(">9i", *numbers) + mp4[at + 36 :]


@pytest.mark.parametrize("shape", [(64, 64), (64, 96), (96, 64)])
@pytest.mark.parametrize("a, b, c, d", [
    matrix for signs in itertools.product((1, -1), repeat=2) for matrix in ((signs[0], 0, 0, signs[1]), (0, *signs, 0))
])  # fmt: skip
def test_frames_are_turned_and_mirrored_as_their_matrix_says(a, b, c, d, shape, tmp_path):
    level = np.random.default_rng(0).integers(0, 256, (shape[0] // 32, shape[1] // 32))
    picture = np.kron(level, np.ones((32, 32))).astype(np.uint8)
    content = write_video(tmp_path / "a.mp4", 2, pictures=[picture] * 2).read_bytes()
    height, width = level.shape if a else level.shape[::-1]
    expected = np.zeros((height, width), int)
    for y, x in np.ndindex(*level.shape):
        expected[(b * x + d * y - (b + d < 0)) % height, (a * x + c * y - (a + c < 0)) % width] = level[y, x]
    expected = np.kron(expected, np.ones((32, 32), int))
    top, left = (side // 2 - 32 for side in expected.shape)
    film = FileRef.in_memory(with_matrix(content, a, b, c, d), "a.mp4")
    clip, whole = (ClipDecoder(sides, 2).load(film, 0) for sides in (64, expected.shape))
    assert (clip[:, 0].int() - torch.from_numpy(expected[top : top + 64, left : left + 64])).abs().max() <= 2
    assert (whole[:, 0].int() - torch.from_numpy(expected)).abs().max() <= 2


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
@pytest.mark.parametrize("speed", SPEEDS, ids=str)
def test_times_are_counted_from_where_the_file_begins_though_the_picture_begins_later(name, speed, tmp_path):
    late = 1500
    path = write_video(tmp_path / name, N, stamps=[late + stamp for stamp in REGULAR], audio=True)
    clips = ClipDecoder(SIDE, 5, **speed)
    for start in (1.5, 2.0, 2.5):
        shown = expected(REGULAR, 1000 * start - late, 5, **speed)
        end = start + 4 * (speed.get("frame_stride", 1) / speed.get("fps", RATE)) + 0.001
        assert numbers(clips.load(FileRef(str(path), start_seconds=start, end_seconds=end), 0)) == shown
    early = FileRef(str(path), start_seconds=0.5, end_seconds=1.55)
    assert number_of(next(iter(clips.frames(early)))[0]) == 0 == numbers(clips.load(early, 0))[0]
    assert len([*ClipDecoder(SIDE, 5).frames(FileRef(str(path), end_seconds=2.5))]) == 25
    none = FileRef(str(path), start_seconds=0.2, end_seconds=1.4)
    assert one_line(clips.load, none, 0) == "its picture begins at 1.5 s, and its clip ends at 1.4 s"


@pytest.mark.parametrize("width, height, sides", [
    (96, 64, 32), (33, 77, 64), (64, 64, 96), (96, 64, (24, 40)), (64, 96, (48, 80)),
])  # fmt: skip
def test_the_largest_part_of_the_shape_in_the_middle_is_resized(width, height, sides, tmp_path):
    ramp = np.add.outer(np.linspace(0, 100, height), np.linspace(0, 100, width)).round().astype(np.uint8)
    write_video(tmp_path / "a.mkv", 2, codec="ffv1", pictures=[ramp] * 2)
    Image.fromarray(ramp).save(tmp_path / "a.png")
    clip, image = (ClipDecoder(sides, 2).load(FileRef(str(tmp_path / name)), 0) for name in ("a.mkv", "a.png"))
    assert clip.shape == image.shape == (3, 2, *height_and_width(sides))
    # The ramp rises by at most 6 levels a pixel of the result; the two resize differently at the borders.
    assert (clip.int() - image.int()).abs().max() <= 7 and (clip.int() - image.int()).abs().float().mean() < 2


def test_pixels_that_are_not_square_are_stretched(tmp_path):
    path = write_video(tmp_path / "a.mp4", 2, pictures=[picture(999, 32, 64)] * 2, sample_aspect_ratio=2)
    assert numbers(ClipDecoder(SIDE, 2).load(FileRef(str(path)), 0)) == [999, 999]


def test_a_film_keeps_the_shape_in_which_it_is_shown(tmp_path):
    level = np.kron(np.random.default_rng(0).integers(0, 256, (2, 3)), np.ones((16, 16))).astype(np.uint8)
    film = write_video(tmp_path / "a.mp4", 2, pictures=[level] * 2).read_bytes()
    turned = with_matrix(film, 0, 1, -1, 0)  # a quarter, clockwise
    wide = write_video(tmp_path / "b.mp4", 2, pictures=[level] * 2, sample_aspect_ratio=2).read_bytes()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    Image.fromarray(level).save(tmp_path / "c.png", exif=exif)
    expected = {
        "a.mp4": (film, level), "turned.mp4": (turned, np.rot90(level, -1)), "b.mp4": (wide, level.repeat(2, axis=1)),
        "c.png": ((tmp_path / "c.png").read_bytes(), np.rot90(level, -1)),
    }  # fmt: skip
    for name, (content, shown) in expected.items():
        for frame, _ in ClipDecoder(32, 2).frames(FileRef.in_memory(content, name), 8):
            assert frame.shape[1:] == shown.shape, name
            error = (frame.int() - torch.from_numpy(shown.astype(np.int32))).abs()
            assert error.float().mean() < 2 and error[:, 4:12, 4:12].max() <= 2, name  # stretched edges are soft


def test_both_sides_are_cut_to_multiples_in_the_middle(tmp_path):
    ramp = np.add.outer(np.linspace(0, 100, 72), np.linspace(0, 150, 107)).round().astype(np.uint8)
    write_video(tmp_path / "a.mkv", 2, codec="ffv1", pictures=[ramp] * 2)
    Image.fromarray(ramp).save(tmp_path / "a.png")
    for path in (tmp_path / "a.mkv", tmp_path / "a.png"):
        for side, multiple, width in ((24, 8, 32), (24, 12, 36), (40, 20, 40), (72, 1, 107)):
            frame, _ = next(ClipDecoder(side, 2).frames(FileRef(str(path)), multiple))
            assert frame.shape == (3, side, width), (path.name, side)
            assert abs(frame.float().mean().item() - 125) < 2, (path.name, side)  # of the ramp and of its middle


def test_a_shape_that_is_too_long_or_changes_is_refused_in_one_line(tmp_path):
    for name, width, height in (("a.mkv", 66, 16), ("b.png", 16, 66), ("c.mkv", 64, 16)):
        picture = np.zeros((height, width), np.uint8)
        if name == "b.png":
            Image.fromarray(picture).save(tmp_path / name)
        else:
            write_video(tmp_path / name, 2, codec="ffv1", pictures=[picture] * 2)
    write_widths(tmp_path / "d.avi", 32, 24)

    def all_of(name: str) -> list[object]:
        return [*ClipDecoder(16, 2).frames(FileRef(str(tmp_path / name)), 4)]

    assert len(all_of("c.mkv")) == 2
    for name, said in (("a.mkv", "66 x 16 pixels"), ("b.png", "16 x 66 pixels"), ("d.avi", "frame 1 would be 24 x 16")):
        assert said in one_line(all_of, name)


def test_gifs_are_videos_with_white_behind_them(tmp_path):
    clear = [Image.new("RGBA", (SIDE, SIDE), (0, 0, 0, 0)) for _ in range(8)]
    for i, frame in enumerate(clear):
        frame.paste((200, 0, 0, 255), (4 * i, 16, 4 * i + 16, 48))
    for name, frames in (("a.gif", [Image.fromarray(picture(i)) for i in range(8)]), ("b.gif", clear)):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], duration=100, disposal=2)
    a, b = (FileRef(str(tmp_path / name)) for name in ("a.gif", "b.gif"))
    assert numbers(ClipDecoder(SIDE, 8).load(a, 0)) == [*range(8)]
    assert numbers(ClipDecoder(SIDE, 4, fps=5.0).load(a, 0)) == [1, 3, 5, 7]
    clip = ClipDecoder(SIDE, 8).load(b, 0)
    for i in range(8):
        wanted = torch.full((3, SIDE, SIDE), 255)
        wanted[:, 16:48, 4 * i : 4 * i + 16] = torch.tensor([200, 0, 0])[:, None, None]
        assert (clip[:, i].int() - wanted).abs().max() <= 1
    small = ClipDecoder(20, 8).load(b, 0)
    assert small[0].min() >= 199, "what a transparent pixel hides shows at an edge"


@pytest.mark.parametrize("name, is_opaque", [("a.avi", True), ("a.mov", False)])
def test_the_fourth_byte_of_uncompressed_avi_is_no_alpha(name, is_opaque, tmp_path):
    bitmap = np.zeros((SIDE, SIDE, 4), np.uint8)
    bitmap[..., :3] = 200, 60, 20
    path = write_video(tmp_path / name, 2, pictures=[bitmap] * 2, codec="rawvideo", pix_fmt="bgra")
    colour = torch.tensor([200, 60, 20] if is_opaque else [255] * 3).view(3, 1, 1, 1)
    assert (ClipDecoder(SIDE, 2).load(FileRef(str(path)), 0) == colour).all()


@pytest.mark.parametrize(
    ("short_clips", "shown"), [("repeat", [0, 1, 2, 0, 1, 2, 0]), ("hold", [0, 1, 2, 2, 2, 2, 2]), ("skip", None)]
)
def test_short_videos_and_images_are_repeated_held_or_left_out(short_clips, shown, tmp_path):
    clips = ClipDecoder(SIDE, 7, short_clips=short_clips)
    Image.fromarray(picture(5)).save(tmp_path / "b.png")
    video, image = FileRef(str(write_video(tmp_path / "a.mp4", 3))), FileRef(str(tmp_path / "b.png"))
    one = FileRef(str(write_video(tmp_path / "c.mkv", 1)))
    if shown is None:
        for source, said in ((video, "it has 3 frames for a clip of 7"), (image, "1 frame "), (one, "1 frame ")):
            assert said in one_line(clips.load, source, 0)
            with pytest.raises(SampleSkipped):
                clips.load(source, 0)
    else:
        assert numbers(clips.load(video, 0)) == numbers(clips.load(video, 3, 4, True)) == shown
        assert numbers(clips.load(image, 0)) == [5] * 7 and numbers(clips.load(one, 0)) == [0] * 7
    assert numbers(ClipDecoder(SIDE, 1, short_clips=short_clips).load(image, 0)) == [5]


def test_what_is_no_video_is_refused_in_one_line(tmp_path):
    whole, path = write_video(tmp_path / "whole.mp4", N, pictures=noise(N)), tmp_path / "a.mp4"
    for content in (
        b"", np.random.default_rng(0).bytes(9999), whole.read_bytes()[: whole.stat().st_size // 2],
        f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{whole}\n#EXT-X-ENDLIST\n".encode(),
        b"ffconcat version 1.0\nfile whole.mp4\n", encoded(Image.new("RGB", (32, 32)), "jpg"),
    ):  # fmt: skip
        path.write_bytes(content)
        text = one_line(ClipDecoder(SIDE, 5).load, FileRef(str(path)), 0)
        assert text.startswith("FFmpeg cannot read it: ") if content else text == "the file is empty"
    with pytest.raises(FileNotFoundError):
        ClipDecoder(SIDE, 5).load(FileRef(str(tmp_path / "none.mp4")), 0)


def test_a_video_that_breaks_off_is_refused_where_it_does(tmp_path):
    whole = write_video(
        tmp_path / "a.mp4", N, pictures=noise(N), opening={"options": {"movflags": "faststart"}}
    ).read_bytes()
    (tmp_path / "b.mp4").write_bytes(whole[: len(whole) // 2])
    clips = ClipDecoder(SIDE, 5)
    assert clips.load(FileRef(str(tmp_path / "b.mp4"), end_seconds=0.4), 0).shape == (3, 5, SIDE, SIDE)
    behind = FileRef(str(tmp_path / "b.mp4"), start_seconds=2, end_seconds=2.3)
    assert one_line(clips.load, behind, 0).startswith("it is cut off: its frames end after 1.")


def all_frames(content: bytes) -> tuple[list[torch.Tensor], str]:
    """The frames of a film, and the error behind them."""
    frames: list[torch.Tensor] = []
    try:
        frames.extend(frame for frame, _ in ClipDecoder(SIDE, 5).frames(FileRef.in_memory(content, "a.mp4")))
    except ValueError as error:
        return frames, str(error)
    return frames, ""


@pytest.mark.parametrize("options", [{}, {"b_frames": 3}, {"codec": "mpeg4"}, {"audio": True}], ids=str)
def test_a_recording_that_was_not_closed_ends_with_its_last_whole_frame(options, tmp_path):
    """A fragmented MP4 states no length, so that a camera that fails leaves a film."""
    opening = {"options": {"movflags": "frag_keyframe+empty_moov"}}
    content = write_video(tmp_path / "a.mp4", N, pictures=noise(N), opening=opening, **options).read_bytes()
    whole, error = all_frames(content)
    assert len(whole) == N and not error
    for size in (len(content) * 2 // 3, len(content) // 2):
        frames, error = all_frames(content[:size])
        assert not error and N / 4 < len(frames) < N
        places = [next(place for place, one in enumerate(whole) if torch.equal(one, frame)) for frame in frames]
        n_sure = len(places) - options.get("b_frames", 0)  # a frame may be there that was decoded before those missing
        assert places[:n_sure] == [*range(n_sure)] and sorted({*places}) == places
        cut = FileRef.in_memory(content[:size], "a.mp4")
        clips = [ClipDecoder(SIDE, 5).load(cut, index, augment=True) for index in range(20)]
        shown = [torch.stack(frames[first : first + 5], 1) for first in range(len(frames) - 4)]
        assert all(any(torch.equal(clip, each) for each in shown) for clip in clips)


@pytest.mark.parametrize("options", [{}, {"codec": "mpeg4"}, {"audio": True}, {"b_frames": 3, "audio": True}], ids=str)
def test_a_film_that_breaks_off_is_not_taken_for_a_shorter_one(options, tmp_path):
    opening = {"options": {"movflags": "faststart"}}
    content = write_video(tmp_path / "a.mp4", N, pictures=noise(N), opening=opening, **options).read_bytes()
    assert all_frames(content)[1] == ""
    for size in range(len(content) // 2, len(content) - 99, len(content) // 9):
        frames, error = all_frames(content[:size])
        assert error.startswith("it is cut off") and len(frames) < N


def test_a_recording_that_was_not_closed_is_read_as_far_as_it_goes(tmp_path):
    """It does not state its length."""
    content = write_video(tmp_path / "a.mkv", 20, codec="libx264", audio=True).read_bytes()
    whole, _ = all_frames(content)
    at = content.index(b"\x18\x53\x80\x67") + 4
    live = content[:at] + b"\x01" + b"\xff" * 7 + content[at + 8 :]
    for size in (len(live), len(live) * 3 // 4):
        frames, error = all_frames(live[:size])
        assert not error and 5 < len(frames) <= 20
        assert all(map(torch.equal, frames, whole))


@pytest.mark.parametrize("speed", [{}, {"fps": 10.0}], ids=str)
def test_a_part_that_ends_or_lies_behind_the_video_has_what_is_there(speed, files):
    clips = ClipDecoder(SIDE, 5, **speed)
    unbounded, beyond = (FileRef(str(files["gop12.mp4"]), end_seconds=end) for end in (math.inf, 1000.0))
    for epoch in range(4):
        drawn = [clips.load(source, 0, epoch, augment=True) for source in (unbounded, beyond)]
        assert torch.equal(*drawn)
    behind = FileRef(str(files["gop12.mp4"]), start_seconds=500, end_seconds=510)
    assert one_line(clips.load, behind, 0) == "it holds no frames"
