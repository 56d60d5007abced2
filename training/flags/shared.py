"""Flags of several scripts. Imports the standard library only, so that `--help` is fast."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tandem.converters import (
    FILE,
    FOLDER,
    NAME,
    PATH,
    PRECISIONS,
    Names,
    area_range,
    average_length,
    digit_count,
    epoch_count,
    fraction,
    frame_rate,
    non_negative_float,
    non_negative_int,
    positive_float,
    positive_int,
    size,
    step_range,
    two_fractions,
    updates,
    updates_or_0,
    words,
    worker_count,
)
from tandem.fields import Needs, flag, given, when

if TYPE_CHECKING:
    from .parser import ArgumentParser

_PLACES = {"image_folder": "photos/", "video_folder": "clips/", "audio_data": "sounds/"}


@dataclass
class OwnDataset:
    """The flag of a user's own dataset, which is given instead of the flag `data_flag`."""

    data_flag: ClassVar[str]

    dataset: str | None = flag(
        None,
        "instead of files: a Python function that gets the arguments of the run and returns an object with __len__ and "
        "__getitem__; its module may be in the current folder; see docs/data.md",
        metavar="MODULE:FUNCTION",
        title="own dataset",
    )

    @classmethod
    def settle(cls, args: argparse.Namespace, parser: ArgumentParser) -> None:
        """Let --dataset and the flag of the data exclude one another, and the command line win over a config file."""
        if args.dataset is None:
            return
        name, default = cls.data_flag, parser.get_default(cls.data_flag)
        for said in (args.on_command_line, args.explicit):
            if name in said and "dataset" not in said:
                args.dataset = None
                return
            if "dataset" in said:
                if name in said and getattr(args, name) != default:
                    parser.error(f"--dataset and --{name} exclude one another; give one of them")
                setattr(args, name, default)
                return


def place_of(args: argparse.Namespace, data_flag: str) -> str:
    """Where the samples of a run are, for a command that reads some: a folder to choose if they are an own dataset."""
    return _PLACES[data_flag] if args.dataset else getattr(args, data_flag)


def _is_cut(args: Any) -> bool:
    """Whether pictures come from files, or a user's own dataset, of which training cuts squares."""
    folders = (getattr(args, "video_folder", None), args.image_folder)
    return args.dataset is not None or any(not (folder or "demo:").startswith("demo:") for folder in folders)


def crop_flag(data_flag: str) -> Any:
    """Where the squares are cut out of the pictures of a flag."""
    return flag(
        "center",
        "where training cuts the square out of each picture, after its shorter side was resized",
        choices=("center", "random"),
        needs=Needs(data_flag, "PATH", _is_cut),
    )


def crop_area_flag(data_flag: str) -> Any:
    """How large the squares are that are cut out of the pictures of a flag."""
    return flag(
        None,
        "cut the square out of a random part of each picture in training that has this share of its area, such as "
        "0.5,1, and a width of 3/4 to 4/3 of its height (default: out of the whole)",
        area_range,
        needs=Needs(data_flag, "PATH", _is_cut),
    )


@dataclass
class ImageFlags(OwnDataset):
    """Of every script that trains on images."""

    data_flag = "image_folder"

    image_folder: str = flag(
        "demo:shapes",
        "folder of training images (jpg, png, webp, bmp, tiff, ppm, pgm), with subfolders; or webdataset "
        "tars; demo:shapes draws images itself",
        PATH,
        title="images",
        also="folder",
    )
    random_flip: bool = flag(False, "mirror each training image with probability 1/2")
    crop: str = crop_flag("image_folder")
    crop_area: tuple[float, ...] | None = crop_area_flag("image_folder")
    num_images_save: int = flag(
        4, "images in a sample grid; at most a batch of them if there is no validation split", size
    )


@dataclass
class ClipFlags:
    """Of every script that computes embeddings by a CLIP."""

    clip: str | None = flag(
        None,
        "compute embeddings from images and texts with this model of open_clip, such as ViT-L-14-quickgelu, "
        "or the path of its open_clip_config.json; longer captions than it takes are cut off at its last "
        "token",
        NAME,
        title="embeddings",
    )
    clip_weights: str | None = flag(
        None, "weights for --clip: safetensors or a plain state dict", FILE, needs=given("clip", "NAME")
    )

    @classmethod
    def settle(cls, args: argparse.Namespace, parser: ArgumentParser) -> None:
        if args.clip is not None and args.clip_weights is None:
            parser.error(
                f"--clip {args.clip} needs the file of its weights: give --clip_weights; nothing is downloaded"
            )


