"""The sets of videos that a script can train on, and the feed of their clips."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Sequence
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor

from ..contracts import Processes, Samples, skipped_of
from ..crops import CENTER, Crop, crop_of
from ..feed import Feed, split_seed_of
from ..files.find import Folder, ManifestFile, TarFiles, find_files
from ..files.manifest import Columns, Parts, part_of, read_rows
from ..files.opening import Listing, demonstration_size, list_files
from ..files.source import Places
from ..files.tars import Members, Tars
from ..images.decoding import ENDINGS as IMAGE_ENDINGS
from ..images.decoding import randomly_flipped
from ..images.sets import open_images
from ..own import OwnData, data_of
from .decoding import ENDINGS, ClipDecoder, require_decoder
from .moving import FRAMES_PER_SECOND, Moving
from .own import OwnVideos

_LARGEST_CLIP_BYTES = 1 << 32
_COLUMNS = Columns(
    needed=(("path", "file_name"),),
    words="path (or file_name), start_seconds and end_seconds (path alone is needed)",
    example='{"path": "..."}',
    texts="paths",
)


class Videos(Samples, Protocol):
    """A numbered set of videos; a sample is a clip, uint8 (3, num_frames, image_size, image_size)."""

    def name(self, index: int) -> str:
        """The name of the video in an index: its path relative to the folder, with '/' between the parts."""
        ...


class VideoFiles:
    """Videos and images in files, of which clips are cut when they are loaded. See `Videos` for the methods."""

    def __init__(self, places: Places, clips: ClipDecoder, *, flip: bool = False, seed: int = 0) -> None:
        self._places, self.clips, self._flip, self._seed = places, clips, flip, seed
        self.source, self.describe, self.name = places.source, places.describe, places.name
        self.fingerprint, self.skipped = places.fingerprint, skipped_of(places)

    def __len__(self) -> int:
        return len(self._places)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        clip = self.clips.load(self.source(index), index, epoch, augment)
        return randomly_flipped(clip, self._seed, epoch, index) if self._flip and augment else clip


def open_videos(
    spec: str | OwnData | None,
    *,
    image_size: int,
    num_frames: int,
    fps: float | None = None,
    frame_stride: int = 1,
    flip: bool = False,
    seed: int = 0,
    short_clips: str = "repeat",
    clip_starts: str = "anywhere",
    crop: Crop = CENTER,
) -> Moving | VideoFiles | OwnVideos:
    """Open a set of videos by its name:

    - `demo:moving` (also None), `demo:moving:<number of clips>`;
    - a folder of videos and images, flat or nested; an image is a video of one frame;
    - a manifest, .csv, .tsv or JSON lines: `path` (or `file_name`) of the video, relative to the manifest, and
      perhaps `start_seconds` and `end_seconds` (or `start_s` and `end_s`), the part that clips are taken from;
    - webdataset tars: one .tar, a folder of them, a pattern (`tars/*.tar`) or a range (`{000..010}.tar`).

    flip: half of the augmented clips are mirrored left to right. The others are arguments of `ClipDecoder`; nothing is
    cut out of the demonstration. No video is opened. Raises ValueError, in one line, if there is no such set or nothing
    in it.
    """
    if (n_bytes := 3 * num_frames * image_size**2) > _LARGEST_CLIP_BYTES:
        raise ValueError(
            f"a clip of {num_frames} frames of {image_size} pixels takes {n_bytes / 1e9:.3g} GB: lower one of them"
        )
    if fps is not None and frame_stride != 1:
        raise ValueError(f"--fps {fps:g} and --frame_stride {frame_stride} exclude each other: give one of them")
    spec = "demo:moving" if spec is None else spec
    if not isinstance(spec, OwnData) and (n := demonstration_size(spec, "moving", "clips")) is not None:
        step = FRAMES_PER_SECOND / fps if fps else frame_stride
        return Moving(n, image_size=image_size, num_frames=num_frames, frames_per_step=step, flip=flip, seed=seed)
    if not isinstance(spec, OwnData):
        require_decoder()
    clips = ClipDecoder(
        image_size, num_frames, fps=fps, frame_stride=frame_stride, short_clips=short_clips, clip_starts=clip_starts,
        seed=seed, crop=crop,
    )  # fmt: skip
    if isinstance(spec, OwnData):
        return OwnVideos(spec, clips, flip=flip, seed=seed)
    # An image is too short for a clip: leave it out by its name.
    endings = ENDINGS if short_clips == "skip" and num_frames > 1 else (*ENDINGS, *IMAGE_ENDINGS)
    return VideoFiles(_find(os.path.expanduser(spec), endings), clips, flip=flip, seed=seed)


def _find(path: str, endings: tuple[str, ...]) -> Places:
    def listed(folder: str) -> Listing:
        return list_files(folder, endings, "videos", "demo:moving")

    files = find_files(path, "videos", listed)
    if isinstance(files, TarFiles):
        return Tars(files.paths, Members("video", (ENDINGS,), suffix=".videos"))
    if isinstance(files, Folder):
        return files
    assert isinstance(files, ManifestFile)
    return Parts(files.path, read_rows(files.path, _COLUMNS, functools.partial(part_of, noun="video")), "video")


class VideoBatch(TypedDict):
    """videos: uint8 (b, 3, f, h, w), in a batch of images f = 1; positions and ids: see `Feed`."""

    videos: Tensor
    positions: list[int]
    ids: list[int]


class OneFrameClips:
    """The images (c, h, w) of a set as clips (c, 1, h, w). See `Samples`."""

    def __init__(self, images: Samples) -> None:
        self._images, self.fingerprint, self.skipped = images, images.fingerprint, skipped_of(images)

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

    `args` are `VideoFlags` of `data/flags.py` and `RunFlags` of `training/flags/shared.py`. Raises what `Feed` raises.
    """
    alike = {"image_size": args.image_size, "flip": args.random_flip, "seed": args.seed, "crop": crop_of(args)}
    names = ("num_frames", "fps", "frame_stride", "short_clips", "clip_starts")

    source = data_of(args, "video_folder")

    def open_set(spec: str | OwnData = source) -> Samples:
        return open_videos(spec, **alike, **{name: getattr(args, name) for name in names})

    def open_second() -> Samples:
        if args.image_every == 1:
            raise ValueError("--image_every 1 leaves no update for the videos: give 2 or more")
        return OneFrameClips(open_images(args.image_folder, **alike))

    return Feed(
        open_set, args, processes, split_seed=split_seed_of(args), noun="clip", collate=collate_videos,
        source=" and ".join(filter(None, [str(source), args.image_folder])),
        open_second=open_second if args.image_folder else None, second_every=args.image_every,
        open_valid=functools.partial(open_set, args.valid_folder) if args.valid_folder else None,
    )  # fmt: skip
