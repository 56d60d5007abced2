"""Flags of several scripts. Imports the standard library only, so that `--help` is fast."""

import argparse
from collections.abc import Callable
from typing import Any

from .converters import (
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
    pixels,
    positive_float,
    positive_int,
    size,
    step_range,
    two_fractions,
    words,
    worker_count,
)
from .own_data import add_dataset_argument
from .parser import ArgumentParser

# fmt: off


def add_image_arguments(parser: ArgumentParser, *, image_size: int, image_size_help: str) -> None:
    """Add the flags of every script that trains on images."""
    add = parser.add_argument_group("images").add_argument
    add("--image_folder", metavar="PATH", default="demo:shapes",
        help="folder of training images (jpg, png, webp, bmp, tiff, ppm, pgm), with subfolders; or webdataset tars; "
        "demo:shapes draws images itself")
    add("--image_size", type=pixels, default=image_size, metavar="PIXELS", help=image_size_help)
    add("--random_flip", action="store_true", help="mirror each training image with probability 1/2")
    _add_crops(add, "image")
    add("--num_images_save", type=size, default=4, metavar="N",
        help="images in a sample grid; at most a batch of them if there is no validation split")
    add_dataset_argument(parser, "image_folder")


def add_conditioned_image_arguments(parser: ArgumentParser) -> None:
    """Add the flags of every script that trains on images with captions and embeddings."""
    add = parser.add_argument_group("images").add_argument
    add("--image_folder", metavar="PATH", default="demo:shapes",
        help="webdataset tars of images, each with a .txt: a folder, tars/*.tar, {00000..00099}.tar, or {} for the "
        "number; or a folder of images with .txt and .npy files beside them; images smaller than the pictures to draw "
        "are left out; demo:shapes draws captioned images itself")
    add("--start_shard", type=non_negative_int, default=0, metavar="N", help="number of the first tar")
    add("--end_shard", type=non_negative_int, metavar="N", help="number of the last tar (default: of all)")
    add("--shard_width", type=digit_count, default=6, metavar="DIGITS",
        help="digits of the number that {} in --image_folder stands for")
    add("--random_flip", action="store_true",
        help="mirror each training image with probability 1/2; only without captions and stored embeddings")
    _add_crops(add, "image")
    add("--num_images_save", type=size, default=6, metavar="N",
        help="images in a sample grid; at most a batch of them if there is no validation split")

    add = parser.add_argument_group("embeddings").add_argument
    add("--image_embeddings", metavar="PATH",
        help="image embeddings, a .npy of rows (n, d) for each tar, such as img_emb_0012.npy: a folder, *.npy, "
        "{0000..0099}.npy or {} (default: those beside the images, KEY.img_emb.npy or KEY.npy)")
    add("--text_embeddings", metavar="PATH",
        help="text encodings likewise, (n, tokens, d) (default: those beside the images, KEY.text_emb.npy)")
    add("--index_width", type=digit_count, default=4, metavar="DIGITS",
        help="digits at the end of an image's key that are the number of its row")
    add("--clip", metavar="NAME",
        help="compute embeddings from images and texts with this model of open_clip, such as ViT-L-14-quickgelu, or "
        "the path of its open_clip_config.json; longer captions than it takes are cut off at its last token")
    add("--clip_weights", metavar="FILE", help="weights for --clip: safetensors or a plain state dict")

    add = parser.add_argument_group("splits").add_argument
    add("--test_fraction", type=fraction, default=0.1, metavar="FRACTION",
        help="fraction of the data that is held out for a test, beside --valid_fraction; 0: none")
    add("--split_by", type=str.lower, choices=("sample", "shard"), default="sample",
        help="what is held out: single images, or whole tars")
    add_dataset_argument(parser, "image_folder")


def _add_crops(add: Callable[..., Any], noun: str) -> None:
    """Add the flags of what is cut out of pictures in training."""
    add("--crop", type=str.lower, choices=("center", "random"), default="center",
        help=f"where training cuts the square out of each {noun}, after its shorter side was resized")
    add("--crop_area", type=area_range, metavar="MIN,MAX",
        help=f"cut the square out of a random part of each training {noun} that has this share of its area, such as "
        "0.5,1, and a width of 3/4 to 4/3 of its height (default: out of the whole)")