_BY_ROW = Needs(
    "image_embeddings", "PATH", lambda args: args.image_embeddings is not None or args.text_embeddings is not None
)


@dataclass
class ConditionedImageFlags(ClipFlags, OwnDataset):
    """Of every script that trains on images with captions and embeddings."""

    data_flag = "image_folder"

    image_folder: str = flag(
        "demo:shapes",
        "webdataset tars of images, each with a .txt: a folder, tars/*.tar, {00000..00099}.tar, or {} for "
        "the number; or a folder of images with .txt and .npy files beside them; images smaller than the "
        "pictures to draw are left out; demo:shapes draws captioned images itself",
        PATH,
        title="images",
        also="webdataset_base_url",
    )
    start_shard: int = flag(0, "number of the first tar", non_negative_int)
    end_shard: int | None = flag(None, "number of the last tar (default: of all)", non_negative_int)
    shard_width: int = flag(
        6,
        "digits of the number that {} in --image_folder stands for",
        digit_count,
        needs=Needs("image_folder", "with {} for the number", lambda args: "{}" in args.image_folder),
    )
    random_flip: bool = flag(
        False, "mirror each training image with probability 1/2; only without captions and stored embeddings"
    )
    crop: str = crop_flag("image_folder")
    crop_area: tuple[float, ...] | None = crop_area_flag("image_folder")
    num_images_save: int = flag(
        6,
        "images in a sample grid; at most a batch of them if there is no validation split",
        size,
        also="n_sample_images",
    )
    image_embeddings: str | None = flag(
        None,
        "image embeddings, a .npy of rows (n, d) for each tar, such as img_emb_0012.npy: a folder, *.npy, "
        "{0000..0099}.npy or {} (default: those beside the images, KEY.img_emb.npy or KEY.npy)",
        PATH,
        title="embeddings",
        also="img_embeddings_url",
    )
    text_embeddings: str | None = flag(
        None,
        "text encodings likewise, (n, tokens, d) (default: those beside the images, KEY.text_emb.npy)",
        PATH,
        also="text_embeddings_url",
    )
    index_width: int = flag(
        4, "digits at the end of an image's key that are the number of its row", digit_count, needs=_BY_ROW
    )
    test_fraction: float = flag(
        0.1,
        "fraction of the data that is held out for a test, beside --valid_fraction; 0: none",
        fraction,
        title="splits",
    )
    split_by: str = flag("sample", "what is held out: single images, or whole tars", choices=("sample", "shard"))


_OF_FILES = Needs(
    "video_folder", "PATH", lambda args: args.dataset is not None or not args.video_folder.startswith("demo:")
)


@dataclass
class VideoFlags(OwnDataset):
    """Of every script that trains on videos, perhaps with images between them."""

    data_flag = "video_folder"

    video_folder: str = flag(
        "demo:moving",
        "folder of videos (mp4, m4v, mkv, webm, mov, avi, gif) and images, with subfolders; a csv or jsonl "
        "manifest; or webdataset tars; demo:moving draws clips itself",
        PATH,
        title="videos",
        also="dataset_folder",
    )
    num_frames: int = flag(17, "frames of a clip", size, metavar="FRAMES")
    fps: float | None = flag(
        None, "frames per second of a clip, chosen by time stamps (default: all frames of the file)", frame_rate
    )
    frame_stride: int = flag(1, "take every N-th frame of the file", positive_int)
    short_clips: str = flag(
        "repeat",
        "a video that is shorter than a clip is repeated, held at its last frame, or left out",
        choices=("repeat", "hold", "skip"),
        needs=_OF_FILES,
    )
    clip_starts: str = flag(
        "anywhere",
        "where clips begin in training: keyframe, the last key frame before a random time, is faster to read",
        choices=("anywhere", "keyframe"),
        needs=Needs("video_folder", "PATH", lambda args: not args.video_folder.startswith("demo:")),
    )
    random_flip: bool = flag(False, "mirror each training clip with probability 1/2")
    crop: str = crop_flag("video_folder")
    crop_area: tuple[float, ...] | None = crop_area_flag("video_folder")
    image_folder: str | None = flag(
        None,
        "folder or webdataset tars of images to train on as clips of one frame; demo:shapes draws images "
        "itself (default: none)",
        PATH,
    )
    image_every: int = flag(
        4, "with --image_folder, every N-th update is one of images", positive_int, needs=given("image_folder", "PATH")
    )
    num_videos_save: int = flag(
        3, "clips in a sample picture; at most a batch of them if there is no validation split", size
    )


