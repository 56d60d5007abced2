"""Write the codes of images with a trained DiscreteVAE or VQGAN, or of videos and images with a trained VideoTokenizer;
or the latents of a VQGAN or VideoTokenizer without codes; or decode them to images or videos.

    python encode.py --model runs/vqgan --image_folder photos/ --output codes/
    torchrun --nproc_per_node 8 encode.py --model runs/tokenizer --video_folder clips/ --output codes/
    deepspeed encode.py --model runs/tokenizer --video_folder clips/ --output codes/
    horovodrun -np 8 python encode.py --model runs/tokenizer --video_folder clips/ --output codes/
    python encode.py --model runs/vqgan --decode codes/ --output images/
    python encode.py --model runs/vae --image_folder photos/ --output latents/ --with_flip --normalize channels
    python encode.py --model runs/video_vae --video_folder clips/ --output latents/ --latent moments
    python encode.py --model runs/tokenizer --decode codes/ --output videos/ --format mp4

The files are the same, byte for byte, for every launcher and any number of processes, loader workers and threads. Run
the same command again to continue after an interruption. The model encodes videos frame by frame, and what it gives
goes to the disk at once, so that the memory does not depend on their length, except for models with the layer
attend_time, which keep all earlier frames unless they were trained with --time_window. In tandem/data/stores/, codes.py
describes codes/, and latents.py describes latents/. Codes load in two lines:

    codes = safetensors.numpy.load_file("codes/codes-00000.safetensors")["codes"]  # a row per line of index.jsonl
    video_codes = codes[line["row"]:][:line["code_frames"]]  # line: json.loads of a line of codes/index.jsonl

With --keep_aspect, each video has its own "grid" in its line: tandem/data/stores/codes.py says how to load it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem import distributed
from tandem.config.converters import (
    FOLDER,
    PATH,
    frame_rate,
    non_negative_int,
    picture_sides,
    pixels,
    pixels_or_0,
    positive_int,
    size,
)
from tandem.config.fields import flag, given, when, without
from tandem.config.parser import ArgumentParser
from tandem.config.shared import bad_sample_flag, kernel_settings
from tandem.io.reading import counted
from tandem.launch import fetch_model, inference_parser, start_inference
from tandem.sides import Sides, height_and_width, sides_text
from tandem.weights.load import default_weights_path, open_model, resolve
from tandem.weights.origin import find_run, read_run_arguments

if TYPE_CHECKING:  # importing PyTorch takes seconds: functions do it after the arguments have been checked
    from torch import Tensor

    from tandem.data.fields import SampleDataset
    from tandem.data.stores.codes import StoredCodes
    from tandem.data.stores.shards import Encode, ShardWriter
    from tandem.distributed import ProcessGroup
    from tandem.models import VideoTokenizer

DEMO_FRAMES = 41  # of a demonstration clip
# Formats of the files that are written of each kind, the default first.
ENCODED = {"images": ("safetensors", "npy"), "videos": ("safetensors",)}
DECODED = {"images": ("png", "npy"), "videos": ("mp4", "gif", "png")}
PNG_CHANNELS = (1, 3, 4)
NORMALIZATIONS = ("none", "scale", "channels")
# Requirements of flags.
_ENCODING_ONLY = without("decode")
_IMAGES_ONLY, _VIDEOS_ONLY = given("image_folder", "PATH"), given("video_folder", "PATH")
_LATENT_FLAGS = ("latent", "latent_dtype", "with_flip", "normalize", "seed")  # flags for models without codes


@dataclass
class Config:
    """The data to encode or decode, and how."""

    image_folder: str | None = flag(
        None,
        "images to encode: a folder (jpg, png, webp, bmp, tiff, ppm, pgm) with subfolders, webdataset tars, tables or "
        "a manifest; demo:shapes draws images itself",
        PATH,
        title="encode or decode",
    )
    video_folder: str | None = flag(
        None,
        "videos and images to encode: a folder (mp4, m4v, mkv, webm, mov, avi, gif) with subfolders, a csv or jsonl "
        "manifest, or webdataset tars; demo:moving draws clips itself",
        PATH,
    )
    decode: str | None = flag(None, "folder of codes or latents to decode to images or videos", FOLDER)
    format: str | None = flag(
        None,
        "format of codes and latents: safetensors (default), or npy, which adds a .npy to each safetensors file of "
        "codes of images, and writes latents as a .npy for each image and one for its label. Format of decoded videos: "
        "mp4 (default), gif (holds a whole video in memory) or png, a folder of frames for each video; a video of one "
        "frame is always a png. Of decoded images: png (default), or npy, fp32 (channels, height, width) in [0, 1], "
        "which is the default for numbers of channels that no PNG has",
        choices=("safetensors", "npy", "png", "mp4", "gif"),
    )

    sound_from: str | None = flag(
        None,
        "folder of the videos that were encoded, whose sound is written to the decoded .mp4 files",
        FOLDER,
        requires=given("decode", "DIR"),
    )
    image_size: Sides | None = flag(
        None,
        "sides of the centre crop (default: the model's)",
        picture_sides,
        requires=_ENCODING_ONLY,
        title="encoding",
    )
    images_per_shard: int = flag(1024, "images whose codes share a file", size, metavar="IMAGES", requires=_IMAGES_ONLY)
    videos_per_shard: int = flag(
        8, "videos whose codes share a file; 1 suits long films", size, metavar="VIDEOS", requires=_VIDEOS_ONLY
    )
    fps: float | None = flag(
        None, "frames per second, chosen by time stamps (default: all frames)", frame_rate, requires=_VIDEOS_ONLY
    )
    frame_stride: int = flag(
        1, "take every N-th frame of a video", positive_int, requires=(_VIDEOS_ONLY, without("fps"))
    )
    keep_aspect: bool = flag(
        False,
        "keep the shape of each video: its shorter side is --image_size, of two the smaller one, and both are cut to a "
        "multiple of the pixels of a code (default: the middle of the video)",
        requires=_VIDEOS_ONLY,
    )
    tile: int | None = flag(
        None,
        "encode to latents, or decode, videos in square tiles of this side, which are blended where they overlap: a "
        "GPU needs the memory of one tile, and the result differs from that of whole frames (docs/tokenizer.md)",
        pixels,
        requires=without("image_folder"),
    )
    tile_overlap: int | None = flag(
        None,
        "pixels that neighbouring tiles share (default: a quarter of --tile, in whole latents, at least one)",
        pixels_or_0,
        requires=given("tile", "PIXELS"),
    )
    on_bad_sample: str = bad_sample_flag(_ENCODING_ONLY)
    report: bool = flag(False, "print how many codes are used, and their perplexity", requires=_ENCODING_ONLY)

    with_flip: bool = flag(
        False,
        "write the latents of mirrored images as well",
        requires=_IMAGES_ONLY,
        title="latents of a model without codes",
    )
    latent: str = flag(
        "mean",
        "what is written of the Gaussian of an image, or of a frame of latents: its mean, a sample, or its mean and "
        "standard deviation",
        choices=("mean", "sample", "moments"),
        requires=_ENCODING_ONLY,
    )
    latent_dtype: str = flag("fp16", "dtype of the latents", choices=("fp16", "bf16", "fp32"), requires=_ENCODING_ONLY)
    normalize: str = flag(
        "none",
        "write latents as the encoder gives them, or (latent - shift_factor) * scaling_factor (scale; one number each "
        "for all channels), or (latent - latents_mean) / latents_std (channels; one for each channel), by the numbers "
        "in the model's config.json",
        choices=NORMALIZATIONS,
        requires=_ENCODING_ONLY,
    )
    seed: int = flag(0, "seed of the samples", non_negative_int, requires=when("latent", "sample"))

    @classmethod
    def validate(cls, args: argparse.Namespace, parser: ArgumentParser) -> None:
        parser.choose_one(args, image_folder=None, video_folder=None, decode=None)
        if not (args.image_folder or args.video_folder or args.decode):
            parser.error("nothing to do: give --image_folder, --video_folder or --decode")
        try:
            validate_kinds(args, *possible_kinds(args))
        except ValueError as error:
            parser.error(str(error))


def possible_kinds(args: argparse.Namespace) -> tuple[str, ...]:
    """The kinds of data, "images" and "videos", that the flags allow: codes to decode may be of either kind."""
    if args.decode:
        return ("images", "videos")
    return ("images",) if args.image_folder else ("videos",)


def validate_kinds(args: argparse.Namespace, *kinds: str) -> None:
    """Set the default of --format for one kind. Raises ValueError, in one line, if a flag has no effect."""
    action = f"{'decoding' if args.decode else 'encoding'} {' or '.join(kinds)}"
    if "batch_size" in args.on_command_line and "images" not in kinds:
        raise ValueError(f"--batch_size has no effect on {action}; leave it out")
    formats = dict.fromkeys(name for kind in kinds for name in (DECODED if args.decode else ENCODED)[kind])
    if args.format and args.format not in formats:
        raise ValueError(f"--format {args.format} is not for {action}, which writes {', '.join(formats)}")
    if args.sound_from and ("videos" not in kinds or args.format not in (None, "mp4")):
        raise ValueError("--sound_from has no effect without videos of --format mp4; leave it out")
    if len(kinds) == 1:
        args.format = args.format or next(iter(formats))


def build_parser() -> ArgumentParser:
    return inference_parser(
        "encode.py",
        "Write the codes or latents of images or videos with a trained tokenizer, or decode them.",
        "--model DIR (--image_folder PATH | --video_folder PATH | --decode DIR) --output DIR",
        Config, batch_size=32, unit="IMAGES",
        num_workers_help="per process: loader processes (encoding images), or threads that write pictures or read "
        "videos: so many films are then encoded in turn, and the layers keep frames of each",
        model_help="run of train_vae.py, train_vqgan.py (for images) or train_tokenizer.py (for videos), a checkpoint "
        "of it, its model/ folder, or USER/NAME of the Hugging Face Hub",
    )  # fmt: skip


def run_model(
    processes: ProcessGroup, precision: str, activity: str, method: Callable[..., Tensor], values: Tensor, *state: Any
) -> Tensor:
    """The output of a method of the model for valid inputs, whose range is not checked, in the precision of the run."""
    from tandem.devices import to_device
    from tandem.models.layers.convolutional import without_range_checks

    processes.heartbeat(activity)
    with distributed.autocast(precision, processes.device), without_range_checks():
        return method(to_device(values, processes.device), *state)


def latent_settings(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The settings that latents depend on, without those of `ImageCoder.open`."""
    settings = {name: getattr(args, name) for name in _LATENT_FLAGS if name != "latent_dtype"}
    if args.normalize == "channels":
        settings |= {"latents_mean": model.latents_mean, "latents_std": model.latents_std}
    return settings