def add_video_arguments(parser: ArgumentParser, *, image_size: int, image_size_help: str) -> None:
    """Add the flags of every script that trains on videos, perhaps with images between them."""
    add = parser.add_argument_group("videos").add_argument
    add("--video_folder", metavar="PATH", default="demo:moving",
        help="folder of videos (mp4, m4v, mkv, webm, mov, avi, gif) and images, with subfolders; a csv or jsonl "
        "manifest; or webdataset tars; demo:moving draws clips itself")
    add("--image_size", type=pixels, default=image_size, metavar="PIXELS", help=image_size_help)
    add("--num_frames", type=size, default=17, metavar="FRAMES", help="frames of a clip")
    add("--fps", type=frame_rate, metavar="HZ",
        help="frames per second of a clip, chosen by time stamps (default: all frames of the file)")
    add("--frame_stride", type=positive_int, default=1, metavar="N", help="take every N-th frame of the file")
    add("--short_clips", type=str.lower, choices=("repeat", "hold", "skip"), default="repeat",
        help="a video that is shorter than a clip is repeated, held at its last frame, or left out")
    add("--clip_starts", type=str.lower, choices=("anywhere", "keyframe"), default="anywhere",
        help="where clips begin in training: keyframe, the last key frame before a random time, is faster to read")
    add("--random_flip", action="store_true", help="mirror each training clip with probability 1/2")
    _add_crops(add, "clip")
    add("--image_folder", metavar="PATH",
        help="folder or webdataset tars of images to train on as clips of one frame; demo:shapes draws images itself "
        "(default: none)")
    add("--image_every", type=positive_int, default=4, metavar="N",
        help="with --image_folder, every N-th update is one of images")
    add("--num_videos_save", type=size, default=3, metavar="N",
        help="clips in a sample picture; at most a batch of them if there is no validation split")
    add_dataset_argument(parser, "video_folder")


def add_sound_arguments(parser: ArgumentParser) -> None:
    """Add the flags of every script that trains on sounds and texts."""
    add = parser.add_argument_group("sounds and texts").add_argument
    add("--audio_data", metavar="PATH", default="demo:tones",
        help="csv or jsonl manifest, folder with a .txt or .json per sound, or webdataset tars; demo:tones synthesises "
        "sounds")
    add("--sample_rate", type=size, default=16000, metavar="HZ",
        help="sample rate to which all sounds are resampled")
    add("--clip_seconds", type=positive_float, default=10.0, metavar="SECONDS",
        help="length of the clip cut from a sound: at a random place in training, from the middle in validation")
    add("--data_max_length", type=positive_int, metavar="SAMPLES",
        help="length of the clip in samples, instead of --clip_seconds")
    add("--tokenizer", default="clip", metavar="FILE",
        help="text tokenizer: clip, or the path of a Hugging Face tokenizer.json")
    add("--max_text_tokens", type=size, default=256, metavar="TOKENS",
        help="texts are cut off after this number of tokens")
    add("--num_sounds_shown", type=size, default=8, metavar="N", help="spectrograms in a sample picture")

    add = parser.add_argument_group("spectrogram").add_argument
    add("--spectrogram", type=str.lower, choices=("log_mel", "power"), default="log_mel",
        help="kind of spectrogram that the model is given")
    add("--n_fft", type=size, default=1024, metavar="SAMPLES", help="length of the Fourier transform's window")
    add("--win_length", type=size, metavar="SAMPLES",
        help="length of the window, in the middle of the Fourier transform's (default: --n_fft)")
    add("--spectrogram_padding", type=str.lower, choices=("silence", "reflect"), default="silence",
        help="what a spectrogram takes for the sound beyond its ends: silence, or the sound itself, mirrored")
    add("--hop_length", type=size, default=160, metavar="SAMPLES",
        help="distance between two windows of the Fourier transform")
    add("--n_mels", type=size, default=64, metavar="BANDS", help="number of mel bands")
    add("--fmin", type=non_negative_float, default=0.0, metavar="HZ", help="lowest frequency of the mel bands")
    add("--fmax", type=positive_float, metavar="HZ",
        help="highest frequency of the mel bands (default: half of --sample_rate)")
    add("--time_mask_fraction", type=fraction, default=0.2, metavar="FRACTION",
        help="SpecAugment in training: mask up to this fraction of the time")
    add("--frequency_mask_fraction", type=fraction, default=0.25, metavar="FRACTION",
        help="SpecAugment in training: mask up to this fraction of the frequencies")
    add_dataset_argument(parser, "audio_data")