@dataclass
class SoundFlags(OwnDataset):
    """Of every script that trains on sounds and texts."""

    data_flag = "audio_data"

    audio_data: str = flag(
        "demo:tones",
        "csv or jsonl manifest, folder with a .txt or .json per sound, or webdataset tars; demo:tones "
        "synthesises sounds",
        PATH,
        title="sounds and texts",
        also="folder",
    )
    data_max_length: int | None = flag(
        None, "length of the clip in samples, instead of --clip_seconds", positive_int, metavar="SAMPLES"
    )
    tokenizer: str = flag("clip", "text tokenizer: clip, or the path of a Hugging Face tokenizer.json", FILE)
    num_sounds_shown: int = flag(8, "spectrograms in a sample picture", size)


@dataclass
class RateFlags:
    """Of every script with one learning rate that is warmed up (`training.schedules`)."""

    learning_rate: float = flag(0.0003, "highest learning rate", positive_float, title="schedule", also="lr")
    lr_warmup_steps: int = flag(
        0, "updates of linear warm-up from 0, at most half of the run", updates_or_0, also="warmup_steps"
    )


@dataclass
class OptimizerFlags:
    """Of every script that trains by AdamW or Lion (`make_optimizer`)."""

    betas: tuple[float, ...] = flag((0.9, 0.99), "betas of the optimizer", two_fractions, title="optimizer")
    use_lion: bool = flag(False, "use Lion instead of AdamW")


@dataclass
class DecayingOptimizerFlags(RateFlags, OptimizerFlags):
    """The same, with one learning rate and one weight decay."""

    weight_decay: float = flag(
        0.01, "weight decay of matrices; biases and scales do not decay", non_negative_float, title="optimizer"
    )


@dataclass
class RemoteFlags:
    """Of every script: the order of samples that are in shards, and where shards from servers are kept."""

    shuffle: str = flag(
        "samples",
        "order of training: shuffle all samples; or shuffle the shards (tars, files of tables), and the samples of "
        "four shards at a time, so that shards on servers are read as a whole; whole shards are then held out, too",
        choices=("samples", "shards"),
        title="shards and servers",
        lasting=True,
    )
    cache_dir: str | None = flag(
        None,
        "folder on the local disk that keeps shards from servers, for all runs of this machine (default: none is kept)",
        FOLDER,
        needs=when("shuffle", "shards"),
    )
    cache_gb: float = flag(
        50.0,
        "size of --cache_dir in GB; the shards of longest ago are deleted",
        positive_float,
        needs=given("cache_dir", "FOLDER"),
    )

    @classmethod
    def settle(cls, args: argparse.Namespace, parser: ArgumentParser) -> None:
        if args.shuffle == "shards" and hasattr(args, "split_by"):
            if "split_by" in args.explicit and args.split_by == "sample":
                parser.error("--shuffle shards holds out whole shards: leave out --split_by sample")
            args.split_by = "shard"


_ENDLESS = 1e9  # epochs, where the number of updates ends a run
_WANDB = when("report_to", "wandb")


