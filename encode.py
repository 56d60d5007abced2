"""Write the codes of a folder of images with a trained DiscreteVAE or VQGAN, or of videos and images with a trained
VideoTokenizer; or decode codes to images or videos.

    python encode.py --model runs/vqgan --image_folder photos/ --output codes/
    torchrun --nproc_per_node 8 encode.py --model runs/tokenizer --video_folder clips/ --output codes/
    deepspeed encode.py --model runs/tokenizer --video_folder clips/ --output codes/
    horovodrun -np 8 python encode.py --model runs/tokenizer --video_folder clips/ --output codes/
    python encode.py --model runs/vqgan --decode codes/ --output images/
    python encode.py --model runs/tokenizer --decode codes/ --output videos/ --format mp4

The files are the same, byte for byte, for every launcher and any number of processes, loader workers and threads. Run
the same command again to continue after an interruption. Videos of any length go through the model frame by frame, in
the same memory (their codes are kept until the shard is written, and attend_time keeps all earlier frames, unless
--time_window of the training limits it). data/stores/codes.py says what is in codes/. They load in two lines:

    codes = safetensors.numpy.load_file("codes/codes-00000.safetensors")["codes"]  # a row per line of index.jsonl
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
from training.flags.inference import add_computation_arguments, add_output_arguments, kernel_settings
from training.flags.parser import ArgumentParser

if TYPE_CHECKING:  # importing PyTorch takes seconds: functions do it after the arguments have been checked
    import numpy as np
    from torch import Tensor

    from data.stores.codes import StoredCodes
    from models import VideoTokenizer
ENCODING = ("image_size", "on_bad_sample", "report")
# What is done with what -> the flags that have an effect on it, among those that do not have one on everything; and the
# formats of its files, the default first.
FLAGS = {
    ("encode", "images"): (*ENCODING, "images_per_shard", "batch_size"), ("decode", "images"): ("batch_size",),
    ("encode", "videos"): (*ENCODING, "videos_per_shard", "fps", "frame_stride"), ("decode", "videos"): (),
}  # fmt: skip
FORMATS = {
    ("encode", "images"): ("safetensors", "npy"), ("decode", "images"): ("png",),
    ("encode", "videos"): ("safetensors",), ("decode", "videos"): ("mp4", "gif", "png"),
}  # fmt: skip


def build_parser() -> ArgumentParser:
    text = (
        "Write the codes of a folder of images or videos with a trained tokenizer, or make images or videos of codes."
    )
    parser = ArgumentParser("encode.py", text, is_root=distributed.launched_as_root)
    parser.usage = (
        "%(prog)s --model DIR (--image_folder PATH | --video_folder PATH | --decode DIR) --output DIR [flags]"
    )
    # fmt: off
    group = parser.add_argument_group("from and to")
    group.add_argument("--model", required=True, metavar="DIR",
        help="run of train_vae.py, train_vqgan.py (for images) or train_tokenizer.py (for videos), a checkpoint of it, "
        "its model/ folder, or USER/NAME of the Hugging Face Hub")
    sources = group.add_mutually_exclusive_group(required=True)
    sources.add_argument("--image_folder", metavar="PATH",
        help="encode this folder of jpg, png, webp, bmp, tiff, ppm, pgm, nested as you like, or webdataset tars; "
        "demo:shapes draws its own")
    sources.add_argument("--video_folder", metavar="PATH",
        help="encode the videos (mp4, m4v, mkv, webm, mov, avi, gif) and images in this folder, with subfolders; or of "
        "a csv or jsonl manifest, or of webdataset tars; demo:moving draws its own")
    sources.add_argument("--decode", metavar="DIR", help="make images or videos of the codes in this folder")
    add_output_arguments(group, output_help="folder to write; an incomplete one is continued", required=True)
    formats = dict.fromkeys(form for forms in FORMATS.values() for form in forms)
    group.add_argument("--format", choices=tuple(formats),
        help="of codes: safetensors (default), of images also npy; of decoded videos: mp4 (default), gif (holds a "
        "whole video in memory) or png, a folder of frames for each video. One frame is always a png")

    add = parser.add_argument_group("encoding").add_argument
    add("--image_size", type=pixels, metavar="PIXELS",
        help="side of the centre crop; default: the model's, and a DiscreteVAE takes no other")
    add("--images_per_shard", type=size, default=1024, metavar="IMAGES", help="images whose codes share a file")
    add("--videos_per_shard", type=size, default=8, metavar="VIDEOS",
        help="videos whose codes share a file, which one process makes; for long films 1")
    add("--fps", type=frame_rate, metavar="HZ",
        help="frames per second of videos, chosen by time stamps (default: all frames of the file)")
    add("--frame_stride", type=positive_int, default=1, metavar="N", help="take every N-th frame of a video")
    add("--on_bad_sample", type=str.lower, choices=("skip", "error"), default="skip",
        help="where a file cannot be read: leave it out and name it in the index, or stop")
    add("--report", action="store_true", help="say at the end how much of the codebook is used")
    # fmt: on
    workers = "per process: loader processes (encoding images), or threads that read videos or write pictures"
    add_computation_arguments(parser, batch_size=32, unit="IMAGES", num_workers_help=workers)
    distributed.add_arguments(parser, trains=False)
    return parser


def kinds_of(args: argparse.Namespace) -> tuple[str, ...]:
    """What may be coded, as far as flags say it: the codes to decode are of either kind."""
    if args.decode:
        return ("images", "videos")
    return ("images",) if args.image_folder else ("videos",)


def check_flags(args: argparse.Namespace, *kinds: str) -> None:
    """Fill in --format. Raises ValueError, in one line, if a flag has no effect on any of these: "images", "videos"."""
    task = "decode" if args.decode else "encode"
    fitting = {flag for kind in kinds for flag in FLAGS[task, kind]}
    doing = f"{task.removesuffix('e')}ing {' or '.join(kinds)}"
    for flag in (flag for flags in FLAGS.values() for flag in flags):
        if flag in args.explicit and flag not in fitting:
            raise ValueError(f"--{flag} has no effect on {doing}; leave it out")
    formats = dict.fromkeys(form for kind in kinds for form in FORMATS[task, kind])
    if args.format and args.format not in formats:
        raise ValueError(f"--format {args.format} is not for {doing}, which writes {', '.join(formats)}")
    if len(kinds) == 1:
        args.format = args.format or next(iter(formats))


class Coder:
    """What encodes and decodes, and the settings that both, and either, depend on."""

    kind: str

    def __init__(self, model: Any, args: argparse.Namespace, backend: distributed.Backend) -> None:
        self.model, self._args, self._backend = model, args, backend
        self._threads = max(1, args.num_workers)
        self.settings: dict[str, Any] = {}
        self.of_encoding: dict[str, Any] = {}
        self.of_decoding: dict[str, Any] = {}

    def _computed(self, doing: str, method: Callable[..., Tensor], values: Tensor, *state: Any) -> Tensor:
        """What a method of the model makes of values, in the precision of the run."""
        self._backend.mark(doing)
        with self._backend.autocast():
            return method(values.to(self._backend.device), *state)


class Images(Coder):
    """Images in batches, through a DiscreteVAE or a VQGAN.

    All batches are padded to one size, because at a fixed size neither the place of an image in its batch nor the other
    images change its codes. With another size or number of threads, a CPU chooses other kernels, whose latents were
    seen to differ by 1e-6; occasionally, that makes another code the nearest.
    """

    kind = "images"

    def __init__(self, model: Any, args: argparse.Namespace, backend: distributed.Backend) -> None:
        super().__init__(model, args, backend)
        self.settings = {"batch_size": args.batch_size}

    def grid(self, side: int) -> list[int]:
        """[h', w'] of the codes of images of this side. Raises ValueError, in one line, if the model does not take
        them."""
        import torch

        from models.files.building import require_room

        if side != self.model.image_size and type(self.model).__name__ == "DiscreteVAE":
            raise ValueError(f"--image_size {side}: this model takes {self.model.image_size} alone; leave it out")
        count, shape = self._args.batch_size, (self.model.channels, side, side)
        require_room(f"a batch of {count} images of {side} pixels", count, *shape)
        try:
            return list(self._encode(torch.zeros(1, *shape, device=self._backend.device)).shape[1:])
        except ValueError as error:
            raise ValueError(f"--image_size {side} does not fit the model: {error}") from None

    def open(self, side: int) -> tuple[list[str], list[str]]:
        """The names of all images, and nothing more that says which they are."""
        from data.sets import open_images

        self._images = open_images(self._args.image_folder, image_size=side, channels=self.model.channels)
        return [self._images.name(index) for index in range(len(self._images))], []

    def codes(self, ranges: Sequence[range]) -> Iterator[tuple[Any, ...]]:
        """What `ShardWriter.fill` wants of images with these indices."""
        from data.images.sequence import image_batches, map_images

        device, workers = self._backend.device, self._args.num_workers
        loading = {"num_workers": workers, "pin_memory": device.type == "cuda"}
        batches = image_batches(self._images, ranges, batch_size=self._args.batch_size, **loading)
        return (map_images(of_shard, self._encode, device) for of_shard in batches)

    def files(self, folder: Path, codes: StoredCodes) -> list[list[Path]]:
        """The files of the images, by shard and row."""
        from data.stores.pngs import png_files

        return png_files(folder, codes.paths)

    def write(self, codes: StoredCodes, shard: int, files: Sequence[Path]) -> None:
        """Write the images of a shard."""
        from data.stores.pngs import decode_shard

        sizes = {"batch_size": self._args.batch_size, "num_threads": self._threads}
        decode_shard(codes, shard, files, self._decode, **sizes)

    def _encode(self, images: Tensor) -> Tensor:
        """Images (b, c, h, w) in [0, 1] -> codes int64 (b, h', w')."""
        return self._computed("encoding", self.model.encode, images)

    def _decode(self, codes: Tensor) -> Tensor:
        """Codes (b, h', w') -> images, about in [0, 1]."""
        return self._computed("decoding", self.model.decode, codes)


class Videos(Coder):
    """Videos frame by frame, and images as videos of one frame, through a VideoTokenizer. Methods: see `Images`."""

    kind = "videos"

    def __init__(self, model: VideoTokenizer, args: argparse.Namespace, backend: distributed.Backend) -> None:
        from tandem.files.installed import missing_package
        from training.pictures.film import can_write_mp4

        if model.channels != 3 or model.is_conditional:
            what = "needs a condition" if model.is_conditional else f"has {model.channels} channels"
            raise ValueError(f"the model in {args.model} {what}; videos are coded by models of RGB without a condition")
        if args.format == "mp4" and not can_write_mp4():
            raise missing_package("--format mp4 (gif and png do not)", "av (PyAV) with libx264", "video")
        super().__init__(model, args, backend)
        self._speed = {"fps": args.fps, "frame_stride": args.frame_stride}
        self.of_encoding = {**self._speed, "frames_per_code": model.frames_per_code}
        self.of_decoding = {"format": args.format}

    def grid(self, side: int) -> list[int]:
        from data.videos.films import PIECE_FRAMES
        from models.files.building import require_room
        from models.video.layers import check_side

        check_side("--image_size", side, self.model.pixels_per_code)
        require_room(f"a piece of a video of {side} pixels", PIECE_FRAMES, 3, side, side)
        return [side // self.model.pixels_per_code] * 2

    def open(self, side: int) -> tuple[list[str], list[str]]:
        """The names of all videos and, if a manifest asks for parts of them, what parts these are."""
        from data.sets import open_videos
        from data.videos.films import DEMO_FRAMES, names_of

        videos: Any = open_videos(self._args.video_folder, image_size=side, num_frames=DEMO_FRAMES, **self._speed)
        self._videos = videos
        return names_of(videos)

    def codes(self, ranges: Sequence[range]) -> Iterator[tuple[Any, ...]]:
        from data.videos.films import encode_films

        how = {"frames_per_code": self.model.frames_per_code, "num_threads": self._threads}
        return (encode_films(self._videos, indices, self._encoding, **how) for indices in ranges)

    def files(self, folder: Path, codes: StoredCodes) -> list[list[Path]]:
        from data.stores.films import FRAME_FOLDER, film_files

        ending = FRAME_FOLDER if self._args.format == "png" else f".{self._args.format}"
        return film_files(folder, codes, ending, self.model.frames_per_code)

    def write(self, codes: StoredCodes, shard: int, files: Sequence[Path]) -> None:
        from data.stores.films import decode_films
        from training.pictures.film import to_gif, write_mp4

        def write_film(file: BinaryIO, frames: Iterator[np.ndarray], fps: float) -> None:
            if self._args.format == "gif":
                file.write(to_gif(frames, fps))
            else:
                write_mp4(file, frames, fps)

        decode_films(codes, shard, files, self._decoding, write_film, num_threads=self._threads)

    def _encoding(self) -> Callable[[Tensor], np.ndarray]:
        """Begin a video: a function of its next frames, uint8 (3, f, h, w), that returns their codes (f', h', w')."""
        from data.feed import to_unit_range
        from data.stores.codes import code_dtype

        state, dtype = self.model.start_encoding(), code_dtype(self.model.num_codes)

        def codes_of(frames: Tensor) -> np.ndarray:
            pixels = to_unit_range(frames.to(self._backend.device))[None]
            return self._computed("encoding", self.model.encode_next, pixels, state)[0].cpu().numpy().astype(dtype)

        return codes_of

    def _decoding(self) -> Callable[[Tensor], Tensor]:
        """Begin a video: a function of its next codes, int64 (f', h', w'), that returns their frames (3, f, h, w)."""
        state = self.model.start_decoding()

        def frames_of(codes: Tensor) -> Tensor:
            return self._computed("decoding", self.model.decode_next, codes[None], state)[0]

        return frames_of


def open_coder(args: argparse.Namespace, backend: distributed.Backend) -> tuple[Images | Videos, dict[str, Any]]:
    """The model on the device of the run; and the settings that codes depend on besides what is coded. Raises
    ValueError, in one line, if there is no such model or it does not code what the flags say."""
    from trained import open_model

    coders: dict[str, type[Images] | type[Videos]] = {"DiscreteVAE": Images, "VQGAN": Images, "VideoTokenizer": Videos}
    model, about, _ = open_model(args.model, *coders)
    name = type(model).__name__
    kind = coders[name].kind
    if kind not in kinds_of(args):
        raise ValueError(f"{args.model} holds a {name}, which codes {kind}: give --{kind.removesuffix('s')}_folder")
    check_flags(args, kind)
    coder = coders[name](model.to(backend.device).requires_grad_(False), args, backend)
    return coder, {**about, **coder.settings, **kernel_settings(args, backend)}


def encode(args: argparse.Namespace, backend: distributed.Backend) -> None:
    """Encode a folder of images or videos. Raises AskedToStop after a signal."""
    import torch

    from data.stores.codes import code_dtype, code_shards, read_codes, write_code_index
    from data.stores.output import OutputFolder, names_sha256
    from training.measures.averages import code_statistics

    fetch(args.model, backend)
    with backend.agreement():
        coder, about = open_coder(args, backend)
        side, num_codes = args.image_size or coder.model.image_size, coder.model.num_codes
        grid = coder.grid(side)
        backend.working("listing the samples")
        names, parts = coder.open(side)
    per_shard = f"{coder.kind}_per_shard"
    settings = {
        "task": "encode", **about, "num_codes": num_codes, "grid": grid, "dtype": str(code_dtype(num_codes)),
        "image_size": side, **coder.of_encoding, coder.kind: len(names), "names_sha256": names_sha256([*names, *parts]),
        per_shard: getattr(args, per_shard), "format": args.format,
    }  # fmt: skip
    output = OutputFolder(Path(args.output), settings, backend, fresh=args.fresh, say=backend.say)
    shards = code_shards(output, names)

    def codes_of(todo: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        return coder.codes([shards.items[shard] for shard in todo])

    stop = args.on_bad_sample == "error"
    filled = shards.fill(codes_of, lambda: write_code_index(shards), "encoded", stop_at_bad=stop)
    backend.say(f"{len(names) - filled.bad} {coder.kind} in {len(shards)} shards of codes: {args.output}")
    if args.report:
        with backend.agreement():
            counts = read_codes(output.path).counts(range(backend.rank, len(shards), backend.world_size))
        usage = code_statistics(backend.sum(torch.from_numpy(counts).to(backend.device)).cpu())
        n, seconds = filled.items, filled.seconds
        if n:
            speed = f"{n / seconds:.3g} {coder.kind}/s"
            backend.say(f"{n} {coder.kind} in {seconds:.3g} s, {speed}; {filled.bad} files were left out")
        backend.say(f"{usage['codes_used']} of {len(counts)} codes used, perplexity {usage['perplexity']:.4g}")


def decode(args: argparse.Namespace, backend: distributed.Backend) -> None:
    """Decode a folder of codes to images or videos. Raises AskedToStop after a signal."""
    from data.stores.codes import read_codes
    from data.stores.output import OutputFolder

    fetch(args.model, backend)
    with backend.agreement():
        stored = read_codes(args.decode)
        coder, about = open_coder(args, backend)
        stored.require_model(about["weights_sha256"], args.model)
        files = coder.files(Path(args.output), stored)
    settings = {"task": "decode", **about, "index_sha256": stored.sha256, **coder.of_decoding}
    output = OutputFolder(Path(args.output), settings, backend, fresh=args.fresh, say=backend.say)
    for shard in output.rounds(range(len(files)), "decoded"):
        with backend.agreement():
            if shard is not None:
                coder.write(stored, shard, files[shard])
    backend.say(f"{sum(map(len, files))} {coder.kind}: {args.output}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse(argv)
    try:
        check_flags(args, *kinds_of(args))
    except ValueError as error:
        parser.error(str(error))
    run = decode if args.decode else encode
    distributed.launch_inference(lambda backend: run(args, backend), parser, args)


if __name__ == "__main__":
    main()
