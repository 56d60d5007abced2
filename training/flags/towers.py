"""Flags of the two models that train_mulan.py trains, which --layout chooses, and of pretrained towers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.converters import FOLDER, PATH
from tandem.fields import flag, given

if TYPE_CHECKING:
    from .parser import ArgumentParser

#: The one value that a flag has with --layout musiclm, whose model is not given it.
FIXED: Mapping[str, str] = {"spectrogram": "power", "spectrogram_padding": "reflect", "hierarchical_spacing": "even"}
# Samples of a window, its transform and its hop in that package, taken if none of the three is given.
_WINDOWS = {"n_fft": 128, "win_length": 24, "hop_length": 12}
# Flags that have no effect beside a pretrained tower.
_DECIDED_BY_TOWER = {
    "text": ("text_dim", "text_depth", "text_heads", "text_dim_head"),
    "audio": (
        "audio_dim", "audio_depth", "audio_heads", "audio_dim_head", "spectrogram", "n_fft", "win_length", "hop_length",
        "spectrogram_padding", "n_mels", "fmin", "fmax", "patch_size", "patch_dropout",
    ),
}  # fmt: skip


@dataclass
class PretrainedTowerFlags:
    """Which towers come from files."""

    text_tower: str | None = flag(
        None,
        "pretrained text tower: an open_clip state dict, or a transformers folder of CLIP, BERT or RoBERTa",
        PATH,
        title="pretrained towers",
        lasting=bool,
    )
    text_tower_quick_gelu: bool = flag(
        False,
        "the state dict of --text_tower is of a model with OpenAI's activation, quick_gelu",
        needs=given("text_tower", "PATH"),
    )
    audio_tower: str | None = flag(
        None,
        "pretrained audio tower: a transformers folder of an audio spectrogram transformer (AST)",
        FOLDER,
        lasting=bool,
    )

    @classmethod
    def settle(cls, args: argparse.Namespace, parser: ArgumentParser) -> None:
        """Take the tokenizer that is in the folder of the text tower, unless one is given."""
        for name, flags in _DECIDED_BY_TOWER.items():
            if getattr(args, f"{name}_tower") and (idle := [flag for flag in flags if flag in args.on_command_line]):
                parser.error(f"--{idle[0]} has no effect with --{name}_tower, which decides that; leave it out")
        if args.text_tower and "tokenizer" not in args.explicit:
            folder = Path(args.text_tower).expanduser()
            if (folder / "tokenizer.json").is_file():
                args.tokenizer = str(folder / "tokenizer.json")
            elif folder.is_dir() and not (folder / "open_clip_config.json").is_file():
                tower = f"--text_tower {args.text_tower}"
                parser.error(f"{tower} has no tokenizer.json: give --tokenizer, or clip for CLIP's")


@dataclass
class LayoutFlags:
    """Which model is trained. Stands before `MuLaNConfig`, whose other sizes follow from these."""

    layout: str = flag(
        "tandem",
        "tandem: this project's model; musiclm: that of musiclm-pytorch, which loads its weights",
        choices=("tandem", "musiclm"),
        lasting=True,
        title="model",
    )

    @classmethod
    def settle(cls, args: argparse.Namespace, parser: ArgumentParser) -> None:
        """Give --layout musiclm the windows and the settings of its package."""
        if args.layout == "tandem":
            return
        args.lasting["loss"] = lambda loss: loss == "sigmoid"  # that model learns a bias for it alone
        parser.refuse_idle(args, ["n_mels", "fmin", "fmax"], "layout", "tandem", False)
        if not _WINDOWS.keys() & args.explicit:
            for name, length in _WINDOWS.items():
                setattr(args, name, length)
        for name, value in FIXED.items():
            if name in args.explicit and (given := getattr(args, name)) != value:
                parser.error(f"--{name} {given} is not for --layout musiclm, which has {value} alone")
            setattr(args, name, value)
        for name in ("text_tower", "audio_tower"):
            if getattr(args, name):
                parser.error(f"--{name} is for --layout tandem; the towers of musiclm-pytorch are its own")
