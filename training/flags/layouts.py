"""The two models that train_mulan.py trains, which --layout chooses, and what of its arguments belongs to which."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .parser import ArgumentParser
from .towers import LATER_MODEL_ARGUMENTS

# The one value that a flag has with --layout musiclm, whose model is not given it.
_FIXED: Mapping[str, str] = {"spectrogram": "power", "spectrogram_padding": "reflect", "hierarchical_spacing": "even"}
# Samples of a window, its transform and its hop in that package, taken if none of the three is given.
_WINDOWS = {"n_fft": 128, "win_length": 24, "hop_length": 12}
# What else the model of --layout musiclm has not got.
_ONLY_OF_TANDEM = (
    "layout", "n_mels", "fmin", "fmax", "text_tower", "audio_tower", "freeze_text_tower", "freeze_audio_tower"
)  # fmt: skip


def add_model_group(parser: ArgumentParser) -> Callable[..., Any]:
    """Add the group of the model's flags with --layout, which decides some other flags if it is musiclm. Returns what
    adds the others."""
    add = parser.add_argument_group("model").add_argument
    add("--layout", type=str.lower, choices=("tandem", "musiclm"), default="tandem",
        help="tandem: this project's model; musiclm: that of musiclm-pytorch, which loads its weights")  # fmt: skip

    def settle(args: argparse.Namespace) -> None:
        if args.layout == "tandem":
            return
        parser.refuse_idle(args, ["n_mels", "fmin", "fmax"], "layout", "tandem", False)
        if not _WINDOWS.keys() & args.explicit:
            for name, length in _WINDOWS.items():
                setattr(args, name, length)
        for name, value in _FIXED.items():
            if name in args.explicit and (given := getattr(args, name)) != value:
                parser.error(f"--{name} {given} is not for --layout musiclm, which has {value} alone")
            setattr(args, name, value)
        for name in ("text_tower", "audio_tower"):
            if getattr(args, name):
                parser.error(f"--{name} is for --layout tandem; the towers of musiclm-pytorch are its own")

    parser.add_consequence(settle)
    return add


def model_of_layout(args: argparse.Namespace, names: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The name of the model's class, and its constructor arguments: those flags among ``names`` that it has, and its
    own."""
    left_out = ("layout",) if args.layout == "tandem" else (*_FIXED, *_ONLY_OF_TANDEM)
    arguments = {name: getattr(args, name) for name in names if name not in left_out}
    if args.layout == "tandem":
        return "MuLaN", arguments
    return "MusicLMMuLaN", {**arguments, "sigmoid_contrastive_loss": args.loss == "sigmoid"}


def fixed_arguments(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Names of the settings that a resumed run may not change: these, those of a later date and, for one model, its
    loss."""
    return [*names, *LATER_MODEL_ARGUMENTS, *(["loss"] if args.layout == "musiclm" else [])]
