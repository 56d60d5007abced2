"""Write the codes of a folder of videos and images with a trained VideoTokenizer, or decode codes to videos.

    python tokenize_videos.py --model runs/tokenizer --video_folder clips/ --output codes/
    torchrun --nproc_per_node 8 tokenize_videos.py --model runs/tokenizer --video_folder clips/ --output codes/
    deepspeed tokenize_videos.py --model runs/tokenizer --video_folder clips/ --output codes/
    horovodrun -np 8 python tokenize_videos.py --model runs/tokenizer --video_folder clips/ --output codes/
    python tokenize_videos.py --model runs/tokenizer --decode codes/ --output videos/ --format mp4

The files are the same, byte for byte, for every launcher and any number of processes and threads. Run the same command
again to continue after an interruption. Videos of any length go through the model frame by frame, in the same memory
(their codes are kept until the shard is written, and attend_time keeps all earlier frames, unless --time_window of the
training limits it). Codes load in two lines, see data/stores/codes.py:

    codes = safetensors.numpy.load_file("codes/codes-00000.safetensors")["codes"]
    of_video = codes[line["row"]:][:line["code_frames"]]  # line: json.loads of a line of codes/index.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import distributed
from hub import fetch
from tandem.converters import frame_rate, pixels, positive_int, size
from training.flags.inference import add_computation_arguments, add_output_arguments
from training.flags.parser import ArgumentParser
from training.run.stages import Say, kernel_settings, run_stages

if TYPE_CHECKING:  # importing PyTorch takes seconds: functions do it after the arguments have been checked
    import numpy as np
    from torch import Tensor

    from models import VideoTokenizer
ENCODING_ONLY = ("fps", "frame_stride", "image_size", "videos_per_shard", "on_bad_sample")


def build_parser() -> ArgumentParser:
    text = "Write the codes of a folder of videos with a trained tokenizer, or make videos of codes."
    parser = ArgumentParser("tokenize_videos.py", text, is_root=distributed.launched_as_root)
    parser.usage = "%(prog)s --model DIR (--video_folder DIR | --decode DIR) --output DIR [flags]"
    # fmt: off
    group = parser.add_argument_group("from and to")
    group.add_argument("--model", required=True, metavar="DIR",
        help="run of train_tokenizer.py, a checkpoint of it, its model/ folder, or USER/NAME of the Hugging Face Hub")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--video_folder", metavar="PATH",
        help="encode the videos (mp4, m4v, mkv, webm, mov, avi, gif) and images in this folder, with subfolders; or of "
        "a csv or jsonl manifest, or of webdataset tars; demo:moving draws its own")
    source.add_argument("--decode", metavar="DIR", help="make videos of the codes in this folder")
    add_output_arguments(group, output_help="folder to write; an incomplete one is continued", required=True)

    add = parser.add_argument_group("encoding").add_argument
    add("--fps", type=frame_rate, metavar="HZ",
        help="frames per second, chosen by time stamps (default: all frames of the file)")
    add("--frame_stride", type=positive_int, default=1, metavar="N", help="take every N-th frame of the file")
    add("--image_size", type=pixels, metavar="PIXELS", help="side of the centre crop (default: the model's)")
    add("--videos_per_shard", type=size, default=8, metavar="VIDEOS",
        help="videos whose codes share a file, which one process makes; for long films 1")
    add("--on_bad_sample", type=str.lower, choices=("skip", "error"), default="skip",
        help="where a file cannot be read: leave it out and name it in the index, or stop")
    add = parser.add_argument_group("decoding").add_argument
    add("--format", choices=("mp4", "gif", "png"), default="mp4",
        help="png: a folder of frames for each video; gif holds a whole video in memory. One frame is always a png")
    # fmt: on
    workers = "threads per process that read videos (encoding) or compress PNGs (decoding); at least 1"
    add_computation_arguments(parser, num_workers_help=workers)
    distributed.add_arguments(parser, trains=False)
    return parser


def load_tokenizer(args: argparse.Namespace, backend: distributed.Backend) -> tuple[VideoTokenizer, dict[str, Any]]:
    """The model on the device of the run, and the settings that codes depend on besides the videos. Raises ValueError,
    in one line, if there is no such model or it cannot code videos alone."""
    from trained import open_model

    model, about, _ = open_model(args.model, "VideoTokenizer")
    model.to(backend.device)
    if model.channels != 3 or model.is_conditional:
        what = "needs a condition" if model.is_conditional else f"has {model.channels} channels"
        raise ValueError(f"the model in {args.model} {what}; videos are coded by models of RGB without a condition")
    return model, {**about, "precision": backend.options.precision, **kernel_settings(args, backend)}


def encode(args: argparse.Namespace, backend: distributed.Backend, say: Say) -> int:
    """Encode a folder of videos to a folder of codes; returns how many shards are left to do after a signal."""
    from data import open_videos, to_unit_range
    from data.stores.codes import code_dtype, code_shards, write_code_index
    from data.stores.output import OutputFolder, names_sha256
    from data.videos.films import DEMO_FRAMES, PIECE_FRAMES, encode_films, names_of
    from models.files.building import require_room
    from models.video.layers import check_side

    fetch(args.model, backend)
    with backend.agreement():
        model, about = load_tokenizer(args, backend)
        side, dtype = args.image_size or model.image_size, code_dtype(model.num_codes)
        check_side("--image_size", side, model.pixels_per_code)
        require_room(f"a piece of a video of {side} pixels", PIECE_FRAMES, 3, side, side)
        speed = {"fps": args.fps, "frame_stride": args.frame_stride}
        backend.working("listing the samples")
        videos: Any = open_videos(args.video_folder, image_size=side, num_frames=DEMO_FRAMES, **speed)
        names, parts = names_of(videos)
    settings = {
        "task": "encode", **about, "num_codes": model.num_codes, "grid": [side // model.pixels_per_code] * 2,
        "dtype": str(dtype), "image_size": side, **speed, "frames_per_code": model.frames_per_code,
        "videos": len(names), "names_sha256": names_sha256([*names, *parts]),
        "videos_per_shard": args.videos_per_shard, "format": "safetensors",
    }  # fmt: skip
    output = OutputFolder(Path(args.output), settings, backend, fresh=args.fresh, say=say)
    shards = code_shards(output, names)

    def open_stream() -> Callable[[Tensor], np.ndarray]:
        state = model.start_encoding()

        def codes_of(frames: Tensor) -> np.ndarray:
            backend.mark("encoding")
            with backend.autocast():
                codes = model.encode_next(to_unit_range(frames.to(backend.device))[None], state)
            return codes[0].cpu().numpy().astype(dtype)

        return codes_of

    def films_of(todo: Sequence[int]) -> Iterator[Any]:
        how = {"frames_per_code": model.frames_per_code, "num_threads": max(1, args.num_workers)}
        return (encode_films(videos, shards.items[shard], open_stream, **how) for shard in todo)

    stop = args.on_bad_sample == "error"
    filled = shards.fill(films_of, lambda: write_code_index(shards), "encoded", stop_at_bad=stop)
    if not filled.shards_left:
        say(f"{len(names) - filled.bad} videos in {len(shards)} shards of codes: {args.output}")
    return filled.shards_left


def decode(args: argparse.Namespace, backend: distributed.Backend, say: Say) -> int:
    """Decode a folder of codes to a folder of videos; returns how many shards are left to do after a signal."""
    from data.files.opening import missing_package
    from data.stores.codes import read_codes
    from data.stores.films import FRAME_FOLDER, decode_films, film_files
    from data.stores.output import OutputFolder
    from training.pictures.film import can_write_mp4, to_gif, write_mp4

    fetch(args.model, backend)
    with backend.agreement():
        if args.format == "mp4" and not can_write_mp4():
            raise missing_package("--format mp4 (gif and png do not)", "av (PyAV) with libx264", "video")
        stored = read_codes(args.decode)
        model, about = load_tokenizer(args, backend)
        stored.require_model(about["weights_sha256"], args.model)
        ending = FRAME_FOLDER if args.format == "png" else f".{args.format}"
        videos = film_files(Path(args.output), stored, ending, model.frames_per_code)
    settings = {"task": "decode", **about, "index_sha256": stored.sha256, "format": args.format}
    output = OutputFolder(Path(args.output), settings, backend, fresh=args.fresh, say=say)

    def open_stream() -> Callable[[Tensor], Tensor]:
        state = model.start_decoding()

        def frames_of(codes: Tensor) -> Tensor:
            backend.mark("decoding")
            with backend.autocast():
                return model.decode_next(codes.to(backend.device)[None], state)[0]

        return frames_of

    def write(file: BinaryIO, frames: Iterator[np.ndarray], fps: float) -> None:
        if args.format == "gif":
            file.write(to_gif(frames, fps))
        else:
            write_mp4(file, frames, fps)

    n_shards, threads = len(stored.lines), max(1, args.num_workers)
    for shard in output.rounds(range(n_shards), "decoded"):
        with backend.agreement():
            if shard is not None:
                decode_films(stored, shard, videos[shard], open_stream, write, num_threads=threads)
    say(f"{sum(map(len, stored.lines[: n_shards - output.shards_left]))} videos: {args.output}")
    return output.shards_left


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse(argv)
    stage, idle, when = (decode, ENCODING_ONLY, "encoding") if args.decode else (encode, ("format",), "--decode")
    if unused := [f"--{name}" for name in idle if name in args.explicit]:
        parser.error(f"{unused[0]} is for {when} alone; leave it out")
    distributed.launch_inference(lambda backend: run_stages([stage], args, backend), parser, args)


if __name__ == "__main__":
    main()
