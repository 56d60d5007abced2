"""Draw pictures with a trained decoder, under any launcher; the same pictures on any number of processes.

    python sample.py --model runs/decoder-demo/model --prompts 'a red circle on the left' 'a blue star top right' \
        --count 4 --output pictures/
    torchrun --nproc_per_node 8 sample.py --model runs/decoder/model --image_embeddings rows.npy --output pictures/
    python sample.py --model runs/decoder/model --clip ViT-L-14 --clip_weights vit.safetensors --images photos/ \
        --output variations/

OUTPUT/00000.png is a PNG for each picture, and OUTPUT/index.jsonl says of each what it was drawn for. Picture n depends
on its condition, --seed, n and the settings of the sampler alone. A stopped command is continued by the same one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import distributed
from training import files
from training.flags.converters import non_negative_int, positive_int
from training.flags.decoder import add_sampling_arguments
from training.flags.inference import add_computation_arguments, add_output_arguments
from training.flags.parser import ArgumentParser
from training.flags.unets import sampling_of
from training.run.stages import Say, kernel_settings, run_stages

if TYPE_CHECKING:
    from torch import Tensor

    from models import Decoder

CONDITIONS = ("prompts", "prompt_file", "image_embeddings", "text_embeddings")


def build_parser() -> ArgumentParser:
    parser = ArgumentParser("sample.py", "Draw pictures with a trained decoder.", is_root=distributed.launched_as_root)
    parser.usage = "%(prog)s --model DIR --output DIR [conditions] [flags]"
    # fmt: off
    group = parser.add_argument_group("from and to")
    group.add_argument("--model", required=True, metavar="DIR", help="model/ folder of a run of train_decoder.py")
    add_output_arguments(group, output_help="folder to write; an incomplete one is continued", required=True)

    add = parser.add_argument_group("conditions").add_argument
    add("--prompts", nargs="+", metavar="TEXT",
        help="draw for these texts: of demo:shapes, such as 'a small red circle on the left'; else --clip encodes them")
    add("--prompt_file", metavar="FILE", help="draw for each line of this text file")
    add("--image_embeddings", metavar="FILE", help="draw for each row of this .npy, (n, d)")
    add("--text_embeddings", metavar="FILE", help="draw for each text of this .npy of encodings, (n, tokens, d)")
    add("--clip", metavar="NAME", help="model of open_clip that encodes --prompts")
    add("--clip_weights", metavar="FILE", help="weights for --clip: safetensors or a plain state dict")
    add("--count", type=positive_int, default=1, metavar="N",
        help="pictures for each condition; without conditions, pictures of a model that takes none")
    add("--seed", type=non_negative_int, default=0, metavar="INT", help="seed of the noise")
    add("--start_at_unet", type=positive_int, default=1, metavar="NUMBER",
        help="first Unet, from 1; a later one enlarges --images")
    add("--stop_at_unet", type=positive_int, metavar="NUMBER", help="last Unet (default: all)")
    add("--images", metavar="DIR", help="folder of pictures to enlarge (--start_at_unet), or to fill in (--masks)")
    add("--masks", metavar="DIR",
        help="folder with an image for each of --images, black where something new is to be drawn, white where the "
        "picture stays")
    add("--resample_times", type=positive_int, default=5, metavar="N",
        help="with --masks, how often each step is made, so that old and new parts fit (RePaint)")
    add("--guide_with", metavar="DIR",
        help="guide away from this weaker model/ folder, not from the model without condition (Karras et al. 2024)")
    add_sampling_arguments(parser)
    # fmt: on
    add_computation_arguments(parser, batch_size=16, unit="PICTURES", num_workers_help="threads that write pictures")
    distributed.add_arguments(parser)
    return parser


def load_conditions(args: argparse.Namespace, decoder: Decoder, backend: distributed.Backend) -> tuple[Any, list[str]]:
    """Conditions of pictures, (n, ...) by name, and a line for each. ValueError if the model takes others."""
    import numpy as np
    import torch

    from data.images.scenes import condition_of

    config: Any = decoder.unets[0].config
    takes = {"image_embed": config["cond_on_image_embeds"], "text_encodings": config["cond_on_text_encodings"]}
    given: dict[str, Tensor] = {}
    labels: list[str] = []
    prompts = list(args.prompts or [])
    if args.prompt_file:
        prompts += [line.strip() for line in Path(args.prompt_file).read_text().splitlines() if line.strip()]
    if prompts and args.clip:
        from models.clip import Clip

        with torch.no_grad():
            clip = Clip.from_file(args.clip, args.clip_weights).to(backend.device)
            given["image_embed"], given["text_encodings"] = clip.embed_text(clip.tokenize(prompts).to(backend.device))
        labels = prompts
    elif prompts:
        rows = [condition_of(prompt) for prompt in prompts]
        given = {name: torch.stack([row[name] for row in rows]) for name in takes}
        labels = prompts
    for name, path in (("image_embed", args.image_embeddings), ("text_encodings", args.text_embeddings)):
        if path:
            given[name] = torch.from_numpy(np.load(path, allow_pickle=False).astype(np.float32))
            labels = labels or [f"{path}[{row}]" for row in range(len(given[name]))]
    if (takes["image_embed"] or takes["text_encodings"]) and not given and args.start_at_unet == 1:
        raise ValueError("the model needs a condition: give --prompts, --image_embeddings or --text_embeddings")
    given = {name: value for name, value in given.items() if takes[name]}
    for name, value in given.items():
        width = config["image_embed_dim"] if name == "image_embed" else config["text_embed_dim"]
        if value.shape[-1] != width or value.ndim != (2 if name == "image_embed" else 3):
            raise ValueError(f"conditions of shape {tuple(value.shape)}; the model takes {name} of width {width}")
        if len(value) != len(labels):
            raise ValueError(f"{len(value)} conditions and {len(labels)} texts: give one for each")
    return given, labels


def draw(args: argparse.Namespace, backend: distributed.Backend, say: Say) -> int:
    """Draw the pictures; returns how many shards are left to do after a signal."""
    import torch

    import data
    from data.stores.output import OutputFolder, sha256_of
    from data.stores.pngs import is_complete, save, to_pixels
    from models import Decoder
    from models.decoder import Sampling
    from models.files.pretrained import read_headers
    from training.generation import noise_of

    with backend.agreement():
        folder = Path(args.model)
        decoder = Decoder.from_pretrained(folder).to(backend.device)
        weaker = Decoder.from_pretrained(args.guide_with).to(backend.device) if args.guide_with else None
        sha256 = sha256_of(folder / file for file in sorted(read_headers(folder)))
        conditions, labels = load_conditions(args, decoder, backend)
        side = decoder.image_sizes[max(args.start_at_unet - 2, 0) if args.start_at_unet > 1 else -1]
        images = data.open_images(args.images, image_size=side) if args.images else None
        masks = data.open_images(args.masks, image_size=side) if args.masks else None
        if images is not None and not labels:
            labels = [images.name(index) for index in range(len(images))]
        if images is not None and len(images) != len(labels):
            raise ValueError(f"{len(images)} --images and {len(labels)} conditions: give one for each")
        if masks is not None and (images is None or len(masks) != len(images)):
            raise ValueError("--masks needs --images, and as many of them")
        if args.start_at_unet > 1 and images is None:
            raise ValueError(f"--start_at_unet {args.start_at_unet} needs --images to enlarge")
    n_conditions = max(len(labels), 1)
    total = n_conditions * args.count
    how = sampling_of(args)
    settings = {
        "task": "sample", "weights_sha256": sha256, "seed": args.seed, "count": args.count, "labels": labels[:1000],
        "pictures": total, "batch_size": args.batch_size, "sampling": how, "guide_with": args.guide_with,
        "unets": [args.start_at_unet, args.stop_at_unet], "images": args.images, "masks": args.masks,
        "precision": backend.options.precision, **kernel_settings(args, backend),
    }  # fmt: skip
    output = OutputFolder(Path(args.output), settings, backend, files, fresh=args.fresh, say=say)
    paths = [output.path / f"{number:05d}.png" for number in range(total)]
    firsts = range(0, total, args.batch_size)

    def pictures(first: int) -> Tensor:
        # Kernels may round differently for another number of pictures: the last batch is filled up.
        numbers = range(first, first + args.batch_size)
        rows = torch.tensor([number // args.count % n_conditions for number in numbers])
        chosen = {name: value[rows].to(backend.device) for name, value in conditions.items()}
        given: dict[str, Any] = {}
        if images is not None:
            loaded = torch.stack([images.load(int(row)) for row in rows]).to(backend.device).float() / 255
            given["inpaint_image" if masks is not None else "images"] = loaded
        if masks is not None:
            loaded = torch.stack([masks.load(int(row)) for row in rows]).to(backend.device)
            given["inpaint_mask"] = loaded.float().mean(1) > 127.5
        with backend.autocast():
            drawn: Tensor = decoder.sample(
                chosen, noise_of(args.seed, numbers, backend.device), Sampling(**how), batch=args.batch_size,
                start_at=args.start_at_unet, stop_at=args.stop_at_unet, guide=weaker,
                resample_times=args.resample_times, on_step=lambda done, of: backend.mark("drawing pictures"), **given,
            )  # fmt: skip
        return drawn

    for shard in output.rounds(range(len(firsts)), "drew"):
        with backend.agreement():
            if shard is not None:
                here = paths[firsts[shard] : firsts[shard] + args.batch_size]
                if not all(map(is_complete, here)):
                    for path, pixels in zip(here, to_pixels(pictures(firsts[shard])), strict=False):
                        save(path, pixels)
    if not output.shards_left:
        with backend.agreement():
            if backend.is_root:
                lines = [
                    {"path": path.name, "for": labels[n // args.count] if labels else None, "seed": [args.seed, n]}
                    for n, path in enumerate(paths)
                ]
                output.write("index.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    say(f"{min(total, (len(firsts) - output.shards_left) * args.batch_size)} pictures: {args.output}")
    return output.shards_left


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse(argv)
    try:
        with distributed.for_inference(args) as backend:
            run_stages([draw], args, backend)
    except distributed.UserMistake as mistake:
        parser.error(str(mistake))


if __name__ == "__main__":
    main()
