"""A video file as PyAV opens it: its times, a seek that is exact, and frames as upright squares of pixels.

High dynamic range is not mapped to the usual range: such videos look pale.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..crops import Cut
from ..records.record import Entry, open_entry

# FFmpeg knows the format by content; others, such as lists of files and addresses to read instead, are refused.
_FORMATS = "mov,matroska,avi,gif"
HALF_TICK = 0.5  # stamps are rounded to ticks, and so may be the times that are asked for
_USUAL_RATE = 25.0  # frames per second of a file that states none
_LONGEST_PIXEL = 8.0  # width over height or height over width; files that state more are wrong
_MOST_REORDERED = 16  # first packets after a jump for which FFmpeg may not know yet when they are due
_MICROSECONDS = 1_000_000  # FFmpeg's unit for the length of a whole file
_DURATION_TAG = re.compile(r"(\d+):(\d+):(\d+(?:\.\d+)?)$")

Picture = npt.NDArray[np.uint8]


class Frame(NamedTuple):
    """A decoded frame (av.VideoFrame); when it is shown and for how long (0 if unknown), in ticks of its stream."""

    image: Any
    pts: float
    duration: float


@contextlib.contextmanager
def opened(entry: Entry) -> Iterator[Video]:
    """An open video. Errors of FFmpeg inside become ValueErrors of one line."""
    import av

    with open_entry(entry) as file:
        try:
            # Through a file object, because FFmpeg takes some names, such as `concat:a`, for something else.
            options = {"format_whitelist": _FORMATS}
            with av.open(file, options=options, metadata_errors="replace") as container:
                yield Video(container)
        except av.FFmpegError as error:
            raise ValueError(f"FFmpeg cannot read it: {' '.join(str(error.strerror or error).split())}") from None


class Video:
    """The video stream of an open container: all times are in ticks of its time base."""

    def __init__(self, container: Any) -> None:
        import av

        # Cover art is a stream of one picture.
        cover = av.stream.Disposition.attached_pic
        streams = [stream for stream in container.streams.video if not stream.disposition & cover]
        if not streams:
            raise ValueError("it holds no video")
        self._container, self._stream = container, streams[0]
        codec = self._stream.codec_context
        if codec is None:
            raise ValueError("FFmpeg has no decoder for it")
        codec.thread_type, codec.thread_count = "NONE", 1  # the loader's workers are the threads
        shape = self._stream.sample_aspect_ratio  # of a pixel: width over height
        width = shape.numerator / shape.denominator if shape else 1.0
        self.pixel_width = width if 1 / _LONGEST_PIXEL <= width <= _LONGEST_PIXEL else 1.0
        base, rate = self._stream.time_base, self._stream.average_rate or self._stream.guessed_rate
        self.ticks_per_second = base.denominator / base.numerator
        self.ticks_per_frame = self.ticks_per_second / (rate.numerator / rate.denominator if rate else _USUAL_RATE)
        self.start = float(self._stream.start_time or 0)
        self.reached = self.start  # when the frame that was decoded last is shown
        self._moved = False

    @property
    def end(self) -> float:
        """When the video ends, as the headers state it; if they do not, all packets are read."""
        stream, container = self._stream, self._container
        if stream.duration:
            return self.start + stream.duration
        if tag := _DURATION_TAG.match(stream.metadata.get("DURATION", "")):  # Matroska's, counted from 0
            hours, minutes, seconds = map(float, tag.groups())
            return (3600 * hours + 60 * minutes + seconds) * self.ticks_per_second
        if container.duration:
            return ((container.start_time or 0) + container.duration) / _MICROSECONDS * self.ticks_per_second
        self._moved = True
        stamps = (packet.pts for packet in container.demux(stream) if packet.pts is not None)
        return max(stamps, default=self.start) + self.ticks_per_frame

    def part(self, entry: Entry) -> tuple[float, float]:
        """The beginning and the end (infinite: that of the video) of the part that is asked for."""
        begin, end = (self.start + time * self.ticks_per_second for time in (entry.start_seconds, entry.end_seconds))
        return begin, end

    def keyframe_before(self, time: float) -> float:
        """When the last key frame before a time is shown, as far as the index of the file knows."""
        self._seek(time)
        self._moved = True
        packet = next(self._container.demux(self._stream), None)
        return time if packet is None or packet.pts is None else float(packet.pts)

    def frames_from(self, time: float) -> Iterator[Frame]:
        """The frame that is shown at a time, and all after it."""
        back = 0.0
        while True:
            self._seek(time - back)
            frames = self._decoded(time)
            first = next(frames, None)
            if time - back <= self.start or (first is not None and first.pts <= time + HALF_TICK):
                break
            back = max(2 * back, self.ticks_per_second)  # the index led too far, or a key frame has frames before it
        if first is None:
            return
        shown: Frame | None = None
        for frame in itertools.chain([first], frames):
            if frame.pts > time + HALF_TICK:
                yield from [shown, frame] if shown else [frame]
                yield from frames
                return
            shown = frame
        if shown is not None and time <= shown.pts + max(shown.duration, self.ticks_per_frame) + HALF_TICK:
            yield shown  # the last frame; behind its end nothing is shown

    def _seek(self, time: float) -> None:
        if time <= self.start and not self._moved:
            return
        import av

        try:
            self._container.seek(math.floor(max(time, self.start) + HALF_TICK), stream=self._stream, backward=True)
        except av.FFmpegError:  # a file without an index: decode from where we are, which is the beginning
            if self._moved:
                raise
        self._moved = True

    def _decoded(self, time: float) -> Iterator[Frame]:
        """Frames from the place of the last seek; of those before the one that is shown at a time, only the ones that
        others are predicted from, because they alone are needed."""
        packets = self._container.demux(self._stream)
        early = []  # the packets of all frames up to `time`, because no frame is shown before its packet is due
        for packet in packets:
            early.append(packet)
            if len(early) > _MOST_REORDERED if packet.dts is None else packet.dts > time + HALF_TICK:
                break
        stamps = [packet.pts for packet in early if packet.size]
        wanted = self.start
        if None not in stamps:
            wanted = max((pts for pts in stamps if pts <= time + HALF_TICK), default=wanted)
        codec, pts = self._stream.codec_context, self.start - self.ticks_per_frame
        for packet in itertools.chain(early, packets):
            codec.skip_frame = "NONREF" if packet.pts is not None and packet.pts < wanted else "DEFAULT"
            for image in packet.decode():
                self._moved = True
                self.reached = pts = pts + self.ticks_per_frame if image.pts is None else float(image.pts)
                yield Frame(image, pts, float(image.duration or 0))


class Converter:
    """Frames -> upright squares (side, side, 3) RGB, of the middle or of the square that `cut` gives. One for a clip:
    FFmpeg keeps megabytes for each."""

    def __init__(self, side: int, pixel_width: float, cut: Cut | None = None) -> None:
        from av.video.reformatter import VideoReformatter

        self._side, self._pixel_width, self._cut = side, pixel_width, cut
        self._resize, self._uncover = VideoReformatter().reformat, VideoReformatter().reformat

    def __call__(self, frame: Frame) -> Picture:
        image = frame.image
        if image.format.has_palette or any(component.is_alpha for component in image.format.components):
            image = self._over_white(image)
        sides = image.width * self._pixel_width, image.height
        square = self._cut(*(max(1, round(side)) for side in sides)) if self._cut else None
        shorter = square.side if square else min(sides)
        width, height = (max(self._side, round(side * self._side / shorter)) for side in sides)
        method = "AREA" if shorter > self._side else "BICUBIC"
        small = self._resize(image, width, height, "gbrp", interpolation=method, threads=1)
        pixels = small.to_ndarray()
        if square:
            begins = (round(begin * self._side / shorter) for begin in (square.top, square.left))
            top, left = (min(begin, room - self._side) for begin, room in zip(begins, pixels.shape, strict=False))
            pixels = pixels[top : top + self._side, left : left + self._side]
        picture: Picture = np.rot90(pixels, frame.image.rotation // 90)
        top, left = ((side - self._side) // 2 for side in picture.shape[:2])
        return picture[top : top + self._side, left : left + self._side]

    def _over_white(self, image: Any) -> Any:
        """A frame with transparent pixels, laid over white before anything is resized: what such a pixel hides would
        otherwise leak into its neighbours."""
        import av

        pixels = self._uncover(image, format="rgba", threads=1).to_ndarray()
        if pixels[..., 3].min() == 255:
            return image
        colour, alpha = pixels[..., :3].astype(np.uint16), pixels[..., 3:].astype(np.uint16)
        laid = (colour * alpha + 255 * (255 - alpha) + 127) // 255
        return av.VideoFrame.from_ndarray(laid.astype(np.uint8), format="rgb24")
