"""Decoding of a video file to a clip of a fixed number and shape of frames, reading no more of the file than it needs.

Only time stamps decide which frame is shown when; the number of frames and the frame rate in a header are used only to
choose where a clip begins. A clip costs the decoding of all frames from the last key frame before it (`ffmpeg -g 24`
writes one per second). High dynamic range is not tone-mapped: such videos look pale.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.data.bad_samples import SampleSkipped
from tandem.data.sources.record import FileRef, open_range
from tandem.hashing import Draws
from tandem.io.reading import LONGEST_BEGINNING, counted, error_text, wrong_kind_text
from tandem.sides import Sides

from .frames import Frame, FrameConverter, Picture
from .images import CENTER, ChooseBox, Crop, decode_image
from .images import ENDINGS as IMAGE_ENDINGS

ENDINGS = (".mp4", ".m4v", ".mkv", ".webm", ".mov", ".avi", ".gif")
# FFmpeg detects the format by content; others, such as playlists that name files or addresses, are refused.
_FORMATS = "mov,matroska,avi,gif"
_HALF_TICK = 0.5  # time stamps are rounded to ticks, and may differ by so much from the requested time
_DEFAULT_RATE = 25.0  # frames per second of a file that states none
_MAX_PIXEL_ASPECT = 8.0  # width over height or height over width; larger values are errors
_MAX_REORDERED = 16  # so many packets after a seek may lack a decoding time (dts)
_MICROSECONDS = 1_000_000  # FFmpeg's unit for the length of a whole file
_DURATION_TAG = re.compile(r"(\d+):(\d+):(\d+(?:\.\d+)?)$")


@dataclass(frozen=True)
class ClipDecoder:
    """Cuts clips of `num_frames` frames of one shape out of video files; in training `seed` places them.

    Args:
        image_size: Sides of a frame in pixels: the largest part of this shape in the middle of the video is resized.
        fps: Frames per second of a clip, or None to take every `frame_stride`-th frame of the file.
        short_clips: What to do with a video shorter than a clip: "repeat" it, "hold" its last frame, or "skip" it as
            `SampleSkipped`.
        clip_starts: Where clips begin in training: "anywhere", or at the last "keyframe" before a random time, which
            saves decoding the frames between, and makes clips after rare key frames likelier.
        crop: How all frames of a clip are cropped in training; else the centre crop.
    """

    image_size: Sides
    num_frames: int
    fps: float | None = None
    frame_stride: int = 1
    short_clips: str = "repeat"
    clip_starts: str = "anywhere"
    seed: int = 0
    crop: Crop = CENTER

    def load(self, ref: FileRef, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        """Video, or image as a video of one frame -> uint8 (3, num_frames, height, width), a clip between
        start_seconds and end_seconds of the video. With `augment`, (seed, epoch, index) determine its place; else it is
        the middle.

        Raises OSError if the file cannot be opened, and ValueError, in one line, if it cannot be decoded there.
        """
        choose_box = self.crop.box_chooser(epoch, index) if augment else None
        if ref.name.lower().endswith(IMAGE_ENDINGS):
            image = decode_image(ref, self.image_size, 3, choose_box=choose_box)
            frames = [image.permute(1, 2, 0).numpy()]
        else:
            at_keyframe = augment and self.clip_starts == "keyframe"
            fraction = Draws("clip", self.seed, epoch, index).uniform() if augment else 0.5
            with open_video(ref) as video:
                frames = self._decode_clip(video, ref, fraction, at_keyframe, choose_box)
        return self.to_clip(frames)

    def frames(self, ref: FileRef, multiple: int | None = None) -> Iterator[tuple[Tensor, float | None]]:
        """All frames of a video from its start_seconds to its end_seconds, one after the other, each uint8 (3,
        height, width), at the fps or frame_stride of clips. Each comes with a rate in frames per second, None for an
        image: `fps` if that is set; the rate in the headers over frame_stride, as long as all time stamps so far
        are within half a frame of it; else the mean rate so far. With `multiple`, (3, height, width) in the aspect
        ratio of the file, see `FrameConverter`. Raises what `load` raises."""
        if ref.name.lower().endswith(IMAGE_ENDINGS):
            yield decode_image(ref, self.image_size, 3, multiple=multiple), None
            return
        with open_video(ref) as video:
            begin, end = video.time_range(ref)
            step, first, is_steady, shape = self._ticks_per_step(video), math.nan, True, (0, 0, 0)
            for number, (time, picture) in enumerate(self._convert_frames(video, begin, end, multiple=multiple)):
                first, shape = (time, picture.shape) if number == 0 else (first, shape)
                if picture.shape != shape:
                    raise ValueError(
                        f"its shape changes: frame {number} would be {picture.shape[1]} x {picture.shape[0]} pixels "
                        f"large, those before {shape[1]} x {shape[0]}; without --keep_aspect all get one shape"
                    )
                elapsed = time - first
                is_steady = is_steady and abs(elapsed - number * step) < step / 2
                ticks = step if is_steady or elapsed <= 0 else elapsed / number
                fps = self.fps or video.ticks_per_second / ticks
                yield torch.from_numpy(np.ascontiguousarray(picture.transpose(2, 0, 1))), fps
            if end == math.inf:
                video.require_end()

    def _decode_clip(
        self, video: Video, ref: FileRef, fraction: float, at_keyframe: bool, choose_box: ChooseBox | None
    ) -> list[Picture]:
        """At most num_frames frames; fewer if the part of the video has no more."""
        begin, end = video.time_range(ref)
        step = self._ticks_per_step(video)
        slack = min(end, video.end) - begin - (self.num_frames - 1) * step
        start = begin + max(0.0, slack) * fraction
        if at_keyframe:
            start = max(begin, video.keyframe_before(start))
        for attempt in itertools.count(1):
            pictures = self._convert_frames(video, start, end, choose_box)
            frames = [picture for _, picture in itertools.islice(pictures, self.num_frames)]
            missing = self.num_frames - len(frames)
            if not missing or start <= begin:
                return frames
            # The video is shorter than its header states, or damaged: start earlier, before its last frame.
            start = max(begin, min(start, video.decoded_pts) - 2**attempt * missing * step)
        raise AssertionError

    def _ticks_per_step(self, video: Video) -> float:
        return video.ticks_per_second / self.fps if self.fps else video.ticks_per_frame * self.frame_stride

    def _convert_frames(
        self, video: Video, start: float, end: float, choose_box: ChooseBox | None = None,
        multiple: int | None = None,
    ) -> Iterator[tuple[float, Picture]]:  # fmt: skip
        """The frames from time `start` to before `end`, converted by `FrameConverter`, with their times, in ticks."""
        convert = FrameConverter(self.image_size, video.pixel_width, choose_box, video.is_opaque, multiple)
        if not self.fps:
            for number, frame in enumerate(video.frames_from(start)):
                if number and frame.pts >= end:
                    return
                if number % self.frame_stride == 0:
                    yield frame.pts, convert(frame)
            return
        step = self._ticks_per_step(video)
        times = (start + number * step for number in itertools.count())
        time, frames = next(times), video.frames_from(start)
        current = next(frames, None)
        while current is not None:
            next_frame = next(frames, None)
            end_time = next_frame.pts if next_frame else current.pts + (current.duration or video.ticks_per_frame)
            picture = None
            while time + _HALF_TICK < min(end_time, end):
                picture = convert(current) if picture is None else picture
                yield time, picture
                time = next(times)
            current = next_frame

    def to_clip(self, frames: list[Any]) -> Tensor:
        """At most num_frames frames (height, width, c) -> a clip (c, num_frames, height, width) of their type, by
        `short_clips`. Raises ValueError if there are none, and `SampleSkipped` if there are too few for "skip"."""
        n = len(frames)
        if n == 0:
            raise ValueError("it holds no frames")
        if n < self.num_frames and self.short_clips == "skip":
            raise SampleSkipped(f"it has {counted(n, 'frame')} for a clip of {self.num_frames} (--short_clips skip)")
        order = [i % n if self.short_clips == "repeat" else min(i, n - 1) for i in range(self.num_frames)]
        rows, columns, channels = frames[0].shape
        clip = np.empty((channels, self.num_frames, rows, columns), frames[0].dtype)
        for position, number in enumerate(order):
            clip[:, position] = frames[number].transpose(2, 0, 1)
        return torch.from_numpy(clip)


@contextlib.contextmanager
def open_video(ref: FileRef) -> Iterator[Video]:
    """An open video. Errors of FFmpeg inside the context become ValueErrors of one line."""
    import av

    with open_range(ref) as file:
        if not file.size:
            raise ValueError("the file is empty")
        try:
            # By a file object, because FFmpeg takes some names, such as `concat:a`, for protocols.
            options = {"format_whitelist": _FORMATS}
            with av.open(file, options=options, metadata_errors="replace") as container:
                yield Video(container)
        except av.FFmpegError as error:
            reason = f"FFmpeg cannot read it: {error_text(error)}"
            raise ValueError(wrong_kind_text(ref.read(LONGEST_BEGINNING)) or reason) from None


@contextlib.contextmanager
def open_sound_track(path: Path) -> Iterator[SoundTrack | None]:
    """The first sound track of a video file; None if it has none. Raises what `open_video` raises."""
    with open_video(FileRef(str(path))) as video:
        yield video.sound_track()


class SoundTrack(NamedTuple):
    """A sound track: samples per second, and its frames (av.AudioFrame), each with its start in seconds after the first
    picture."""

    rate: int
    frames: Iterator[tuple[float, Any]]


class Video:
    """The video stream of an open container: all times are in ticks of its time base."""

    def __init__(self, container: Any) -> None:
        import av

        # Cover art, a stream of one picture, is no video.
        cover = av.stream.Disposition.attached_pic
        streams = [stream for stream in container.streams.video if not stream.disposition & cover]
        if not streams:
            raise ValueError("it holds no video")
        self._container, self._stream = container, streams[0]
        codec = self._stream.codec_context
        if codec is None:
            raise ValueError("FFmpeg has no decoder for it")
        codec.thread_type, codec.thread_count = "NONE", 1  # the loader's workers are the threads
        # An uncompressed AVI consists of Windows bitmaps, whose alpha bytes are unused.
        self.is_opaque = codec.name == "rawvideo" and container.format.name == "avi"
        aspect = self._stream.sample_aspect_ratio  # of a pixel: width over height
        width = aspect.numerator / aspect.denominator if aspect else 1.0
        self.pixel_width = width if 1 / _MAX_PIXEL_ASPECT <= width <= _MAX_PIXEL_ASPECT else 1.0
        base, rate = self._stream.time_base, self._stream.average_rate or self._stream.guessed_rate
        self.ticks_per_second = base.denominator / base.numerator
        self.ticks_per_frame = self.ticks_per_second / (rate.numerator / rate.denominator if rate else _DEFAULT_RATE)
        self.start = float(self._stream.start_time or 0)
        # As in players, time 0 of a request is the start of the file, but not before its 0, where encoders write sound
        # that is not played. If the first picture begins less than a frame later, time 0 is that of the picture.
        begin = self.start if container.start_time is None else self._ticks(container.start_time)
        begin = max(begin, min(0.0, self.start))
        self._origin = begin if begin <= self.start - self.ticks_per_frame else self.start
        self.decoded_pts = self.decoded_end = self.start  # when the latest decoded frame begins and ends
        self._has_moved = False

    def sound_track(self) -> SoundTrack | None:
        """The first sound track that FFmpeg can decode, None if there is none. Its frames move the video's position."""
        stream = next((stream for stream in self._container.streams.audio if stream.codec_context), None)
        if stream is None:
            return None
        begin = self.start / self.ticks_per_second
        frames = ((frame.time - begin, frame) for frame in self._container.decode(stream) if frame.time is not None)
        return SoundTrack(stream.codec_context.sample_rate, frames)

    @property
    def end(self) -> float:
        """The end of the video by its headers; if they do not state it, all packets are read."""
        stream, container = self._stream, self._container
        if stream.duration:
            return self.start + stream.duration
        if tag := _DURATION_TAG.match(stream.metadata.get("DURATION", "")):  # Matroska's, counted from 0
            hours, minutes, seconds = map(float, tag.groups())
            return (3600 * hours + 60 * minutes + seconds) * self.ticks_per_second
        if container.duration:
            return self._ticks((container.start_time or 0) + container.duration)
        self._has_moved = True
        stamps = (packet.pts for packet in container.demux(stream) if packet.pts is not None)
        return max(stamps, default=self.start) + self.ticks_per_frame

    def _ticks(self, microseconds: int) -> float:
        return microseconds / _MICROSECONDS * self.ticks_per_second

    def time_range(self, ref: FileRef) -> tuple[float, float]:
        """The beginning and the end of the requested part, in ticks; inf: up to the end of the video. Raises
        ValueError, in one line, if the part ends before the first picture."""
        begin, end = (self._origin + time * self.ticks_per_second for time in (ref.start_seconds, ref.end_seconds))
        if end <= self.start:
            first = (self.start - self._origin) / self.ticks_per_second
            raise ValueError(f"its picture begins at {first:g} s, and its clip ends at {ref.end_seconds:g} s")
        return max(begin, self.start), end

    def require_end(self) -> None:
        """Raise ValueError, in one line, if the decoded frames of an MP4 file end before its stated end."""
        stated_end = self.start + (self._stream.duration or 0)
        is_stated = self._stream.frames and "mp4" in self._container.format.name
        if is_stated and self.decoded_end < stated_end - 2 * self.ticks_per_frame:
            raise self._cut_off_error(self.decoded_end)

    def _cut_off_error(self, end_time: float) -> ValueError:
        seconds, stated = ((time - self.start) / self.ticks_per_second for time in (end_time, self.end))
        ends = f"its frames end after {seconds:.3g} s, where its header states {stated:.3g} s"
        return ValueError(f"it is cut off: {ends}")

    def keyframe_before(self, time: float) -> float:
        """The time of the last key frame before `time`, by the index of the file."""
        self._seek(time)
        self._has_moved = True
        packet = next(self._container.demux(self._stream), None)
        return time if packet is None or packet.pts is None else float(packet.pts)

    def frames_from(self, time: float) -> Iterator[Frame]:
        """The frame that is shown at `time`, and all after it."""
        extra_ticks = 0.0
        while True:
            self._seek(time - extra_ticks)
            frames = self._decode_from(time)
            first = next(frames, None)
            if time - extra_ticks <= self.start or (first is not None and first.pts <= time + _HALF_TICK):
                break
            # Seek further back: the index is wrong, or frames precede a key frame.
            extra_ticks = max(2 * extra_ticks, self.ticks_per_second)
        if first is None:
            return
        current: Frame | None = None
        for frame in itertools.chain([first], frames):
            if frame.pts > time + _HALF_TICK:
                yield from [current, frame] if current else [frame]
                yield from frames
                return
            current = frame
        if current is not None and time <= current.pts + max(current.duration, self.ticks_per_frame) + _HALF_TICK:
            yield current  # the last frame; nothing is shown after its end

    def _seek(self, time: float) -> None:
        if time <= self.start and not self._has_moved:
            return
        import av

        try:
            self._container.seek(math.floor(max(time, self.start) + _HALF_TICK), stream=self._stream, backward=True)
        except av.FFmpegError:  # a file without an index: decode from its beginning
            if self._has_moved:
                raise
        self._has_moved = True

    def _decode_from(self, time: float) -> Iterator[Frame]:
        """Frames from the position of the last seek. Before the frame that is shown at `time`, only frames from which
        others are predicted are decoded."""
        packets = self._container.demux(self._stream)
        first_packets = []  # of all frames up to `time`: a frame is not shown before it is decoded
        for packet in packets:
            first_packets.append(packet)
            if len(first_packets) > _MAX_REORDERED if packet.dts is None else packet.dts > time + _HALF_TICK:
                break
        stamps = [packet.pts for packet in first_packets if packet.size]
        shown_pts = self.start
        if None not in stamps:
            shown_pts = max((pts for pts in stamps if pts <= time + _HALF_TICK), default=shown_pts)
        codec, pts = self._stream.codec_context, self.start - self.ticks_per_frame
        for packet in itertools.chain(first_packets, packets):
            if packet.is_corrupt:  # the file ends in it
                if self._stream.frames:
                    raise self._cut_off_error(self.decoded_end if packet.dts is None else packet.dts)
                continue  # an unfinished recording, without a length, ends with its last whole frame
            codec.skip_frame = "NONREF" if packet.pts is not None and packet.pts < shown_pts else "DEFAULT"
            for image in packet.decode():
                self._has_moved = True
                self.decoded_pts = pts = pts + self.ticks_per_frame if image.pts is None else float(image.pts)
                frame = Frame(image, pts, float(image.duration or 0))
                self.decoded_end = max(self.decoded_end, pts + frame.duration)
                yield frame
