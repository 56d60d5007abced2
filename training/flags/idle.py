"""Refuses flags that would have no effect in a run. Imports the standard library only, so that `--help` is fast."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from .parser import ArgumentParser


def refuse_idle_flags(parser: ArgumentParser, args: argparse.Namespace, *groups: str) -> None:
    """End with an error if a flag of these groups ("quantizer", "adversary", "images", "videos",
    "conditioned images", "clip") stands on the command line and has no effect beside the other flags."""
    for group in groups:
        _GROUPS[group](parser, args)


def _quantizer(parser: ArgumentParser, args: argparse.Namespace) -> None:
    parser.refuse_idle(args, ["vq_decay", "vq_cosine"], "quantizer", "vq", args.quantizer == "vq")
    parser.refuse_idle(args, ["fsq_levels"], "quantizer", "fsq", args.quantizer == "fsq")
    parser.refuse_idle(args, ["soft_clamp"], "quantizer", "lfq", args.quantizer == "lfq")


def _adversary(parser: ArgumentParser, args: argparse.Namespace) -> None:
    penalty = ["penalty", "apply_grad_penalty_every"]
    parser.refuse_idle(args, penalty, "penalty_weight", "above 0", args.penalty_weight > 0)
    parser.refuse_idle(args, ["lecam_decay"], "lecam_weight", "above 0", args.lecam_weight > 0)


def _images(parser: ArgumentParser, args: argparse.Namespace) -> None:
    crops = ["crop", "crop_area"]
    is_cut = args.dataset is not None or not args.image_folder.startswith("demo:")
    parser.refuse_idle(args, crops, "image_folder", "PATH", is_cut)


def _videos(parser: ArgumentParser, args: argparse.Namespace) -> None:
    is_own = args.dataset is not None
    of_files = any(not (spec or "demo:").startswith("demo:") for spec in (args.video_folder, args.image_folder))
    parser.refuse_idle(args, ["crop", "crop_area"], "video_folder", "PATH", is_own or of_files)
    is_demo = args.video_folder.startswith("demo:")
    parser.refuse_idle(args, ["short_clips"], "video_folder", "PATH", is_own or not is_demo)
    parser.refuse_idle(args, ["clip_starts"], "video_folder", "PATH", not is_demo)
    parser.refuse_idle(args, ["image_every"], "image_folder", "PATH", args.image_folder is not None)


def _conditioned_images(parser: ArgumentParser, args: argparse.Namespace) -> None:
    _images(parser, args)
    by_row = args.image_embeddings is not None or args.text_embeddings is not None
    parser.refuse_idle(args, ["shard_width"], "image_folder", "with {} for the number", "{}" in args.image_folder)
    parser.refuse_idle(args, ["index_width"], "image_embeddings", "PATH", by_row)
    _clip(parser, args)


def _clip(parser: ArgumentParser, args: argparse.Namespace) -> None:
    parser.refuse_idle(args, ["clip_weights"], "clip", "NAME", args.clip is not None)
    if args.clip is not None and args.clip_weights is None:
        parser.error(f"--clip {args.clip} needs the file of its weights: give --clip_weights; nothing is downloaded")


_GROUPS: dict[str, Callable[[ArgumentParser, argparse.Namespace], None]] = {
    "quantizer": _quantizer,
    "adversary": _adversary,
    "images": _images,
    "videos": _videos,
    "conditioned images": _conditioned_images,
    "clip": _clip,
}
