"""The flag of a user's own dataset. Imports the standard library only, so that `--help` is fast."""

from __future__ import annotations

import argparse

from .parser import ArgumentParser

_PLACES = {"image_folder": "photos/", "video_folder": "clips/", "audio_data": "sounds/"}


def add_dataset_argument(parser: ArgumentParser, data_flag: str) -> None:
    """Add --dataset, which is given instead of the flag `data_flag`, whose name has no dashes."""
    parser.add_argument_group("own dataset").add_argument(
        "--dataset",
        metavar="MODULE:FUNCTION",
        help=f"instead of --{data_flag}: a Python function that gets the arguments of the run and returns an object "
        "with __len__ and __getitem__; its module may be in the current folder; see docs/data.md",
    )
    default = parser.get_default(data_flag)

    def choose(args: argparse.Namespace) -> None:
        if args.dataset is None:
            return
        for said in (args.on_command_line, args.explicit):
            if data_flag in said and "dataset" not in said:
                args.dataset = None
                return
            if "dataset" in said:
                if data_flag in said and getattr(args, data_flag) != default:
                    parser.error(f"--dataset and --{data_flag} exclude one another; give one of them")
                setattr(args, data_flag, default)
                return

    parser.add_consequence(choose)


def place_of(args: argparse.Namespace, data_flag: str) -> str:
    """Where the samples of a run are, for a command that reads some: a folder to choose if they are an own dataset."""
    return _PLACES[data_flag] if args.dataset else getattr(args, data_flag)