@dataclass
class RunFlags(RemoteFlags):
    """Of every script."""

    output_dir: str = flag(
        "runs/",
        "run folder; if it holds a run, that run is resumed",
        FOLDER,
        title="run",
        also=("results_folder", "checkpoints_folder"),
    )
    config: str | None = flag(
        None, "YAML file of flags, written without dashes; flags on the command line override it", FILE
    )
    fresh: bool = flag(False, "start over; a run in --output_dir is renamed to DIR.old-N")
    dry_run: bool = flag(
        False,
        "make three updates, a validation, a picture and a checkpoint in a folder of their own, say what "
        "they and the whole run take, and delete them",
    )
    seed: int = flag(0, "seed of the initial weights, the data order and the noise", non_negative_int)
    epochs: float = flag(20, "passes over the training data", epoch_count)
    max_steps: int | None = flag(
        None,
        "stop after this number of updates, if --epochs would last longer; as --num_train_steps, epochs alone do not "
        "end the run",
        updates,
        also="num_train_steps",
    )
    batch_size: int = flag(
        8,
        "samples per update, over all processes and accumulation steps",
        size,
        metavar="SAMPLES",
        title="optimisation",
    )
    grad_accum_steps: int = flag(
        1, "gradient accumulation: micro-batches per update, on each process", size, also="grad_accum_every"
    )
    max_grad_norm: float = flag(0.0, "clip the gradient to this 2-norm; 0: no clipping", non_negative_float)
    ema_decay: float = flag(
        0.0, "decay per update of an exponential moving average of the weights; 0: no average", fraction
    )
    ema_power: list[float] | None = flag(
        None,
        "averages of the weights that grow with the run, instead of --ema_decay: the standard deviation of "
        "each one's profile as a fraction of the run, such as 0.05 0.10; every save writes them to "
        "snapshots/ too, so that convert.py average can choose another length afterwards; the run keeps the "
        "first one (default: none)",
        average_length,
        nargs="+",
    )
    max_skipped_updates: int = flag(
        20,
        "updates that are skipped in a row, because loss or gradient is not finite, before the run stops",
        updates_or_0,
    )
    precision: str = flag(
        "fp32",
        "precision of the forward and backward pass, validation and pictures; weights and optimizer moments "
        "stay fp32; tf32: fp32 whose products GPUs may round to 10 bits of the mantissa, which is faster "
        "there",
        choices=PRECISIONS,
        title="precision",
    )
    compile: bool = flag(False, "compile the model with torch.compile")
    num_workers: int = flag(
        2, "loader processes per training process; 0: load in the training process", worker_count, title="data loading"
    )
    valid_fraction: float = flag(
        0.05, "fraction of the data that is held out for validation; 0: none", fraction, also="valid_frac"
    )
    valid_folder: str | None = flag(
        None, "another set of the same kind, all of which is the validation split, instead of --valid_fraction", PATH
    )
    split_seed: int | None = flag(
        None,
        "seed that chooses the validation split; without one, that of --seed",
        non_negative_int,
        also="random_split_seed",
    )
    valid_samples: int | None = flag(
        None,
        "samples of the validation split that a validation sees, always the same ones and at least a batch; "
        "at the end of the run the whole split is measured besides; 0: the whole split each time (default: "
        "a tenth of the samples that are trained on between two validations)",
        non_negative_int,
        metavar="SAMPLES",
        also="validation_samples",
    )
    on_bad_sample: str = flag(
        "replace",
        "if a file cannot be read, replace it by the next sample, or stop with an error; accept: take what "
        "Pillow can read of an image that is cut off, and replace all others",
        choices=("replace", "accept", "error"),
    )
    log_every_n_steps: int = flag(
        10,
        "updates between two lines of metrics.jsonl; losses in a line are of its own update, not means",
        updates,
        title="validation and logging",
    )
    validate_every_n_steps: int = flag(
        100,
        "updates between two measurements on the validation split; 0: only at the end",
        updates_or_0,
        also="validate_every_step",
    )
    sample_every_n_steps: int = flag(
        100, "updates between two pictures in samples/; 0: only at the end", updates_or_0, also="save_results_every"
    )
    profile_steps: tuple[int, int] | None = flag(
        None,
        "record these updates, counted from 1, with torch.profiler; the trace and a table come into "
        "profile/ in the run folder",
        step_range,
    )
    report_to: tuple[str, ...] = flag(
        (),
        "trackers in addition to metrics.jsonl: none, or a comma list of tensorboard, wandb",
        Names("tensorboard", "wandb"),
    )
    wandb_project: str | None = flag(
        None,
        "project of the run on Weights & Biases (default: wandb's own choice)",
        NAME,
        needs=_WANDB,
        also="project_name",
    )
    wandb_entity: str | None = flag(
        None, "user or team of the project (default: that of wandb's login)", NAME, needs=_WANDB
    )
    wandb_name: str | None = flag(
        None,
        "name of the run on Weights & Biases (default: that of its folder)",
        NAME,
        needs=_WANDB,
        also=("run_name", "wandb_run_name"),
    )
    wandb_tags: tuple[str, ...] | None = flag(None, "tags of the run on Weights & Biases", words, needs=_WANDB)
    save_every_n_steps: int = flag(
        100,
        "updates between two checkpoints; 0: only at the end",
        updates_or_0,
        title="checkpoints",
        also=("save_model_every", "checkpoint_every_step"),
    )
    keep_n_checkpoints: int = flag(3, "keep this number of newest checkpoints and delete older ones", positive_int)
    save_before_minutes: float | None = flag(
        None,
        "save and exit with code 75 before the process has run this long: for a scheduler's time limit",
        positive_float,
        metavar="MINUTES",
    )

    @classmethod
    def settle(cls, args: argparse.Namespace, parser: ArgumentParser) -> None:
        if args.said_as.get("max_steps") == "num_train_steps" and "epochs" not in args.explicit:
            args.epochs = _ENDLESS
        parser.choose(args, ema_power=None, ema_decay=0.0)
        parser.choose(args, valid_folder=None, valid_fraction=0.0)