class ImageCoder:
    """Images in batches, through a DiscreteVAE or a VQGAN, to codes or to latents.

    All batches are padded to one size, because at a fixed size neither the position of an image in its batch nor the
    other images change its codes. With another size or number of threads, a CPU chooses other kernels, whose latents
    may differ slightly, so that occasionally another code is the nearest.

    `settings` are those that the files depend on; `stored` and `writer` read and write a folder of codes or latents;
    for `ending` and `frames_per_code` see `decoded_files`.
    """

    kind, frames_per_code = "images", None

    def __init__(self, model: Any, args: argparse.Namespace, processes: ProcessGroup) -> None:
        from tandem.data.stores.codes import StoredCodes
        from tandem.data.stores.latents import LatentWriter, StoredLatents
        from tandem.data.stores.shards import ShardWriter
        from tandem.training.noise import Noise

        self._model, self._args, self._processes = model, args, processes
        if args.decode and model.channels not in PNG_CHANNELS:
            if "format" in args.explicit and args.format == "png":
                raise ValueError(f"--format png: no PNG has {model.channels} channels; give --format npy")
            args.format = "npy"
        self.ending = f".{args.format}"
        self.settings: dict[str, Any] = {"batch_size": args.batch_size}
        self.stored: type[StoredCodes] = StoredCodes
        self.writer: Callable[..., ShardWriter] = ShardWriter
        if not model.num_codes:
            self.settings |= latent_settings(model, args)
            self.stored, self.writer = StoredLatents, functools.partial(LatentWriter, Noise(args.seed, "latents"))

    def _encode(self, images: Tensor) -> Tensor:
        import torch

        from tandem.data.feed import to_unit_range
        from tandem.devices import to_device

        model, processes = self._model, self._processes
        values = to_unit_range(to_device(images, processes.device))
        if model.num_codes:
            return run_model(processes, self._args.precision, "encoding", model.encode, values)
        views = [values, values.flip(-1)][: 1 + self._args.with_flip]
        return torch.stack(
            [run_model(processes, self._args.precision, "encoding", model.posterior, view) for view in views], 1
        )

    def open(self, sides: Sides) -> tuple[Tensor, dict[str, Any], SampleDataset, Encode]:
        """For samples of these sides: an empty tensor (0, ...) with the dtype and the shape of the rows that the writer
        gets; the settings "grid" and "dtype", the shape and the dtype of a row in a file; the samples; and the function
        that encodes the samples of each shard. Raises ValueError, in one line, if the model does not take them.

        The writer gets codes [h', w'], or moments [views, 2 x channels, h', w'], where a mirrored image is a second
        view."""
        import torch

        from tandem.data.stores.codes import code_dtype
        from tandem.data.stores.encoding import encode_batches
        from tandem.data.stores.latents import DTYPES, open_labelled
        from tandem.models.building import require_room

        model, args, batch_size = self._model, self._args, self._args.batch_size
        shape, text = (model.channels, *height_and_width(sides)), sides_text(sides)
        if shape[1:] != height_and_width(model.image_size) and type(model).__name__ == "DiscreteVAE":
            expected = sides_text(model.image_size)
            raise ValueError(f"--image_size {text}: this model takes {expected} alone; leave it out")
        require_room(f"a batch of {batch_size} images of {text} pixels", batch_size, *shape)
        try:
            grid = list(self._encode(torch.zeros(1, *shape, dtype=torch.uint8)).shape[1:])
        except ValueError as error:
            raise ValueError(f"--image_size {text} does not fit the model: {error}") from None
        needs_label = not model.num_codes  # latents are for diffusion transformers, which take a class
        images = open_labelled(args.image_folder, is_needed=needs_label, image_size=sides, channels=model.channels)
        load = functools.partial(load_image, images)
        options = {"batch_size": batch_size, "samples_per_request": batch_size, "num_workers": args.num_workers}
        options["waiting"] = self._processes.waiting_for_workers
        dtype = str(code_dtype(model.num_codes)) if model.num_codes else "float32"
        empty, row_settings = torch.zeros(0, *grid, dtype=getattr(torch, dtype)), {"grid": grid, "dtype": dtype}
        if not model.num_codes:
            _, moment_channels, *places = grid
            channels = moment_channels if args.latent == "moments" else moment_channels // 2
            row_settings = {"grid": [channels, *places], "dtype": DTYPES[args.latent_dtype]}
        compute = functools.partial(encode_batches, load, images.describe, encode=self._encode, **options)
        return empty, row_settings, images, compute

    def write(self, codes: StoredCodes, shard: int, paths: Sequence[Path]) -> None:
        """Decode a shard, and write its files."""
        from tandem.data.stores.codes import decode_images

        decode = functools.partial(run_model, self._processes, self._args.precision, "decoding", self._model.decode)
        threads = max(1, self._args.num_workers)
        decode_images(codes, shard, paths, decode=decode, batch_size=self._args.batch_size, num_threads=threads)


