"""The sets of videos that a script can train on, and the feed of their clips."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from ..contracts import Processes, Samples
from ..feed import Feed
from ..images.sets import open_images
from ..opening import demonstration_size
from .moving import FRAMES_PER_SECOND, Moving


def open_videos(
    spec: str | None,
    *,
    image_size: int,
    num_frames: int,
    fps: float | None = None,
    frame_stride: int = 1,
    flip: bool = False,
    seed: int = 0,
    short_clips: str = "repeat",
    clip_starts: str = "anywhere",
) -> Samples:
    """Open a set of videos by its name:

    - `demo:moving` (also None), `demo:moving:<number of clips>`.

    A sample is a clip, uint8 (3, num_frames, image_size, image_size). flip: half of the augmented clips are mirrored
    left to right.
    """
    if fps is not None and frame_stride != 1:
        raise ValueError(f"--fps {fps:g} and --frame_stride {frame_stride} exclude each other: give one of them")
    spec = "demo:moving" if spec is None else spec
    if (n := demonstration_size(spec, "moving", "clips")) is not None:
        step = FRAMES_PER_SECOND / fps if fps else frame_stride
        size = {"image_size": image_size, "num_frames": num_frames}
        return Moving(n, **size, frames_per_step=step, flip=flip, seed=seed)
    raise ValueError("not yet")


class VideoBatch(TypedDict):
    """videos: uint8 (b, 3, f, h, w), in a batch of images f = 1; positions and ids: see `Feed`."""

    videos: Tensor
    positions: list[int]
    ids: list[int]


class OneFrameClips:
    """The images (c, h, w) of a set as clips (c, 1, h, w). See `Samples`."""

    def __init__(self, images: Samples) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        image: Tensor = self._images.load(index, epoch, augment)
        return image[:, None]

    def describe(self, index: int) -> str:
        return self._images.describe(index)


def collate_videos(videos: Sequence[Tensor]) -> dict[str, Any]:
    """Clips (c, f, h, w) -> {"videos": (b, c, f, h, w)}."""
    return {"videos": torch.stack(list(videos))}


def video_feed(args: argparse.Namespace, processes: Processes) -> Feed[VideoBatch]:
    """The feed of a script that trains on videos: with `--image_folder`, every `--image_every`-th update is a batch of
    images, as clips of one frame. Validation is of videos only.

    `args` are those of `add_video_arguments` and `add_run_arguments`. Raises what `Feed` raises.
    """
    alike = {"image_size": args.image_size, "flip": args.random_flip, "seed": args.seed}
    names = ("num_frames", "fps", "frame_stride", "short_clips", "clip_starts")

    def open_set() -> Samples:
        return open_videos(args.video_folder, **alike, **{name: getattr(args, name) for name in names})

    def open_second() -> Samples:
        return OneFrameClips(open_images(args.image_folder, **alike))

    return Feed(
        open_set, args, processes, split_seed=args.split_seed, noun="clip", collate=collate_videos,
        open_second=open_second if args.image_folder else None, second_every=args.image_every,
    )  # fmt: skip
