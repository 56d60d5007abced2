"""The demonstrations: captioned pictures of shapes, clips of moving shapes, and captioned sounds.

A sample depends only on (seed, index) and is the same on every machine. Lengths are in units of the picture's side,
times in frames: one index shows the same scene at every image_size, and a longer clip begins with the frames of a
shorter one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tandem.data.sources.record import Record

from .clips import draw_moving
from .pictures import draw_scene, draw_shapes
from .tones import draw_tone

PREFIX = "demo:"
DEFAULT_SIZE, LARGEST_SIZE = 4096, 1 << 22
_LONGEST_QUOTE = 60


class DemoSource:
    """`n` samples of a demonstration, numbered. See `RecordSource`. A record holds, by its kind,

    - "shapes": of one to three shapes, image(image_size, channels) -> uint8 (channels, height, width): of 4 channels
      the last is opaque alpha, of others the colours follow one another again and again; and "texts",
      {"captions": [...]}, which are true of a picture that is not mirrored;
    - "scenes": of one shape, the same; and image_embed() -> float32 (30,), text_encodings() -> float32 (9, 32);
    - "moving": clip(image_size, num_frames, frames_per_step) -> uint8 (3, num_frames, height, width), where
      frames_per_step, in frames of the scene (`FRAMES_PER_SECOND`), passes between two frames of the clip;
    - "tones": sound(sample_rate, clip_samples) -> float32 (clip_samples,) in [-1, 1]; and "texts" of four captions and
      the "label", the waveform. The first caption has the same words for all tones of equal attributes, the others use
      random synonyms. Augmentation changes what no caption mentions: loudness, phases and noise.
    """

    fingerprint = skipped = ""
    shards: Sequence[range] | None = None

    def __init__(self, kind: str, n: int, seed: int = 0) -> None:
        self.kind, self.n, self.seed = kind, n, seed

    def __len__(self) -> int:
        return self.n

    def record(self, index: int, epoch: int = 0, augment: bool = False) -> Record:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return _KINDS[self.kind].draw(self.seed, index, epoch if augment else "plain")

    def describe(self, index: int) -> str:
        return f"{demo_name(self.kind)}[{index}]"

    name = describe

    def examples(self, name: str) -> Sequence[int]:
        return [0] if name in self.record(0) else []


def demo_name(kind: str) -> str:
    """The name of the demonstration with samples of a kind, such as "demo:shapes" of scenes."""
    return f"{PREFIX}{_KINDS[kind].name}"


def open_demo(spec: str, kind: str, seed: int = 0) -> DemoSource | None:
    """The samples of `demo:<name>` or `demo:<name>:<number>`; None if `spec` does not begin with `demo:`. `kind`: see
    `DemoSource`.

    Raises ValueError, in one line, if `spec` names another demonstration, or its number is not a positive integer.
    """
    if not spec.startswith(PREFIX):
        return None
    name = demo_name(kind)
    name_in_spec, _, number = spec.removeprefix(PREFIX).partition(":")
    if PREFIX + name_in_spec != name:
        raise ValueError(f"there is no demonstration set {spec!r} of {_KINDS[kind].noun}: the only one is {name}")
    n = int(number or DEFAULT_SIZE) if re.fullmatch("[0-9]{,7}", number) else 0
    if not 0 < n <= LARGEST_SIZE:
        raise ValueError(
            f"{spec[:_LONGEST_QUOTE]!r} asks for {number[:_LONGEST_QUOTE]!r} {_KINDS[kind].noun}, which is no number "
            f"from 1 to {LARGEST_SIZE}: write e.g. {name}:{DEFAULT_SIZE}"
        )
    return DemoSource(kind, n, seed)


class _Kind(NamedTuple):
    """The demonstration with samples of a kind: its name, the noun for messages, and the function of (seed, index,
    epoch or "plain") that generates a sample."""

    name: str
    noun: str
    draw: Callable[[int, int, int | str], Record]


_KINDS = {
    "shapes": _Kind("shapes", "images", draw_shapes), "scenes": _Kind("shapes", "images", draw_scene),
    "moving": _Kind("moving", "clips", draw_moving), "tones": _Kind("tones", "sounds", draw_tone),
}  # fmt: skip
