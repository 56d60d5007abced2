"""Flags of the samples that a script trains on. Imports no PyTorch, so that `--help` is fast."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, ClassVar

from .converters import (
    FILE,
    FOLDER,
    PATH,
    area_range,
    digit_count,
    fraction,
    frame_rate,
    int_above_1,
    non_negative_int,
    positive_float,
    positive_int,
    size,
)
from .fields import DATA, Requirement, flag, given, when, without

_EXAMPLE_FOLDERS = {"image_folder": "photos/", "video_folder": "clips/", "audio_data": "sounds/"}


@dataclass
class DatasetFlags:
    """Flags of every training script: a user's own dataset, which replaces that of `data_flag`; the order of samples in
    shards; and the cache of shards from servers."""

    data_flag: ClassVar[str]

    dataset: str | None = flag(
        None,
        "instead of files: a Python function that gets the arguments of the run and returns an object with __len__ and "
        "__getitem__; its module may be in the current folder; see docs/data.md",
        metavar="MODULE:FUNCTION",
        title="own dataset",
    )

    shuffle: str = flag(
        "samples",
        "order of training: shuffle all samples; or shuffle the shards (tars, files of tables), and the samples of "
        "four shards at a time, so that shards on servers are read as a whole; whole shards are then held out, too",
        choices=("samples", "shards"),
        title="shards and servers",
        fixed_on_resume=True,
    )
    cache_dir: str | None = flag(
        None,
        "folder on the local disk that keeps shards from servers, for all runs of this machine (default: none is kept)",
        FOLDER,
        requires=when("shuffle", "shards"),
    )
    cache_gb: float = flag(
        50.0,
        "size of --cache_dir in GB; the shards that were read longest ago are deleted",
        positive_float,
        requires=given("cache_dir", "DIR"),
    )

    @classmethod
    def validate(cls, args: argparse.Namespace, parser: Any) -> None:
        """Make --dataset and `data_flag` mutually exclusive; the command line takes precedence over a config file."""
        name, on_command_line = cls.data_flag, args.on_command_line
        # A data flag on the command line wins over --dataset in a config file even if it gives the default: no value of
        # it then counts as off.
        off_value = None if name in on_command_line and "dataset" not in on_command_line else parser.get_default(name)
        parser.choose_one(args, dataset=None, **{name: off_value})
        if args.shuffle == "shards" and hasattr(args, "split_by"):
            if "split_by" in args.explicit and args.split_by == "sample":
                parser.error("--shuffle shards holds out whole shards: leave out --split_by sample")
            args.split_by = "shard"


def data_path(config: DatasetFlags) -> str:
    """The path of a run's samples for an example command; a placeholder with --dataset."""
    return _EXAMPLE_FOLDERS[config.data_flag] if config.dataset else getattr(config, config.data_flag)


def _has_files(args: Any, *folders: str) -> bool:
    """Whether the samples of one of these flags come from files, not from a demonstration."""
    paths = [getattr(args, name, None) for name in folders]
    return any(path is not None and not path.startswith("demo:") for path in paths)


_FROM_FILES = Requirement(
    DATA, "PATH", lambda args: args.dataset is not None or _has_files(args, "video_folder", "image_folder")
)


@dataclass
class PictureFlags(DatasetFlags):
    """Flags of every script that trains on squares of pictures. In --help they follow the flags of a subclass."""

    random_flip: bool = flag(False, "mirror each training sample with probability 1/2")
    crop: str = flag(
        "center",
        "where training cuts the square out of each picture, after its shorter side was resized",
        choices=("center", "random"),
        requires=_FROM_FILES,
    )
    crop_area: tuple[float, ...] | None = flag(
        None,
        "in training, cut the square out of a random part of each picture: the part has from MIN to MAX of the "
        "picture's area, such as 0.5,1, and is 3/4 to 4/3 as wide as high (default: out of the whole picture)",
        area_range,
        requires=_FROM_FILES,
    )


@dataclass
class ImageFlags(PictureFlags):
    """Flags of every script that trains on images."""

    data_flag = "image_folder"

    image_folder: str = flag(
        "demo:shapes",
        "folder of training images (jpg, png, webp, bmp, tiff, ppm, pgm), with subfolders; webdataset tars, Arrow or "
        "parquet files, or a manifest (csv, jsonl), also on a server (s3://...); demo:shapes draws images itself",
        PATH,
        title="images",
        aliases="folder",
    )
    num_images_save: int = flag(4, "images in a sample grid; at most a batch if there is no validation split", size)


