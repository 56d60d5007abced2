"""Flags of the two models that train_mulan.py trains, which --layout chooses, and of pretrained towers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.converters import FOLDER, PATH
from tandem.fields import flag, given

if TYPE_CHECKING:
    from .parser import ArgumentParser

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
    """Which model is trained."""

    layout: str = flag(
        "tandem",
        "tandem: this project's model; musiclm: that of musiclm-pytorch, which loads its weights",
        choices=("tandem", "musiclm"),
        lasting=True,
        title="model",
    )

    @classmethod
    def settle(cls, args: argparse.Namespace, parser: ArgumentParser) -> None:
        """Refuse pretrained towers beside --layout musiclm, in a config file, too."""
        if args.layout == "tandem":
            return
        args.lasting["loss"] = lambda loss: loss == "sigmoid"  # that model learns a bias for it alone
        for name in ("text_tower", "audio_tower"):
            if getattr(args, name):
                parser.error(f"--{name} is for --layout tandem; the towers of musiclm-pytorch are its own")
