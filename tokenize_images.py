"""Write the codes of a folder of images with a trained tokenizer (DiscreteVAE or VQGAN), or decode codes to images.

    python tokenize_images.py --model runs/vqgan --image_folder photos/ --output codes/
    torchrun --nproc_per_node 8 tokenize_images.py --model runs/vqgan --image_folder photos/ --output codes/
    deepspeed tokenize_images.py --model runs/vqgan --image_folder photos/ --output codes/
    horovodrun -np 8 python tokenize_images.py --model runs/vqgan --image_folder photos/ --output codes/
    python tokenize_images.py --model runs/vqgan --decode codes/ --output images/

The files are the same, byte for byte, for every launcher and any number of processes and loader workers. Run the same
command again to continue after an interruption. data/stores/codes.py says what is in codes/, and how to load it in two
lines.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import distributed
from hub import fetch
from tandem.converters import pixels, size
from training.flags.inference import add_computation_arguments, add_output_arguments
from training.flags.parser import ArgumentParser
from training.run.stages import Say, kernel_settings, run_stages

if TYPE_CHECKING:  # importing PyTorch takes seconds: functions do it after the arguments have been checked
    from torch import Tensor

    import data
ENCODING_ONLY = ("image_size", "images_per_shard", "format", "on_bad_sample", "report")


def build_parser() -> ArgumentParser:
    text = "Write the codes of a folder of images with a trained tokenizer, or make images of codes."
    parser = ArgumentParser("tokenize_images.py", text, is_root=distributed.launched_as_root)
    parser.usage = "%(prog)s --model DIR (--image_folder PATH | --decode DIR) --output DIR [flags]"
    # fmt: off
    group = parser.add_argument_group("from and to")
    group.add_argument("--model", required=True, metavar="DIR",
        help="run of train_vae.py or train_vqgan.py, a checkpoint of it, its model/ folder, or USER/NAME of the Hub")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--image_folder", metavar="PATH",
        help="encode this folder of jpg, png, webp, bmp, tiff, ppm, pgm, nested as you like, or webdataset tars; "
        "demo:shapes draws its own")
    source.add_argument("--decode", metavar="DIR", help="make PNG images of the codes in this folder")
    add_output_arguments(group, output_help="folder to write; an incomplete one is continued", required=True)

    add = parser.add_argument_group("encoding").add_argument
    add("--image_size", type=pixels, metavar="PIXELS",
        help="side of the centre crop; default: the model's, and only a VQGAN takes another")
    add("--images_per_shard", type=size, default=1024, metavar="IMAGES", help="images whose codes share a file")
    add("--format", choices=("safetensors", "npy"), default="safetensors", help="file format of the codes")
    add("--on_bad_sample", type=str.lower, choices=("skip", "error"), default="skip",
        help="where a file cannot be read: leave it out and name it in the index, or stop")
    add("--report", action="store_true", help="say at the end how much of the codebook is used")
    # fmt: on
    workers = "loader processes (encoding) or threads that write (decoding) per process"
    add_computation_arguments(parser, batch_size=32, unit="IMAGES", num_workers_help=workers)
    distributed.add_arguments(parser, trains=False)
    return parser


class Tokenizer(NamedTuple):
    """The operations of both kinds of model, in the precision and on the device of the run, without gradients."""

    config: dict[str, Any]  # "model": the name of its class; the other keys: its constructor arguments
    weights_sha256: str
    num_codes: int
    image_size: int
    channels: int
    encode: Callable[[Tensor], Tensor]  # images (b, c, h, w) in [0, 1] -> codes int64 (b, h', w')
    decode: Callable[[Tensor], Tensor]  # codes -> images, about in [0, 1]


def load_tokenizer(path: str, backend: distributed.Backend) -> Tokenizer:
    """Open a model (see `open_model`). Raises ValueError, in one line, if there is no such model."""
    import torch

    from trained import open_model

    model, about, _ = open_model(path, "DiscreteVAE", "VQGAN")
    model.to(backend.device)

    @torch.no_grad()
    def encode(images: Tensor) -> Tensor:
        backend.mark("encoding")
        with backend.autocast():
            codes: Tensor = model.encode(images)
            return codes

    @torch.no_grad()
    def decode(codes: Tensor) -> Tensor:
        backend.mark("decoding")
        codes = codes.to(backend.device)
        with backend.autocast():
            images: Tensor = model.decode(codes)
            return images

    sizes = model.num_codes, model.image_size, model.channels
    return Tokenizer(about["config"], about["weights_sha256"], *sizes, encode, decode)


def grid_of(args: argparse.Namespace, tokenizer: Tokenizer, image_size: int, backend: distributed.Backend) -> list[int]:
    """[h', w'] of the codes of images of this size. Raises ValueError, in one line, if the model does not take them."""
    import torch

    from models.files.building import require_room

    if image_size != tokenizer.image_size and tokenizer.config["model"] == "DiscreteVAE":
        raise ValueError(f"--image_size {image_size}: this model takes {tokenizer.image_size} alone; leave it out")
    sizes = args.batch_size, tokenizer.channels, image_size, image_size
    require_room(f"a batch of {args.batch_size} images of {image_size} pixels", *sizes)
    images = torch.zeros(1, *sizes[1:], device=backend.device)
    try:
        return list(tokenizer.encode(images).shape[1:])
    except ValueError as error:
        raise ValueError(f"--image_size {image_size} does not fit the model: {error}") from None


def computation(args: argparse.Namespace, backend: distributed.Backend, tokenizer: Tokenizer) -> dict[str, Any]:
    """The settings that codes depend on besides the images. With another batch size or number of threads, a CPU chooses
    other kernels, whose latents were seen to differ by 1e-6; occasionally, that makes another code the nearest. All
    batches are padded to one size, because at a fixed size neither the place of an image in its batch nor the other
    images change its codes."""
    return {
        "config": tokenizer.config, "weights_sha256": tokenizer.weights_sha256, "batch_size": args.batch_size,
        "precision": backend.options.precision, **kernel_settings(args, backend),
    }  # fmt: skip


def encode(args: argparse.Namespace, backend: distributed.Backend, say: Say) -> int:
    """Encode a folder of images to a folder of codes; returns how many shards are left to do after a signal."""
    import torch

    import data
    from data.images.sequence import image_batches, map_images
    from data.stores.codes import code_dtype, code_shards, read_codes, write_code_index
    from data.stores.output import OutputFolder, names_sha256
    from training.measures.averages import code_statistics

    fetch(args.model, backend)
    with backend.agreement():
        tokenizer = load_tokenizer(args.model, backend)
        image_size = args.image_size or tokenizer.image_size
        grid = grid_of(args, tokenizer, image_size, backend)
        backend.working("listing the samples")
        images = data.open_images(args.image_folder, image_size=image_size, channels=tokenizer.channels)
        names = [images.name(index) for index in range(len(images))]
    settings = {
        "task": "encode", **computation(args, backend, tokenizer), "num_codes": tokenizer.num_codes, "grid": grid,
        "dtype": str(code_dtype(tokenizer.num_codes)), "image_size": image_size, "images": len(names),
        "names_sha256": names_sha256(names), "images_per_shard": args.images_per_shard, "format": args.format,
    }  # fmt: skip
    output = OutputFolder(Path(args.output), settings, backend, fresh=args.fresh, say=say)
    shards = code_shards(output, names)

    def codes_of(todo: Sequence[int]) -> Iterator[tuple[list[Tensor], list[data.BadSample]]]:
        ranges = [shards.items[shard] for shard in todo]
        loading = {"num_workers": args.num_workers, "pin_memory": backend.device.type == "cuda"}
        batches = image_batches(images, ranges, batch_size=args.batch_size, **loading)
        return (map_images(of_shard, tokenizer.encode, backend.device) for of_shard in batches)

    stop = args.on_bad_sample == "error"
    filled = shards.fill(codes_of, lambda: write_code_index(shards), "encoded", stop_at_bad=stop)
    if filled.shards_left:
        return filled.shards_left
    say(f"{len(names) - filled.bad} images in {len(shards)} shards of codes: {args.output}")
    if args.report:
        with backend.agreement():
            counts = read_codes(output.path).counts(range(backend.rank, len(shards), backend.world_size))
        usage = code_statistics(backend.sum(torch.from_numpy(counts).to(backend.device)).cpu())
        n, seconds = filled.items, filled.seconds
        if n:
            say(f"{n} images in {seconds:.3g} s, {n / seconds:.3g} images/s; {filled.bad} files were left out")
        say(f"{usage['codes_used']} of {len(counts)} codes used, perplexity {usage['perplexity']:.4g}")
    return 0


def decode(args: argparse.Namespace, backend: distributed.Backend, say: Say) -> int:
    """Decode a folder of codes to a folder of PNG images; returns how many shards are left to do after a signal."""
    from data.stores.codes import read_codes
    from data.stores.output import OutputFolder
    from data.stores.pngs import decode_shard, png_files

    fetch(args.model, backend)
    with backend.agreement():
        stored = read_codes(args.decode)
        tokenizer = load_tokenizer(args.model, backend)
        stored.require_model(tokenizer.weights_sha256, args.model)
        pictures = png_files(Path(args.output), stored.paths)
    settings = {"task": "decode", **computation(args, backend, tokenizer), "index_sha256": stored.sha256}
    output = OutputFolder(Path(args.output), settings, backend, fresh=args.fresh, say=say)
    n_shards, sizes = len(stored.paths), {"batch_size": args.batch_size, "num_threads": max(1, args.num_workers)}
    for shard in output.rounds(range(n_shards), "decoded"):
        with backend.agreement():
            if shard is not None:
                decode_shard(stored, shard, pictures[shard], tokenizer.decode, **sizes)
    say(f"{sum(map(len, stored.paths[: n_shards - output.shards_left]))} images: {args.output}")
    return output.shards_left


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse(argv)
    if args.decode and (unused := [f"--{name}" for name in ENCODING_ONLY if name in args.explicit]):
        parser.error(f"{unused[0]} is for encoding; leave it out beside --decode")
    distributed.launch_inference(
        lambda backend: run_stages([decode if args.decode else encode], args, backend), parser, args
    )


if __name__ == "__main__":
    main()