def add_optimizer_arguments(parser: argparse.ArgumentParser, *, betas: str, weight_decay: float | None = None) -> None:
    """Add the flags of every script that trains by AdamW or Lion (`make_optimizer`); the parameters are defaults.
    Without weight_decay, the script has a flag of its own for it."""
    add = parser.add_argument_group("optimizer").add_argument
    add("--betas", type=two_fractions, default=betas, metavar="B1,B2", help="betas of the optimizer")
    if weight_decay is not None:
        add("--weight_decay", type=non_negative_float, default=weight_decay, metavar="DECAY",
            help="weight decay of matrices; biases and scales do not decay")
    add("--use_lion", action="store_true", help="use Lion instead of AdamW")


def add_run_arguments(
    parser: ArgumentParser,
    *,
    output_dir: str,
    epochs: float = 20,
    batch_size: int = 8,
    max_grad_norm: float = 0.0,
    precision: str = "fp32",
    num_workers: int = 2,
    ema_decay: float = 0.0,
    valid_fraction: float = 0.05,
    split_seed: int | None = None,
    validate_every_n_steps: int = 100,
    sample_every_n_steps: int = 100,
    save_every_n_steps: int = 100,
    is_deep: bool = False,
) -> None:
    """Add the flags that every script has.

    Args:
        parser: Gets the flags.
        is_deep: Whether the model is deep enough to gain by --gradient_checkpointing.
        output_dir: This and the other arguments are the defaults of the flags of the same names.
    """

    add = parser.add_argument_group("run").add_argument
    add("--output_dir", default=output_dir, metavar="DIR",
        help="run folder; if it holds a run, that run is resumed")
    add("--config", metavar="FILE",
        help="YAML file of flags, written without dashes; flags on the command line override it")
    add("--fresh", action="store_true", help="start over; a run in --output_dir is renamed to DIR.old-N")
    add("--dry_run", action="store_true",
        help="make three updates, a validation, a picture and a checkpoint in a folder of their own, say what they and "
        "the whole run take, and delete them")
    add("--seed", type=non_negative_int, default=0, metavar="INT",
        help="seed of the initial weights, the data order and the noise")
    add("--epochs", type=epoch_count, default=epochs, metavar="EPOCHS", help="passes over the training data")
    add("--max_steps", type=positive_int, metavar="UPDATES",
        help="stop after this number of updates, if --epochs would last longer")

    add = parser.add_argument_group("optimisation").add_argument
    add("--batch_size", type=size, default=batch_size, metavar="SAMPLES",
        help="samples per update, over all processes and accumulation steps")
    add("--grad_accum_steps", type=size, default=1, metavar="N",
        help="gradient accumulation: micro-batches per update, on each process")
    add("--max_grad_norm", type=non_negative_float, default=max_grad_norm, metavar="NORM",
        help="clip the gradient to this 2-norm; 0: no clipping")
    add("--ema_decay", type=fraction, default=ema_decay, metavar="DECAY",
        help="decay per update of an exponential moving average of the weights; 0: no average")
    add("--ema_power", type=average_length, nargs="+", metavar="LENGTH",
        help="averages of the weights that grow with the run, instead of --ema_decay: the standard deviation of each "
        "one's profile as a fraction of the run, such as 0.05 0.10; every save writes them to snapshots/ too, so that "
        "convert.py average can choose another length afterwards; the run keeps the first one (default: none)")
    add("--max_skipped_updates", type=non_negative_int, default=20, metavar="UPDATES",
        help="updates that are skipped in a row, because loss or gradient is not finite, before the run stops")
    parser.add_alternatives(ema_power=None, ema_decay=0.0)

    add = parser.add_argument_group("precision").add_argument
    add("--precision", type=str.lower, choices=PRECISIONS, default=precision,
        help="precision of the forward and backward pass, validation and pictures; weights and optimizer moments stay "
        "fp32; tf32: fp32 whose products GPUs may round to 10 bits of the mantissa, which is faster there")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    if is_deep:
        add("--gradient_checkpointing", action="store_true",
            help="compute the layers' activations again in the backward pass: slower, and far less memory")

    add = parser.add_argument_group("data loading").add_argument
    add("--num_workers", type=worker_count, default=num_workers, metavar="N",
        help="loader processes per training process; 0: load in the training process")
    add("--valid_fraction", type=fraction, default=valid_fraction, metavar="FRACTION",
        help="fraction of the data that is held out for validation; 0: none")
    add("--valid_folder", metavar="PATH",
        help="another set of the same kind, all of which is the validation split, instead of --valid_fraction")
    add("--split_seed", type=non_negative_int, default=split_seed, metavar="INT",
        help=f"seed that chooses the validation split{'' if split_seed else ' (default: --seed)'}")
    parser.add_alternatives(valid_folder=None, valid_fraction=0.0)
    add("--valid_samples", type=non_negative_int, metavar="SAMPLES",
        help="samples of the validation split that a validation sees, always the same ones and at least a batch; at "
        "the end of the run the whole split is measured besides; 0: the whole split each time (default: a tenth of the "
        "samples that are trained on between two validations)")
    add("--on_bad_sample", type=str.lower, choices=("replace", "accept", "error"), default="replace",
        help="if a file cannot be read, replace it by the next sample, or stop with an error; accept: take what can be "
        "read of it, the beginning of an image, video or sound, and replace it if that is nothing")

    add = parser.add_argument_group("validation and logging").add_argument
    add("--log_every_n_steps", type=positive_int, default=10, metavar="UPDATES",
        help="updates between two lines of metrics.jsonl; losses in a line are of its own update, not means")
    add("--validate_every_n_steps", type=non_negative_int, default=validate_every_n_steps, metavar="UPDATES",
        help="updates between two measurements on the validation split; 0: only at the end")
    add("--sample_every_n_steps", type=non_negative_int, default=sample_every_n_steps, metavar="UPDATES",
        help="updates between two pictures in samples/; 0: only at the end")
    add("--profile_steps", type=step_range, metavar="FIRST:LAST",
        help="record these updates, counted from 1, with torch.profiler; the trace and a table come into profile/ in "
        "the run folder")
    add("--report_to", type=Names("tensorboard", "wandb"), default="none", metavar="NAMES",
        help="trackers in addition to metrics.jsonl: none, or a comma list of tensorboard, wandb")
    add("--wandb_project", metavar="NAME", help="project of the run on Weights & Biases (default: wandb's own choice)")
    add("--wandb_entity", metavar="NAME", help="user or team of the project (default: that of wandb's login)")
    add("--wandb_name", metavar="NAME", help="name of the run on Weights & Biases (default: that of its folder)")
    add("--wandb_tags", type=words, metavar="TAG,TAG...", help="tags of the run on Weights & Biases")
    parser.add_consequence(lambda args: parser.refuse_idle(
        args, ["wandb_project", "wandb_entity", "wandb_name", "wandb_tags"], "report_to", "wandb",
        "wandb" in args.report_to,
    ))  # fmt: skip

    add = parser.add_argument_group("checkpoints").add_argument
    add("--save_every_n_steps", type=non_negative_int, default=save_every_n_steps, metavar="UPDATES",
        help="updates between two checkpoints; 0: only at the end")
    add("--keep_n_checkpoints", type=positive_int, default=3, metavar="N",
        help="keep this number of newest checkpoints and delete older ones")
    add("--save_before_minutes", type=positive_float, metavar="MINUTES",
        help="save and exit with code 75 before the process has run this long: for a scheduler's time limit")
