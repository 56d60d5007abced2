"""The loader's clips per second over those of a plain PyAV loop in the same number of processes."""

from __future__ import annotations

import functools
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from data.sets import open_images, open_videos

from . import machine
from .loading import plain_rate, stream_rate
from .report import Goal, Row

_GOAL = Goal("ratio", ">=", 1.3)
_SIDE, _FRAMES = 128, 17
_N_GENERATED, _SECONDS, _RATE = 12, 10, 25
_WIDTH, _HEIGHT = 640, 360
_KEYFRAMES = {"2 s": 50, "10 s": 250}


def video_loading(rounds: int, video_folder: str | None) -> Iterator[Row]:
    """Clips of 17 frames at 128 pixels per second, each from a random place of a file; see `loading.loading`."""
    for distance, frames in _KEYFRAMES.items():
        with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
            if video_folder is None:
                write_videos(Path(folder), keyframe_every=frames)
            videos = open_videos(video_folder or folder, image_size=_SIDE, num_frames=_FRAMES)
            paths = [videos.describe(index) for index in range(len(videos))]
            workers = machine.cores()
            decoders: dict[str, Callable[[str], Tensor]] = {
                "PyAV and interpolate": functools.partial(plain_clip, random=random.Random(0)),
                "PyAV and FFmpeg's resizing": functools.partial(plain_clip, random=random.Random(0), by_ffmpeg=True),
            }
            rates: dict[str, list[float]] = {name: [] for name in ("ours", *decoders)}
            for _ in range(rounds):
                rates["ours"].append(stream_rate(videos, workers))
                for name, decode in decoders.items():
                    rates[name].append(plain_rate(paths, workers, decode))
            source = video_folder or f"generated {_WIDTH} x {_HEIGHT}, a key frame each {distance}"
            for name in decoders:
                goal = _GOAL if name == "PyAV and interpolate" else None
                note = f"over {name}; {len(paths)} videos, {source}, {workers} processes"
                yield Row(f"loader, {_FRAMES} x {_SIDE} px", "clips/s", rates["ours"], rates[name], goal, note)
        if video_folder is not None:
            return


def write_videos(folder: Path, n: int = _N_GENERATED, seconds: int = _SECONDS, *, keyframe_every: int) -> None:
    """Write H.264 of 640 x 360 pixels, 25 frames per second: a camera that moves over shapes with grain, and noise."""
    import av

    shapes = open_images(f"demo:shapes:{n}", image_size=2 * _WIDTH)
    rng = np.random.default_rng(0)
    for index in range(n):
        scene = shapes.load(index)["images"].permute(1, 2, 0).numpy().astype(np.int16)
        grain = rng.normal(0, 12, (_WIDTH, _WIDTH, 1)).astype(np.int16)
        scene = scene + grain.repeat(2, axis=0).repeat(2, axis=1)
        noise = rng.normal(0, 3, (8, _HEIGHT, _WIDTH, 1)).astype(np.int16)
        with av.open(str(folder / f"{index:03d}.mp4"), "w") as container:
            stream = container.add_stream("libx264", rate=_RATE)
            stream.width, stream.height, stream.pix_fmt = _WIDTH, _HEIGHT, "yuv420p"
            stream.options = {"preset": "veryfast", "g": str(keyframe_every)}
            for number in range(seconds * _RATE):
                angle = 2 * np.pi * number / (seconds * _RATE)
                x, y = (int(200 * (1 + f(angle))) for f in (np.cos, np.sin))
                view = scene[y : y + _HEIGHT, x : x + _WIDTH] + noise[number % len(noise)]
                frame = av.VideoFrame.from_ndarray(view.clip(0, 255).astype(np.uint8), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())


def plain_clip(path: str, *, random: random.Random, by_ffmpeg: bool = False) -> Tensor:
    """A clip from a random place as one writes it with PyAV: seek to the key frame before, decode, leave out what comes
    too early; uint8 (3, 17, 128, 128). Frames are resized as by torchvision's ``resize(antialias=True)``, or by FFmpeg
    while they are turned into RGB."""
    import av

    with av.open(path) as container:
        stream = container.streams.video[0]
        room = container.duration / av.time_base - _FRAMES / stream.average_rate
        start = int(random.uniform(0, max(0, room)) / stream.time_base)
        container.seek(start, stream=stream)
        late = (frame for frame in container.decode(stream) if frame.pts >= start)
        frames = list(itertools.islice(late, _FRAMES))
        if by_ffmpeg:
            sides = stream.width, stream.height
            width, height = (side * _SIDE // min(sides) for side in sides)
            frames = [frame.reformat(width, height, "rgb24") for frame in frames]
        pixels = np.stack([frame.to_ndarray(format="rgb24") for frame in frames])
    clip = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    if not by_ffmpeg:
        height, width = (side * _SIDE // min(clip.shape[2:]) for side in clip.shape[2:])
        clip = F.interpolate(clip, (height, width), mode="bilinear", antialias=True)
    top, left = ((side - _SIDE) // 2 for side in clip.shape[2:])
    return clip[:, :, top : top + _SIDE, left : left + _SIDE].transpose(0, 1).contiguous()
