"""Draw pictures with a trained decoder, under any launcher; the same pictures on any number of processes.

    python sample.py --model runs/decoder-demo --prompts 'a red circle on the left' 'a blue star top right' \
        --count 4 --output pictures/
    torchrun --nproc_per_node 8 sample.py --model runs/decoder --image_embeddings rows.npy --output pictures/
    python sample.py --model runs/decoder --clip ViT-L-14 --clip_weights vit.safetensors --images photos/ \
        --output variations/

Each picture is a PNG, OUTPUT/00000.png and so on, and OUTPUT/index.jsonl has a line for each with its condition.
Picture n depends only on its condition, --seed, n and the settings of the sampler. Run the same command again to
continue after an interruption.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tandem import distributed
from tandem.config.converters import FILE, FOLDER, NAME_OR_PATH, non_negative_int, positive_int, size
from tandem.config.fields import flag, given
from tandem.config.models.decoder import GUIDED, Sampling
from tandem.config.parser import ArgumentParser
from tandem.config.shared import ClipFlags, kernel_settings
from tandem.io.reading import LONGEST_FILE_BYTES, counted, error_text, plain_text, read_bytes, text_lines
from tandem.launch import fetch_model, inference_parser, start_inference

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tandem.distributed import ProcessGroup
    from tandem.models import Decoder
    from tandem.weights.load import Trained

MOST_BYTES = 1 << 30  # of a file with conditions
MODELS = ("model", "guide_with")  # flags that name a model
DIMS = {"image_embed": 2, "text_encodings": 3}  # name of a condition -> dimensions of a batch of it


@dataclass
class Config(ClipFlags, Sampling):
    """The conditions, and how pictures are drawn."""

    prompts: list[str] | None = flag(
        None,
        "draw for each of these texts. A model of demo:shapes takes 'a small red circle on the left'; for other "
        "models --clip encodes the texts, by default the published CLIP that the model was trained with. A model of "
        "image embeddings gets CLIP's embedding of the text instead, because there is no prior",
        nargs="+",
        metavar="TEXT",
        title="conditions",
    )
    prompt_file: str | None = flag(None, "draw for each line of this text file", FILE)
    image_embeddings: str | None = flag(None, "draw for each row of this .npy of image embeddings, (n, d)", FILE)
    text_embeddings: str | None = flag(None, "draw for each row of this .npy of text encodings, (n, tokens, d)", FILE)
    count: int = flag(1, "pictures to draw for each condition; for a model without conditions, pictures in all", size)
    seed: int = flag(0, "seed of the noise", non_negative_int)
    start_at_unet: int = flag(1, "first Unet, from 1; a later one enlarges --images", positive_int)
    stop_at_unet: int | None = flag(None, "last Unet (default: all)", positive_int)
    images: str | None = flag(
        None, "pictures to enlarge (--start_at_unet), to fill in (--masks), or to vary (--clip)", FOLDER
    )
    masks: str | None = flag(
        None,
        "folder with an image for each of --images, of the same name, black where something new is to be drawn, white "
        "where the picture stays",
        FOLDER,
        requires=given("images", "DIR"),
    )
    resample_times: int = flag(
        5, "repeats of each step, so that old and new parts fit (RePaint)", positive_int, requires=given("masks", "DIR")
    )
    guide_with: str | None = flag(
        None,
        "guide away from this weaker model, not the unconditional one (Karras et al. 2024)",
        FOLDER,
        requires=GUIDED,
    )
    clip: str | None = flag(
        None,
        "model of open_clip, or a .json file with the shape of one, that encodes --prompts; without --masks and "
        "--start_at_unet it encodes --images, at the size of the last Unet as in training, to draw others like them",
        NAME_OR_PATH,
        title="embeddings",
    )

    @classmethod
    def validate(cls, args: argparse.Namespace, parser: ArgumentParser) -> None:
        is_enlarging = args.start_at_unet > 1
        if is_enlarging and args.images is None:
            parser.error(f"--start_at_unet {args.start_at_unet} needs --images to enlarge")
        if is_enlarging and args.masks is not None:
            parser.error("--masks and --start_at_unet: --images are filled in or enlarged; leave one of the two out")
        if args.images is not None and not (is_enlarging or args.masks or args.clip):
            parser.error(
                "--images is used for nothing: give --start_at_unet to enlarge them, --masks to fill them in, or "
                "--clip to draw others like them"
            )
        if args.clip and not (args.prompts or args.prompt_file or embeds_images(args)):
            parser.error("--clip has nothing to encode: give --prompts, --prompt_file or --images")


def build_parser() -> ArgumentParser:
    return inference_parser(
        "sample.py", "Draw pictures with a trained decoder.", "--model DIR --output DIR [conditions]", Config,
        batch_size=16, unit="PICTURES", num_workers_help="threads that write pictures",
        model_help="run of train_decoder.py, a checkpoint of it, its model/ folder, or USER/NAME of the Hugging Face "
        "Hub",
    )  # fmt: skip


def embeds_images(args: argparse.Namespace) -> bool:
    """Whether --clip encodes --images, to draw similar pictures."""
    return bool(args.clip and args.images and not args.masks and args.start_at_unet == 1)


class Source(NamedTuple):
    """The conditions that a flag gives.

    labels: a text for each condition, for index.jsonl.
    shapes: name of a condition, such as "image_embed" -> its shape without the batch.
    load: indices (b) -> name -> conditions (b, ...).
    """

    flag: str
    labels: list[str]
    shapes: dict[str, tuple[int, ...]]
    load: Callable[[list[int]], Mapping[str, Tensor]]


def source_in_memory(flag: str, labels: list[str], conditions: Mapping[str, Tensor]) -> Source:
    """Conditions (n, ...) in memory."""
    shapes = {name: tuple(rows.shape[1:]) for name, rows in conditions.items()}
    return Source(flag, labels, shapes, lambda rows: {name: tensor[rows] for name, tensor in conditions.items()})


def load_clip(args: argparse.Namespace, origin: Mapping[str, str] | None, processes: ProcessGroup) -> Any:
    """The CLIP of --clip, or for prompts the published one that the model was trained with; None if there is neither.

    Args:
        origin: The CLIP that the model was trained with, from its configuration.

    Raises:
        ValueError: one line, if it cannot be loaded, or if prompts need a CLIP that is not published, and no flag gives
            its files.
    """
    from tandem.models.features.clip import Clip, is_published

    has_prompts = bool(args.prompts or args.prompt_file)
    if origin and has_prompts and not args.clip:
        if not is_published(origin):
            raise ValueError(
                f"{args.model} was trained with a CLIP that is not published, and --prompts need it: give its "
                f"{origin['name']} as --clip and {origin['weights']} (SHA-256 {origin['sha256']}) as --clip_weights"
            )
        args.clip, args.clip_weights = origin["name"], origin["weights"]
        processes.say(f"prompts are encoded as in training: --clip {args.clip} --clip_weights {args.clip_weights}")
    if not args.clip:
        return None
    clip = Clip.from_file(
        args.clip, args.clip_weights, processes.device, partial(processes.heartbeat, "fetching weights")
    )
    if origin and clip.origin["sha256"] != origin["sha256"]:
        processes.say(
            f"{clip.file} is not the file with which {args.model} was trained, {origin['weights']} of --clip "
            f"{origin['name']} (SHA-256 {origin['sha256']}): unless it holds the same weights in another form, "
            "pictures will not fit"
        )
    args.clip_weights = clip.file  # also if it was the name of published weights
    return clip


def image_names(images: Any) -> list[str]:
    """The names of a set of images; [] for None."""
    return [images.name(index) for index in range(len(images or []))]


def check_masks(image_names: Sequence[str], mask_names: Sequence[str]) -> None:
    """Raise ValueError, in one line, unless each image has a mask. The mask has the name of the image, but for the
    ending. If images and masks share no name, they are paired in their order."""
    if len(image_names) != len(mask_names):
        raise ValueError(f"{len(image_names)} --images and {len(mask_names)} --masks: give one for each")
    images, masks = ([os.path.splitext(name)[0] for name in names] for names in (image_names, mask_names))
    if {*images} & {*masks} and images != masks:
        name = next(name for name, image, mask in zip(image_names, images, masks, strict=True) if image != mask)
        raise ValueError(f"{name} of --images has no mask of the same name in --masks: give both the same names")


def open_sources(args: argparse.Namespace, images: Any, clip: Any, device: torch.device) -> Iterator[Source]:
    """The conditions of each flag. Raises ValueError, in one line, and OSError."""
    import torch

    from tandem.data.decoding.arrays import read_array_header
    from tandem.data.decoding.texts import normalize_text
    from tandem.data.sources.demo.pictures import condition_of
    from tandem.data.sources.record import FileRef

    prompts = list(args.prompts or [])
    if args.prompt_file:
        try:
            prompts += text_lines(plain_text(read_bytes(args.prompt_file, LONGEST_FILE_BYTES)))
        except (OSError, ValueError) as error:
            raise ValueError(f"--prompt_file {args.prompt_file}: {error_text(error)}") from None
        if not prompts:
            raise ValueError(f"--prompt_file {args.prompt_file} holds no text")
    prompts = [*map(normalize_text, prompts)]  # captions are normalised in the same way in training
    flag = "--prompts" if args.prompts else "--prompt_file"
    if prompts and clip is not None:
        tokens, shapes = clip.tokenize(prompts), dict(zip(DIMS, ((clip.embed_dim,), clip.text_shape), strict=True))
        yield Source(
            flag, prompts, shapes,
            lambda rows: dict(zip(DIMS, clip.embed_text(tokens[rows].to(device)), strict=True)),
        )  # fmt: skip
    elif prompts:
        rows = [condition_of(prompt) for prompt in prompts]
        yield source_in_memory(flag, prompts, {name: torch.stack([row[name] for row in rows]) for name in DIMS})
    for name, option in zip(DIMS, ("image_embeddings", "text_embeddings"), strict=True):
        if path := getattr(args, option):
            try:
                array = torch.from_numpy(read_array_header(FileRef(path)).read(limit=MOST_BYTES))
            except ValueError as error:
                raise ValueError(f"--{option} {path}: {error}") from None
            if array.ndim != DIMS[name] or not len(array):
                shape = tuple(array.shape)
                raise ValueError(f"--{option} {path} has the shape {shape}: give rows of {DIMS[name] - 1} dimensions")
            yield source_in_memory(f"--{option}", [f"{path}[{row}]" for row in range(len(array))], {name: array})
    if embeds_images(args):

        def embed_images(rows: Sequence[int]) -> dict[str, Tensor]:
            pictures = torch.stack([images.load(row)["images"] for row in rows])
            return {"image_embed": clip.embed_images(pictures.to(device))}

        yield Source("--images", image_names(images), {"image_embed": (clip.embed_dim,)}, embed_images)


def choose_sources(sources: Sequence[Source], unets: Sequence[Any]) -> dict[str, Source]:
    """Name of a condition that the Unets take -> its source. Raises ValueError, in one line, if they do not fit."""
    from tandem.models.diffusion.decoder import CONDITIONS

    # Condition -> its width, and the most tokens of a text.
    limits = {name: (getattr(unet.spec, width), unet.spec.max_text_len)
              for name, width in CONDITIONS.items() for unet in unets if getattr(unet.spec, width)}  # fmt: skip
    chosen = {name: source for source in sources for name in source.shapes if name in limits}
    requires = " and ".join(limits) or "no condition"
    for source in sources:
        if source not in chosen.values():
            flags = {other.flag for name, other in chosen.items() if name in source.shapes}
            hint = f", which {' and '.join(sorted(flags))} gives" if flags else ""
            raise ValueError(f"{source.flag} has no effect: the Unets that draw take {requires}{hint}")
        if len(source.labels) != len(sources[0].labels):
            counts = (len(source.labels), len(sources[0].labels))
            raise ValueError(
                f"{source.flag} gives {counts[0]} conditions, {sources[0].flag} {counts[1]}: give equally many"
            )
    if limits and not chosen:
        raise ValueError("the model needs a condition: give --prompts, --image_embeddings or --text_embeddings")
    for name, source in chosen.items():
        (*tokens, width), (model_width, longest) = source.shapes[name], limits[name]
        if width != model_width:
            raise ValueError(f"{source.flag} gives width {width}; the model takes {name} of width {model_width}")
        if tokens and tokens[0] > longest:
            raise ValueError(f"{source.flag} gives texts of {tokens[0]} tokens; the model takes at most {longest}")
    return chosen


def check_unets(args: argparse.Namespace, decoder: Decoder, weaker: Decoder | None) -> range:
    """The indices of the Unets that draw. Raises ValueError, in one line, if flags do not fit them."""
    from tandem.models.diffusion.decoder import check_guide, is_conditional

    count = len(decoder.unets)
    first, last = args.start_at_unet, args.stop_at_unet or count
    if not first <= last <= count:
        raise ValueError(f"Unets {first} to {last} do not exist: the model has 1 to {count}")
    for name in ("cond_scale", "sample_timesteps"):
        if (n := len(getattr(args, name))) not in (1, count):
            expected = f"1 or {count}" if count > 1 else "1"
            raise ValueError(f"--{name} has {n} values and the model {count} Unets: give {expected}")
    unets = range(first - 1, last)
    scales = args.cond_scale * (count if len(args.cond_scale) == 1 else 1)
    is_guided = any(scales[index] != 1 for index in unets)
    if weaker is not None:
        check_guide(decoder, weaker)
        if "guide_with" in args.on_command_line and not is_guided:
            raise ValueError("--guide_with has no effect: --cond_scale is 1 for the Unets that draw")
    elif "cond_scale" in args.on_command_line and is_guided and not any(is_conditional(decoder.unet(i)) for i in unets):
        raise ValueError("--cond_scale has no effect: the Unets that draw take no condition")
    return unets


def hash_inputs(
    args: argparse.Namespace,
    trained: Mapping[str, Trained],
    pixels: Mapping[str, Any],
    heartbeat: Callable[[str], None],
) -> dict[str, str]:
    """SHA-256 of all inputs, files, models and images, as "FLAG_sha256" -> digest."""
    from tandem.data.stores.output import sha256_of

    hashes = {}
    for name, model in trained.items():
        hashes[name] = hashlib.sha256(json.dumps(model.identity, sort_keys=True).encode()).hexdigest()
    for name in ("image_embeddings", "text_embeddings", "clip", "clip_weights"):
        if (path := getattr(args, name)) and (name != "clip" or path.lower().endswith(".json")):
            hashes[name] = sha256_of([Path(path)])
    for name, images in pixels.items():
        digest = hashlib.sha256()
        for index in range(len(images or [])):
            heartbeat("reading images")
            try:
                pixels_of_image = images.load(index)["images"]
            except (OSError, ValueError) as error:
                raise ValueError(f"cannot read {images.describe(index)}: {error_text(error)}") from None
            digest.update(pixels_of_image.numpy().tobytes())
        hashes[name] = digest.hexdigest()
    return {f"{name}_sha256": digest for name, digest in hashes.items()}


def draw(args: argparse.Namespace, processes: ProcessGroup) -> None:
    """Draw the pictures. Raises AskedToStop after a signal."""
    import torch

    from tandem.data.sets import open_images
    from tandem.data.stores.codes import pixels_of, save_missing
    from tandem.data.stores.output import OutputFolder, names_sha256
    from tandem.models.building import require_room
    from tandem.training.generation import noise_of
    from tandem.weights.load import open_model

    for name in MODELS:
        fetch_model(getattr(args, name), processes)
    with processes.raise_on_all_ranks():
        trained = {name: open_model(path, "Decoder") for name in MODELS if (path := getattr(args, name))}
        models: dict[str, Decoder] = {name: loaded.model.to(processes.device) for name, loaded in trained.items()}
        decoder, guide = models["model"], models.get("guide_with")
        unets = check_unets(args, decoder, guide)
        largest = decoder.image_sizes[unets[-1]]
        require_room(f"{args.batch_size} pictures of {largest} pixels", args.batch_size, 3, largest, largest)
        # Images to enlarge have the size that the Unet before the first one draws, others the size of the last Unet.
        side = decoder.image_sizes[args.start_at_unet - 2 if args.start_at_unet > 1 else -1]
        processes.heartbeat("listing the samples", is_uninterrupted=True)
        images = open_images(args.images, image_size=side) if args.images else None
        masks = open_images(args.masks, image_size=side) if args.masks else None
        clip = load_clip(args, decoder.config["clip"], processes)
        sources = list(open_sources(args, images, clip, processes.device))
        chosen_sources = choose_sources(sources, [decoder.unet(index) for index in unets])
        names = image_names(images)
        labels = sources[0].labels if sources else names
        if names and len(names) != len(labels):
            raise ValueError(f"{len(names)} --images and {len(labels)} conditions: give one for each")
        if masks is not None:
            check_masks(names, image_names(masks))
        hashes = hash_inputs(args, trained, {"images": images, "masks": masks}, processes.heartbeat)
    for image_set in filter(None, (images, masks)):
        if image_set.skipped:
            processes.say(image_set.skipped)
    n_conditions = max(len(labels), 1)
    total = n_conditions * args.count
    sampling = Sampling.from_args(args)
    settings = {
        "task": "sample", "seed": args.seed, "count": args.count, "labels_sha256": names_sha256(labels),
        "pictures": total, "batch_size": args.batch_size, "sampling": sampling.to_dict(),
        "unets": [unets[0] + 1, unets[-1] + 1], "clip": args.clip,
        "resample_times": args.resample_times if args.masks else None, **hashes, **kernel_settings(args, processes),
    }  # fmt: skip
    output = OutputFolder(Path(args.output), settings, processes, fresh=args.fresh, say=processes.say)
    paths = [output.path / f"{number:05d}.png" for number in range(total)]
    batch_starts = range(0, total, args.batch_size)

    def draw_batch(first: int) -> Tensor:
        # The last batch is full, too: kernels may round differently for another number of pictures.
        numbers = range(first, first + args.batch_size)
        rows = [number // args.count % n_conditions for number in numbers]
        batches = {source.flag: source.load(rows) for source in chosen_sources.values()}
        conditions = {name: batches[source.flag][name].to(processes.device) for name, source in chosen_sources.items()}
        image_options: dict[str, Any] = {}
        if images is not None and not embeds_images(args):
            pixels = torch.stack([images.load(row)["images"] for row in rows]).to(processes.device).float() / 255
            image_options["inpaint_image" if masks is not None else "images"] = pixels
        if masks is not None:
            pixels = torch.stack([masks.load(row)["images"] for row in rows]).to(processes.device)
            image_options["inpaint_mask"] = pixels.float().mean(1) > 127.5
        with distributed.autocast(args.precision, processes.device):
            result: Tensor = decoder.sample(
                conditions, noise_of(args.seed, numbers, processes.device), sampling, batch=args.batch_size,
                start_at=args.start_at_unet, stop_at=args.stop_at_unet, guide=guide,
                resample_times=args.resample_times, on_step=lambda *_: processes.heartbeat("drawing pictures"),
                **image_options,
            )  # fmt: skip
        return result

    for batch_index in output.rounds(range(len(batch_starts)), "drew"):
        with processes.raise_on_all_ranks():
            if batch_index is not None:
                start = batch_starts[batch_index]
                batch_paths = paths[start : start + args.batch_size]
                save_missing(batch_paths, pixels_of([start], draw_batch), max(1, args.num_workers))
    with processes.raise_on_all_ranks():
        if processes.is_root:
            lines = [
                {"path": path.name, "for": labels[n // args.count] if labels else None, "seed": [args.seed, n]}
                for n, path in enumerate(paths)
            ]
            output.write("index.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    processes.say(f"{counted(total, 'picture')}: {args.output}")


def main(argv: Sequence[str] | None = None) -> None:
    start_inference(draw, build_parser(), argv)


if __name__ == "__main__":
    main()
