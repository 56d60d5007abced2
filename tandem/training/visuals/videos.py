"""Videos beside their reconstructions: film strips as a picture, and short films."""

from __future__ import annotations

import io
import itertools
import math
import os
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from .images import Sample, enlarge, grid, to_pixels

_FRAMES = 9  # at most, of a clip in a picture
_MAX_FPS = 1000
_STRIP_SIDE, _FILM_SIDE = 64, 128  # least pixels of a frame's side
_GAP_PIXELS = 4
_ERROR_FACTOR = 4


def film(originals: Tensor, reconstructions: Mapping[str, Tensor], *, fps: float) -> Sample:
    """`film_strips`, and beside it the film as GIF, and as MP4 if PyAV is installed; of one-frame videos the strips
    alone. Arguments as for `film_strips`; `fps` in frames per second."""
    picture = film_strips(originals, reconstructions)
    if originals.shape[2] == 1:
        return Sample(picture)
    frames = side_by_side(originals, reconstructions)
    return Sample(picture, {"gif": to_gif(frames, fps), **({"mp4": to_mp4(frames, fps)} if can_write_mp4() else {})})


def film_strips(originals: Tensor, reconstructions: Mapping[str, Tensor]) -> Image.Image:
    """Labelled rows of frames for each clip: the original, each reconstruction, and 4 times the absolute error of the
    last reconstruction. Up to 9 frames, evenly spread from the first to the last; small ones are enlarged.

    Args:
        originals: (n, c, f, h, w) in [0, 1]; for the channels that are shown see `to_pixels`, errors are those of the
            first three.
        reconstructions: By the name of the model, of the same shape.
    """
    count = originals.shape[2]
    indices = torch.linspace(0, count - 1, min(count, _FRAMES), dtype=torch.float64).round().long().tolist()
    videos = {"original": originals, **reconstructions}
    *_, last = videos
    rows: dict[str, Tensor] = {}
    for clip in range(len(originals)):
        strips = {name: video[clip, :, indices].float().clamp(0, 1).transpose(0, 1) for name, video in videos.items()}
        error = (strips[last] - strips["original"]).abs() * _ERROR_FACTOR
        strips[f"|error| x {_ERROR_FACTOR}"] = error[:, :3]
        rows |= {f"{clip + 1} {name}": frames for name, frames in strips.items()}
    return grid(rows, _STRIP_SIDE)


def side_by_side(originals: Tensor, reconstructions: Mapping[str, Tensor]) -> np.ndarray:
    """The frames of a film, uint8 (f, h', w', 3): a row for each clip, with the original on the left and
    the reconstructions beside it; small frames are enlarged. Arguments as for `film_strips`."""
    rows = []
    for clip in range(len(originals)):
        clip_videos = (video[clip].transpose(0, 1) for video in (originals, *reconstructions.values()))
        gap = (0, _GAP_PIXELS, 0, _GAP_PIXELS)  # white, on the right and below
        padded = [F.pad(enlarge(frames, _FILM_SIDE), gap, value=1.0) for frames in clip_videos]
        rows.append(torch.cat([to_pixels(frames) for frames in padded], dim=2))
    return torch.cat(rows, dim=1)[:, :-_GAP_PIXELS, :-_GAP_PIXELS].numpy()


def to_gif(frames: Iterable[np.ndarray], fps: float) -> bytes:
    """The content of a GIF file that repeats for ever, of frames (h, w, 3), uint8, which are all in memory. Durations
    are whole hundredths of a second; a frame has 256 colours; equal frames in succession become one."""
    first, *others = (Image.fromarray(frame) for frame in frames)
    content = io.BytesIO()
    times = [round(100 * number / fps) for number in range(len(others) + 2)]  # in hundredths of a second
    # In ms. Viewers slow down frames of less than 20 ms, and GIF has 16 bits for the hundredths.
    durations = [10 * min(max(2, end - begin), 65535) for begin, end in itertools.pairwise(times)]
    first.save(content, "gif", save_all=True, append_images=others, duration=durations, loop=0)
    return content.getvalue()


def to_mp4(frames: np.ndarray, fps: float) -> bytes:
    """The content of an MP4 file with almost lossless H.264, of frames (f, h, w, 3), uint8; `fps` is rounded to a whole
    number of frames per second."""
    content = io.BytesIO()
    write_mp4(content, frames, max(1, round(min(fps, _MAX_FPS))))
    return content.getvalue()


def can_write_mp4() -> bool:
    """Whether PyAV is installed and has an encoder for H.264."""
    try:
        import av
    except ImportError:
        return False
    return "libx264" in av.codecs_available


def write_mp4(
    file: BinaryIO,
    frames: Iterable[np.ndarray],
    fps: float,
    sound: tuple[int, Iterable[tuple[float, Any]]] | None = None,
) -> None:
    """Write the frames (h, w, 3), uint8, one by one: a film of any length takes the same memory. `fps` becomes a
    fraction with a denominator of at most 1001, as of 30000/1001. See `to_mp4`.

    Args:
        sound: Samples per second, and frames (av.AudioFrame), each with the time in seconds at which it begins. They
            become AAC; frames that begin before the first picture or after the last one are left out.
    """
    import av

    rate = min(max(Fraction(fps).limit_denominator(1001), Fraction(1, 1001)), Fraction(_MAX_FPS))
    # The file depends only on the frames: one thread, and no mbtree, which reads uninitialised memory in some builds.
    # yuv444p, because halved colour planes (yuv420p) would blur small things.
    options = {"crf": "10", "threads": "1", "x264-params": "mbtree=0"}
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate, options=options)
        stream.pix_fmt = "yuv444p"
        samples_per_second, sound_frames = sound or (0, ())
        track: Any = container.add_stream("aac", rate=samples_per_second) if sound else None
        timed_frames = ((time, audio) for time, audio in sound_frames if time >= 0)
        end: tuple[float, Any] = (math.inf, None)  # after the last audio frame
        time, audio = next(timed_frames, end)
        for number, frame in enumerate(frames):
            if number == 0:
                stream.height, stream.width = frame.shape[:2]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            while time < (number + 1) / rate:
                container.mux(_encode_sound(track, time, audio, samples_per_second))
                time, audio = next(timed_frames, end)
        container.mux(stream.encode())
        if track:
            container.mux(track.encode())


def check_sound(sound: tuple[int, Iterable[tuple[float, Any]]]) -> None:
    """Read and encode a sound, as `write_mp4` does, and keep nothing. Raises FFmpeg's errors, and ValueError, in one
    line, if AAC cannot have its rate."""
    import av

    rate, frames = sound
    if rate not in (av.codec.Codec("aac", "w").audio_rates or [rate]):
        raise ValueError(f"AAC cannot have {rate} samples per second")
    with av.open(os.devnull, "w", format="adts") as container:
        track: Any = container.add_stream("aac", rate=rate)
        for time, audio in frames:
            if time >= 0:
                _encode_sound(track, time, audio, rate)


def _encode_sound(track: Any, time: float, audio: Any, rate: int) -> Any:
    """The packets for a frame of sound that begins at this time, in seconds."""
    audio.pts, audio.time_base = round(time * rate), Fraction(1, rate)
    return track.encode(audio)