def load_image(images: Any, index: int) -> tuple[Tensor, dict[str, Any]]:
    """An image as a batch of one, and its index entry."""
    sample = images.load(index)
    return sample.pop("images")[None], sample


class VideoCoder:
    """Videos frame by frame, and images as videos of one frame, through a VideoTokenizer; with the attributes and
    methods of `ImageCoder`."""

    kind = "videos"

    def __init__(self, model: VideoTokenizer, args: argparse.Namespace, processes: ProcessGroup) -> None:
        from tandem.data.stores.codes import FRAME_FOLDER, StoredCodes
        from tandem.data.stores.films import FilmWriter
        from tandem.data.stores.latents import FilmLatentWriter, StoredLatents
        from tandem.io.installed import missing_package
        from tandem.training.noise import Noise
        from tandem.training.visuals.videos import can_write_mp4

        if model.channels != 3:
            raise ValueError(f"{args.model} has {model.channels} channels, and films have 3")
        if args.format == "mp4" and not can_write_mp4():
            raise missing_package("--format mp4 (gif and png do not)", "av (PyAV) with libx264", "video")
        self._model, self._args, self._processes = model, args, processes
        self._threads = max(1, args.num_workers)
        self.stored: type[StoredCodes] = StoredCodes
        self.writer: Callable[..., ShardWriter] = FilmWriter
        self.ending = FRAME_FOLDER if args.format == "png" else f".{args.format}"
        self.frames_per_code = model.frames_per_code
        self._rates = {"fps": args.fps, "frame_stride": args.frame_stride}
        self.settings = {**self._rates, "frames_per_code": model.frames_per_code}
        if args.keep_aspect:
            self.settings["keep_aspect"] = True
        if args.tile is not None:
            self._check_tile()
            self.settings |= {"tile": args.tile, "tile_overlap": args.tile_overlap}
        if not model.num_codes:
            self.settings |= latent_settings(model, args)
            self.stored = StoredLatents
            self.writer = functools.partial(FilmLatentWriter, Noise(args.seed, "latents of films"))

    def _check_tile(self) -> None:
        """Set the default of --tile_overlap. Raises ValueError, in one line, if tiles do not fit the model."""
        from tandem.models.layers.video.blocks import check_side

        args, pixels = self._args, self._model.pixels_per_code
        check_side("--tile", args.tile, pixels)
        if args.tile_overlap is None:
            args.tile_overlap = max(args.tile // 4 // pixels, min(args.tile // pixels - 1, 1)) * pixels
        if args.tile_overlap % pixels or args.tile_overlap >= args.tile:
            raise ValueError(
                f"--tile_overlap {args.tile_overlap}: give a multiple of {pixels} below --tile {args.tile}"
            )
        if self._model.num_codes and not args.decode:
            raise ValueError(
                "--tile: the codes of neighbouring tiles cannot be blended; leave it out, or give it for --decode"
            )

    def _stream(self, step: Any, pixels: int, scale: Fraction) -> Callable[[Tensor], Tensor]:
        """A new stream: a function from the next inputs to their outputs, in tiles with --tile.

        Args:
            step: The method of the model that does so for an input and a state.
            pixels: Of the film, for which a place of the input stands: 1 for frames.
            scale: Sides of the output / sides of the input.
        """
        from tandem.models.layers.video.causal import StreamState
        from tandem.models.layers.video.tiles import apply_in_tiles

        if self._args.tile is None:
            return functools.partial(step, state=StreamState())
        side, overlap = self._args.tile // pixels, self._args.tile_overlap // pixels
        return functools.partial(apply_in_tiles, step, states={}, side=side, overlap=overlap, scale=scale)

    def _open_encoding(self) -> Callable[[Tensor], Tensor]:
        model = self._model
        step = model.encode_next if model.num_codes else model.posterior_next
        return functools.partial(self._encode_next, self._stream(step, 1, Fraction(1, model.pixels_per_code)))

    def _open_decoding(self) -> Callable[[Tensor], Tensor]:
        pixels = self._model.pixels_per_code
        return functools.partial(self._decode_next, self._stream(self._model.decode_next, pixels, Fraction(pixels)))

    def _encode_next(self, stream: Callable[[Tensor], Tensor], frames: Tensor) -> Tensor:
        from tandem.data.feed import to_unit_range
        from tandem.devices import to_device

        pixels = to_unit_range(to_device(frames, self._processes.device))[None]
        (encoded,) = run_model(self._processes, self._args.precision, "encoding", stream, pixels)
        return encoded if self._model.num_codes else encoded.transpose(0, 1)

    def _decode_next(self, stream: Callable[[Tensor], Tensor], codes: Tensor) -> Tensor:
        from tandem.models.building import require_room

        model = self._model
        height, width = (side * model.pixels_per_code for side in codes.shape[-2:])
        frames = len(codes) * model.frames_per_code
        require_room(f"{counted(frames, 'frame')} of {width} x {height} pixels", frames, 3, height, width)
        values = (codes if model.num_codes else codes.transpose(0, 1))[None]
        videos = run_model(self._processes, self._args.precision, "decoding", stream, values)
        return videos[0].transpose(0, 1)

    def open(self, sides: Sides) -> tuple[Tensor, dict[str, Any], SampleDataset, Encode]:
        """See `ImageCoder.open`. A row, also for the writer, is [h', w'] of codes or [channels, h', w'] of latents; if
        videos keep their shape, [] or [channels]."""
        import torch

        from tandem.data.decoding.images import MAX_ASPECT_RATIO
        from tandem.data.sets import open_videos
        from tandem.data.stores.codes import code_dtype
        from tandem.data.stores.encoding import PIECE_FRAMES, encode_streams
        from tandem.data.stores.latents import DTYPES
        from tandem.models.building import require_room
        from tandem.models.layers.video.blocks import check_side

        model, args = self._model, self._args
        height, width = height_and_width(sides)
        for side in (height, width):
            check_side("--image_size", side, model.pixels_per_code)
        longest = MAX_ASPECT_RATIO * min(height, width) if args.keep_aspect else width
        require_room(f"a piece of a video of {longest} x {height} pixels", PIECE_FRAMES, 3, height, longest)
        # num_frames is the length of the films of demo:moving; `read_frames` reads whole videos.
        videos = open_videos(args.video_folder, image_size=sides, num_frames=DEMO_FRAMES, **self._rates)
        clips: Any = videos.fields[0]
        multiple = model.pixels_per_code if args.keep_aspect else None

        def read_frames(index: int) -> Any:
            return clips.frames(videos.source.record(index), multiple)

        options: dict[str, Any] = {"frames_per_code": model.frames_per_code}
        options |= {"num_threads": self._threads, "keep_aspect": args.keep_aspect}
        options["open_stream"] = self._open_encoding
        channels, _, *places = model.latent_shape(1, height, width)
        grid, dtype = [] if args.keep_aspect else places, str(code_dtype(model.num_codes))
        if not model.num_codes:
            grid, dtype = [2 * channels if args.latent == "moments" else channels, *grid], DTYPES[args.latent_dtype]
        empty = torch.zeros(0, *grid, dtype=getattr(torch, dtype))
        compute = functools.partial(encode_streams, read_frames, videos.describe, **options)
        return empty, {"grid": grid, "dtype": dtype}, videos, compute

    def _write_film(self, file: Any, frames: Any, fps: float, name: str) -> None:
        from tandem.data.decoding.videos import open_sound_track
        from tandem.training.visuals.videos import to_gif, write_mp4

        args = self._args
        if args.format == "gif":
            file.write(to_gif(frames, fps))
            return
        with open_sound_track(Path(args.sound_from, name)) if args.sound_from else contextlib.nullcontext() as sound:
            write_mp4(file, frames, fps, sound)

    def write(self, codes: StoredCodes, shard: int, paths: Sequence[Path]) -> None:
        from tandem.data.stores.codes import decode_videos

        options: Any = {"write": self._write_film, "num_threads": self._threads}
        decode_videos(codes, shard, paths, self._open_decoding, **options)


def open_coder(
    args: argparse.Namespace, processes: ProcessGroup
) -> tuple[Any, ImageCoder | VideoCoder, dict[str, Any]]:
    """The model on the device of the run, its coder, and the settings that codes depend on besides the data. Raises
    ValueError, in one line, if there is no such model or it does not take data of the kind of the flags."""
    model, model_settings, _, assumed = open_model(args.model, "DiscreteVAE", "VQGAN", "VideoTokenizer")
    if assumed:
        processes.say(assumed)
    name = type(model).__name__
    kind = "videos" if name == "VideoTokenizer" else "images"
    if kind not in possible_kinds(args):
        raise ValueError(f"{args.model} holds a {name}, which codes {kind}: give --{kind.removesuffix('s')}_folder")
    validate_kinds(args, kind)
    if kind == "images" and args.tile is not None:
        raise ValueError(f"--tile is for videos, and {args.model} holds a {name}; leave it out")
    output, unused = ("codes", _LATENT_FLAGS) if model.num_codes else ("latents", ["report"])
    if idle_flags := [name for name in unused if name in args.on_command_line]:
        raise ValueError(f"--{idle_flags[0]} has no effect: the model in {args.model} makes {output}; leave it out")
    if args.normalize != "none" and not model.num_codes:
        name = "scaling_factor" if args.normalize == "scale" else "latents_mean"
        if getattr(model, name) is None:
            raise ValueError(f"--normalize {args.normalize}: the model has no {name}, which training measures")
    coder_class = VideoCoder if kind == "videos" else ImageCoder
    coder = coder_class(model.to(processes.device).requires_grad_(False), args, processes)
    return model, coder, {**model_settings, **coder.settings, "format": args.format, **kernel_settings(args, processes)}


def encode(args: argparse.Namespace, processes: ProcessGroup) -> None:
    """Encode a folder of images or videos. Raises AskedToStop after a signal."""
    import torch

    from tandem.data.sources.rows import time_ranges
    from tandem.data.stores.latents import channel_lines, labels_line
    from tandem.data.stores.output import OutputFolder, names_sha256
    from tandem.data.stores.shards import PARTIAL
    from tandem.training.metrics.averages import code_statistics

    fetch_model(args.model, processes)
    with processes.raise_on_all_ranks():
        model, coder, model_settings = open_coder(args, processes)
        processes.heartbeat("listing the samples", is_uninterrupted=True)
        sides, kind = args.image_size or model.image_size, coder.kind
        empty, row_settings, samples, compute = coder.open(sides)
        names = [samples.name(index) for index in range(len(samples))]
        parts = time_ranges(samples.source)  # of files, if a manifest states parts
    if samples.skipped:
        processes.say(samples.skipped)
    if not str(args.image_folder or args.video_folder).startswith("demo:"):
        shape = "square" if len(set(height_and_width(sides))) == 1 else "part of this shape"
        text = f"the {shape} in the middle of each of the {kind} is encoded, at {sides_text(sides)} pixels"
        if args.keep_aspect:
            cut_text = f"and both sides are cut to multiples of {model.pixels_per_code}"
            side = min(height_and_width(sides))
            text = f"{kind} keep their shape: the shorter side becomes {side} pixels, {cut_text}"
        elif kind == "videos":
            text += " (--keep_aspect keeps their shape)"
        if kind == "videos":
            text += "; their sound is left out, and --decode DIR --sound_from PATH adds it again"
        processes.say(text)
    per_shard = getattr(args, f"{kind}_per_shard")
    settings = {
        "task": "encode", **model_settings, "num_codes": model.num_codes, **row_settings, "image_size": sides,
        kind: len(names), "names_sha256": names_sha256([*names, *parts]), f"{kind}_per_shard": per_shard,
    }  # fmt: skip
    output = OutputFolder(Path(args.output), settings, processes, fresh=args.fresh, say=processes.say)
    shards = coder.writer(output, coder.stored.name, empty, names, per_shard, npy=args.format == "npy")
    n_new, bad, seconds = shards.fill(compute, f"coded_{kind}", "encoded", stop_at_bad=args.on_bad_sample == "error")
    location = f"in {counted(len(shards), 'shard')} of {coder.stored.name}: {args.output}"
    processes.say(f"{counted(len(names) - bad, kind[:-1])} {location}")
    if not model.num_codes:
        with processes.raise_on_all_ranks():
            stored: Any = coder.stored(output.path)
            statistics = stored.channel_statistics(range(processes.rank, len(shards), processes.world_size))
        all_statistics: dict[int, Any] = {}
        for statistics_of_rank in processes.gather_objects(statistics):
            # JSON, in which processes exchange objects, turns keys into texts.
            all_statistics |= {int(shard): values for shard, values in statistics_of_rank.items()}
        for line in channel_lines(all_statistics):
            processes.say(line)
    if kind == "images" and len(names) > bad:
        with processes.raise_on_all_ranks():
            lines = list(coder.stored(output.path).lines())
        processes.say(labels_line({line.get("label") for line in lines}))
        if partly_read := [line for line in lines if PARTIAL in line]:
            first = f"{partly_read[0]['path']}: {partly_read[0][PARTIAL]}"
            processes.say(f"read only in part: {counted(len(partly_read), 'image')}, such as {first}")
    if args.report and model.num_codes:
        with processes.raise_on_all_ranks():
            counts = coder.stored(output.path).count_codes(range(processes.rank, len(shards), processes.world_size))
        usage = code_statistics(processes.sum(torch.from_numpy(counts).to(processes.device)).cpu())
        if n_new:
            speed = f"{counted(n_new, kind[:-1])} in {seconds:.3g} s, {n_new / seconds:.3g} {kind}/s"
            processes.say(f"{speed}; {counted(bad, 'file')} left out")
        processes.say(f"{usage['codes_used']} of {len(counts)} codes used, perplexity {usage['perplexity']:.4g}")


def shares_encoder(name: str, sha256: Any) -> bool:
    """Whether a model has the encoder of the model whose weights have this checksum, because it was initialised from
    it, directly or by several runs, each with --train decoder."""
    with contextlib.suppress(OSError, ValueError):
        if (folder := find_run(resolve(default_weights_path(Path(name)))[1])) is not None:
            run = read_run_arguments(folder)
            if getattr(run, "train", None) == "decoder" and run.init_from:
                initial_sha256 = open_model(run.init_from).identity["weights_sha256"]
                return initial_sha256 == sha256 or shares_encoder(run.init_from, sha256)
    return False


def decode(args: argparse.Namespace, processes: ProcessGroup) -> None:
    """Decode a folder of codes or latents to images or videos. Raises AskedToStop after a signal."""
    from tandem.data.stores.codes import decoded_files
    from tandem.data.stores.output import OutputFolder

    fetch_model(args.model, processes)
    with processes.raise_on_all_ranks():
        _, coder, model_settings = open_coder(args, processes)
        codes = coder.stored(args.decode)
        sha256 = codes.index.get("weights_sha256")
        if sha256 != model_settings["weights_sha256"] and not shares_encoder(args.model, sha256):
            raise ValueError(
                f"{codes.name} in {args.decode} are not those of {args.model}: give the model that made them"
            )
        files = decoded_files(Path(args.output), codes, coder.ending, coder.frames_per_code)
        if args.sound_from and len({line["path"] for line in codes.lines()}) < sum(map(len, files)):
            raise ValueError("--sound_from: some videos are parts of one file, and only its whole sound can be read")
    sound = {"with_sound": True} if args.sound_from else {}
    settings = {"task": "decode", **model_settings, **sound, "index_sha256": codes.sha256}
    output = OutputFolder(Path(args.output), settings, processes, fresh=args.fresh, say=processes.say)
    for shard in output.rounds(range(len(files)), "decoded"):
        with processes.raise_on_all_ranks():
            if shard is not None:
                coder.write(codes, shard, files[shard])
    processes.say(f"{counted(sum(map(len, files)), coder.kind[:-1])}: {args.output}")


def main(argv: Sequence[str] | None = None) -> None:
    start_inference(lambda args, processes: (decode if args.decode else encode)(args, processes), build_parser(), argv)


if __name__ == "__main__":
    main()
