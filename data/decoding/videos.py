"""Decoding of a video file to a clip of a fixed number of square frames, reading no more of the file than it needs.

Time stamps alone say which frame is shown when: neither the number of frames in a header nor a frame rate is relied
upon, except to choose where a clip begins. A clip costs the frames from the last key frame before it (`ffmpeg -g 24`
puts one into every second).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.files.installed import missing_package

from ..bad_samples import Unsuitable
from ..crops import CENTER, Crop, Cut
from ..hashing import Draws
from ..records.record import Entry
from .container import HALF_TICK, Converter, Picture, Video, opened
from .images import ENDINGS as IMAGE_ENDINGS
from .images import decode_image

ENDINGS = (".mp4", ".m4v", ".mkv", ".webm", ".mov", ".avi", ".gif")


@dataclass(frozen=True)
class ClipDecoder:
    """Cuts clips of `num_frames` square frames out of video files; training draws their places by `seed`.

    Args:
        image_size: Side of a frame in pixels: the shorter side of the video is resized to it, the longer one cropped.
        fps: Frames per second of a clip, or None for those of the file, of which every `frame_stride`-th is taken.
        short_clips: What becomes of a video that is shorter than a clip: "repeat" shows it again, "hold" its last
            frame, "skip" makes it `Unsuitable`.
        clip_starts: Where clips begin in training: "anywhere", or at the last "keyframe" before a random time, which
            saves decoding the frames between, and makes clips after rare key frames likelier.
        crop: What is cut out of all frames of a clip in training; else it is the middle.
    """

    image_size: int
    num_frames: int
    fps: float | None = None
    frame_stride: int = 1
    short_clips: str = "repeat"
    clip_starts: str = "anywhere"
    seed: int = 0
    crop: Crop = CENTER

    def load(self, entry: Entry, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        """Video, or image as a video of one frame -> uint8 (3, num_frames, image_size, image_size), between
        start_seconds and end_seconds of the video. With `augment`, (seed, epoch, index) determine the place of the
        clip; else it is the middle.

        Raises OSError if the file cannot be opened, and ValueError, in one line, if it cannot be decoded there.
        """
        cut = self.crop.cut(epoch, index) if augment else None
        if entry.name.lower().endswith(IMAGE_ENDINGS):
            frames = [self._image(entry, cut).permute(1, 2, 0).numpy()]
        else:
            share = Draws("clip", self.seed, epoch, index).uniform() if augment else 0.5
            with opened(entry) as video:
                frames = self._clip(video, entry, share, augment and self.clip_starts == "keyframe", cut)
        return self.filled(frames)

    def frames(self, entry: Entry) -> Iterator[tuple[Tensor, float | None]]:
        """All frames of a video from its start_seconds to its end_seconds, one after the other, each uint8
        (3, image_size, image_size), at the fps or frame_stride of clips; beside each the frames per second up to it:
        those that the headers state, if all stamps agree with them to half a frame, else the mean; None for an image.
        Raises what `load` raises."""
        if entry.name.lower().endswith(IMAGE_ENDINGS):
            yield self._image(entry), None
            return
        with opened(entry) as video:
            begin, end = video.part(entry)
            step, first, is_steady = self._step(video), math.nan, True
            for number, (time, picture) in enumerate(self._pictures(video, begin, end)):
                first = time if number == 0 else first
                passed = time - first
                is_steady = is_steady and abs(passed - number * step) < step / 2
                ticks = step if is_steady or passed <= 0 else passed / number
                fps = self.fps or video.ticks_per_second / ticks
                yield torch.from_numpy(np.ascontiguousarray(picture.transpose(2, 0, 1))), fps

    def _image(self, entry: Entry, cut: Cut | None = None) -> Tensor:
        return decode_image(entry, self.image_size, 3, cut=cut)

    def _clip(self, video: Video, entry: Entry, share: float, at_keyframe: bool, cut: Cut | None) -> list[Picture]:
        """At most num_frames frames; fewer if the part of the video has no more."""
        begin, end = video.part(entry)
        step = self._step(video)
        room = min(end, video.end) - begin - (self.num_frames - 1) * step
        start = begin + max(0.0, room) * share
        if at_keyframe:
            start = max(begin, video.keyframe_before(start))
        for tries in itertools.count(1):
            pictures = self._pictures(video, start, end, cut)
            frames = [picture for _, picture in itertools.islice(pictures, self.num_frames)]
            missing = self.num_frames - len(frames)
            if not missing or start <= begin:
                return frames
            # The video is shorter than its header states, or damaged: go back from the last frame that there is.
            start = max(begin, min(start, video.reached) - 2**tries * missing * step)
        raise AssertionError

    def _step(self, video: Video) -> float:
        """Ticks from one frame of a clip to the next."""
        return video.ticks_per_second / self.fps if self.fps else video.ticks_per_frame * self.frame_stride

    def _pictures(
        self, video: Video, start: float, end: float, cut: Cut | None = None
    ) -> Iterator[tuple[float, Picture]]:
        """The frames from time `start` to before `end`, in ticks, as (image_size, image_size, 3), with their times."""
        convert = Converter(self.image_size, video.pixel_width, cut)
        if not self.fps:
            for number, frame in enumerate(video.frames_from(start)):
                if number and frame.pts >= end:
                    return
                if number % self.frame_stride == 0:
                    yield frame.pts, convert(frame)
            return
        step = self._step(video)
        times = (start + number * step for number in itertools.count())
        time, frames = next(times), video.frames_from(start)
        shown = next(frames, None)
        while shown is not None:
            following = next(frames, None)
            until = following.pts if following else shown.pts + (shown.duration or video.ticks_per_frame)
            picture = None
            while time + HALF_TICK < min(until, end):
                picture = convert(shown) if picture is None else picture
                yield time, picture
                time = next(times)
            shown = following

    def filled(self, frames: list[Picture]) -> Tensor:
        """At most num_frames frames (image_size, image_size, 3) -> a clip (3, num_frames, image_size, image_size), by
        `short_clips`. Raises ValueError if there are none, and `Unsuitable` if there are too few for "skip"."""
        n = len(frames)
        if n == 0:
            raise ValueError("it holds no frames")
        if n < self.num_frames and self.short_clips == "skip":
            raise Unsuitable(
                f"it has {n} frame{'' if n == 1 else 's'} for a clip of {self.num_frames} (--short_clips skip)"
            )
        order = [i % n if self.short_clips == "repeat" else min(i, n - 1) for i in range(self.num_frames)]
        clip = np.empty((3, self.num_frames, self.image_size, self.image_size), np.uint8)
        for place, number in enumerate(order):
            clip[:, place] = frames[number].transpose(2, 0, 1)
        return torch.from_numpy(clip)


def require_decoder() -> None:
    """Raise ValueError, in one line, if PyAV is missing. It imports the package, so that loader workers that are forked
    later need not."""
    try:
        import av  # noqa: F401
    except ImportError:
        raise missing_package("reading video files", "av (PyAV)", "video") from None
