"""Video files for tests, whose frames say their own numbers in grey blocks."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor

SIDE = 64
_BITS = 16  # 4 x 4 blocks of 16 pixels, of grey 40 for 0 and 200 for 1
RATE = 25
TICKS = 1000  # per second


def picture(number: int, width: int = SIDE, height: int = SIDE) -> npt.NDArray[np.uint8]:
    """Grey levels (height, width) that state a number below 65536."""
    bits = np.array([number >> bit & 1 for bit in range(_BITS)], np.uint8).reshape(4, 4)
    return np.kron(40 + 160 * bits, np.ones((height // 4, width // 4), np.uint8)).astype(np.uint8)


def number_of(frame: Tensor) -> int:
    """The number that a square frame (3, side, side) states; -1 if it is not clearly one."""
    side = frame.shape[-1]
    centres = frame[:, side // 8 :: side // 4, side // 8 :: side // 4].int().flatten(1)
    low, high = (centres - 40).abs() < 30, (centres - 200).abs() < 30
    if not bool((low | high).all()):
        return -1
    return sum(int(bit) << place for place, bit in enumerate(high[0].tolist()))


def numbers(clip: Tensor) -> list[int]:
    """The numbers of the frames of a clip (3, f, side, side)."""
    return [number_of(clip[:, frame]) for frame in range(clip.shape[1])]


def write_video(
    path: Any,
    n: int = 60,
    *,
    codec: str = "libx264",
    gop: int = 12,
    b_frames: int = 0,
    stamps: Sequence[int] | None = None,
    pictures: Iterable[npt.NDArray[np.uint8]] | None = None,
    audio: bool = False,
    x264: str = "",
    opening: Mapping[str, Any] | None = None,
    **stream_options: Any,
) -> Any:
    """Write frame i of n at the stamp stamps[i], in ms (default: 25 frames per second), to a path or a file; without
    loss, but for B-frames of x264, which has none without loss."""
    stamps = [i * TICKS // RATE for i in range(n)] if stamps is None else stamps
    pictures = map(picture, range(len(stamps))) if pictures is None else pictures
    first, pictures = itertools.tee(pictures)
    height, width = next(first).shape[:2]
    with av.open(str(path) if isinstance(path, Path) else path, "w", **(opening or {})) as container:
        stream = container.add_stream(codec, rate=RATE)
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv444p" if codec in ("libx264", "ffv1") else "yuv420p"
        stream.codec_context.time_base = Fraction(1, TICKS)
        stream.codec_context.gop_size = gop
        if codec == "libx264":
            always = f"b-adapt=0:keyint={gop}:scenecut=0:{x264}"
            stream.options = {"qp": "4" if b_frames else "0", "bf": str(b_frames), "x264-params": always}
        for name, value in stream_options.items():
            setattr(stream, name, value)
        tone = container.add_stream("aac" if path.suffix == ".mp4" else "libopus", rate=48000) if audio else None
        for stamp, pixels in zip(stamps, pictures, strict=False):
            channels = pixels.shape[2] if pixels.ndim == 3 else 1
            frame = av.VideoFrame.from_ndarray(pixels, format={1: "gray", 3: "rgb24", 4: "rgba"}[channels])
            frame.pts, frame.time_base = stamp, Fraction(1, TICKS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if tone is not None:
            sound = np.random.default_rng(0).uniform(-0.5, 0.5, (1, 48000 * (stamps[-1] + 40) // TICKS))
            piece = av.AudioFrame.from_ndarray(sound.astype(np.float32), format="fltp", layout="mono")
            piece.sample_rate, piece.pts = 48000, 0
            container.mux(tone.encode(piece))
            container.mux(tone.encode())
    return path


def write_widths(path: Path, *widths: int) -> None:
    """An AVI whose frames are pictures of these widths and 16 pixels high."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mjpeg", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = widths[0], 16, "yuvj420p"
        for number, width in enumerate(widths):
            content = io.BytesIO()
            Image.new("RGB", (width, 16), "red").save(content, "jpeg")
            packet = av.Packet(content.getvalue())
            packet.stream, packet.pts, packet.dts, packet.is_keyframe = stream, number, number, True
            container.mux(packet)