@dataclass
class ConditionedImageFlags(ImageFlags):
    """Flags of every script that trains on images with captions and embeddings, and how they are split."""

    image_folder: str = flag(
        "demo:shapes",
        "webdataset tars of images, each with a .txt: a folder, tars/*.tar, {00000..00099}.tar, or {} for "
        "the number; or Arrow or parquet files or a manifest, also on a server; or a folder of images with .txt and "
        ".npy files beside them; images smaller than the largest of --image_sizes are left out; demo:shapes draws "
        "captioned images itself",
        PATH,
        title="images",
        aliases="webdataset_base_url",
    )
    start_shard: int = flag(0, "number of the first tar", non_negative_int)
    end_shard: int | None = flag(None, "number of the last tar (default: of all)", non_negative_int)
    shard_width: int = flag(
        6,
        "digits of the number that {} in --image_folder stands for",
        digit_count,
        requires=Requirement("image_folder", "with {} for the number", lambda args: "{}" in args.image_folder),
    )
    random_flip: bool = flag(
        False, "mirror each training image with probability 1/2; only without captions and stored embeddings"
    )
    num_images_save: int = flag(
        6, "images in a sample grid; at most a batch if there is no validation split", size, aliases="n_sample_images"
    )

    image_embeddings: str | None = flag(
        None,
        "image embeddings, a .npy of rows (n, d) for each tar, such as img_emb_0012.npy: a folder, *.npy, "
        "{0000..0099}.npy or {} (default: those beside the images, KEY.img_emb.npy or KEY.npy)",
        PATH,
        title="embeddings",
        aliases="img_embeddings_url",
        requires=(when("condition_on", "image"), without("clip")),
    )
    text_embeddings: str | None = flag(
        None,
        "text encodings, a .npy (n, tokens, d) for each tar, named as --image_embeddings are (default: those beside "
        "the images, KEY.text_emb.npy)",
        PATH,
        aliases="text_embeddings_url",
        requires=(when("condition_on", "text"), without("clip")),
    )
    index_width: int = flag(
        4,
        "how many digits at the end of an image's key give the number of its row in the .npy",
        digit_count,
        requires=Requirement(
            "image_embeddings", "PATH", lambda args: bool(args.image_embeddings or args.text_embeddings)
        ),
    )
    test_fraction: float = flag(
        0.1, "fraction of the data held out for a test, beside --valid_fraction; 0: none", fraction, title="splits"
    )
    split_by: str = flag("sample", "what is held out: single images, or whole tars", choices=("sample", "shard"))


@dataclass
class VideoFlags(PictureFlags):
    """Flags of every script that trains on videos, perhaps with images between them."""

    data_flag = "video_folder"

    video_folder: str = flag(
        "demo:moving",
        "folder of videos (mp4, m4v, mkv, webm, mov, avi, gif) and images, with subfolders; a csv or jsonl manifest, "
        "webdataset tars, Arrow or parquet files, also on a server; demo:moving draws clips itself",
        PATH,
        title="videos",
        aliases="dataset_folder",
    )
    num_frames: int = flag(17, "frames of a clip", size, metavar="FRAMES")
    fps: float | None = flag(
        None, "frames per second of a clip, chosen by time stamps (default: all frames of the file)", frame_rate
    )
    frame_stride: int = flag(1, "take every N-th frame of the file", positive_int, requires=without("fps"))
    short_clips: str = flag(
        "repeat",
        "what becomes of a video that is shorter than a clip: it is repeated, held at its last frame, or left out",
        choices=("repeat", "hold", "skip"),
        requires=Requirement(DATA, "PATH", lambda args: args.dataset is not None or _has_files(args, "video_folder")),
    )
    clip_starts: str = flag(
        "anywhere",
        "where clips begin in training: keyframe, the last key frame before a random time, is faster to read",
        choices=("anywhere", "keyframe"),
        requires=Requirement(DATA, "PATH", lambda args: _has_files(args, "video_folder")),
    )
    image_folder: str | None = flag(
        None,
        "folder, tars or table of images to train on as clips of one frame; demo:shapes draws images itself "
        "(default: none)",
        PATH,
    )
    image_every: int = flag(
        4, "every N-th update trains on --image_folder", int_above_1, requires=given("image_folder", "PATH")
    )
    num_videos_save: int = flag(3, "clips in a sample picture; at most a batch if there is no validation split", size)


@dataclass
class SoundFlags(DatasetFlags):
    """Flags of every script that trains on sounds and texts."""

    data_flag = "audio_data"

    audio_data: str = flag(
        "demo:tones",
        "csv or jsonl manifest, folder with a .txt or .json per sound, webdataset tars, Arrow or parquet files, also "
        "on a server; demo:tones synthesises sounds",
        PATH,
        title="sounds and texts",
        aliases="folder",
    )
    data_max_length: int | None = flag(
        None, "length of the clip in samples, instead of --clip_seconds", positive_int, metavar="SAMPLES"
    )
    tokenizer: str = flag("clip", "text tokenizer: clip, or the path of a Hugging Face tokenizer.json", FILE)
    num_sounds_shown: int = flag(8, "spectrograms in a sample picture", size)
