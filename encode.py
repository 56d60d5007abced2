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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    from tandem.coders.images import ImageCoder
    from tandem.coders.videos import VideoCoder
    from tandem.distributed import ProcessGroup

# Formats of the files that are written of each kind, the default first.
ENCODED = {"images": ("safetensors", "npy"), "videos": ("safetensors",)}
DECODED = {"images": ("png", "npy"), "videos": ("mp4", "gif", "png")}
NORMALIZATIONS = ("none", "scale", "channels")
# Requirements of flags.
_ENCODING_ONLY = without("decode")
_IMAGES_ONLY, _VIDEOS_ONLY = given("image_folder", "PATH"), given("video_folder", "PATH")


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


def open_coder(
    args: argparse.Namespace, processes: ProcessGroup
) -> tuple[Any, ImageCoder | VideoCoder, dict[str, Any]]:
    """The model on the device of the run, its coder, and the settings that codes depend on besides the data. Raises
    ValueError, in one line, if there is no such model or it does not take data of the kind of the flags."""
    from tandem.coders.base import LATENT_FLAGS
    from tandem.coders.images import ImageCoder
    from tandem.coders.videos import VideoCoder

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
    output, unused = ("codes", LATENT_FLAGS) if model.num_codes else ("latents", ["report"])
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

    from tandem.data.stores.latents import channel_lines, labels_line
    from tandem.data.stores.names import SampleNames
    from tandem.data.stores.output import OutputFolder
    from tandem.data.stores.shards import PARTIAL
    from tandem.training.metrics.averages import code_statistics

    fetch_model(args.model, processes)
    with processes.raise_on_all_ranks():
        model, coder, model_settings = open_coder(args, processes)
        processes.heartbeat("listing the samples", is_uninterrupted=True)
        sides, kind = args.image_size or model.image_size, coder.kind
        empty, row_settings, samples, compute = coder.open(sides)
        names = SampleNames(samples.source, samples.name)
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
        kind: len(names), "names_sha256": names.sha256, f"{kind}_per_shard": per_shard,
    }  # fmt: skip
    output = OutputFolder(Path(args.output), settings, processes, fresh=args.fresh, say=processes.say)
    shards = coder.writer(output, coder.stored.name, empty, names, per_shard, npy=args.format == "npy")
    n_new, bad, seconds = shards.fill(compute, f"coded_{kind}", "encoded", stop_at_bad=args.on_bad_sample == "error")
    location = f"in {counted(len(shards), 'shard')} of {coder.stored.name}: {args.output}"
    processes.say(f"{counted(len(names) - bad, kind[:-1])} {location}")
    with processes.raise_on_all_ranks():
        stored: Any = coder.stored(output.path)
        shards_of_rank = range(processes.rank, len(shards), processes.world_size)
        statistics = {} if model.num_codes else stored.channel_statistics(shards_of_rank)
    all_statistics: dict[int, Any] = {}
    for statistics_of_rank in processes.gather_objects(statistics):
        # JSON, in which processes exchange objects, turns keys into texts.
        all_statistics |= {int(shard): values for shard, values in statistics_of_rank.items()}
    for text in channel_lines(all_statistics):
        processes.say(text)
    if kind == "images" and len(names) > bad:
        labels, n_partial, first_partial = set[int | None](), 0, ""
        with processes.raise_on_all_ranks():
            for line in stored.lines():
                labels.add(line.get("label"))
                if PARTIAL in line:
                    n_partial += 1
                    first_partial = first_partial or f"{line['path']}: {line[PARTIAL]}"
        processes.say(labels_line(labels))
        if n_partial:
            processes.say(f"read only in part: {counted(n_partial, 'image')}, such as {first_partial}")
    if args.report and model.num_codes:
        with processes.raise_on_all_ranks():
            counts = stored.count_codes(shards_of_rank)
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
    from tandem.data.stores.codes import DecodedFiles
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
        files = DecodedFiles(Path(args.output), codes, coder.ending, coder.frames_per_code)
        if args.sound_from and files.share_originals():
            raise ValueError("--sound_from: some videos are parts of one file, and only its whole sound can be read")
    sound = {"with_sound": True} if args.sound_from else {}
    settings = {"task": "decode", **model_settings, **sound, "index_sha256": codes.sha256}
    output = OutputFolder(Path(args.output), settings, processes, fresh=args.fresh, say=processes.say)
    for shard in output.rounds(range(len(codes.counts)), "decoded"):
        with processes.raise_on_all_ranks():
            if shard is not None:
                coder.write(codes, shard, files.of_shard(shard))
    processes.say(f"{counted(sum(codes.counts), coder.kind[:-1])}: {args.output}")


def main(argv: Sequence[str] | None = None) -> None:
    start_inference(lambda args, processes: (decode if args.decode else encode)(args, processes), build_parser(), argv)


if __name__ == "__main__":
    main()
