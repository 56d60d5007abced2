"""The flags of pretrained towers of MuLan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .parser import ArgumentParser

# Flags that have no effect beside a pretrained tower.
_DECIDED_BY_TEXT_TOWER = ("text_dim", "text_depth", "text_heads", "text_dim_head")
_DECIDED_BY_AUDIO_TOWER = (
    "audio_dim", "audio_depth", "audio_heads", "audio_dim_head", "spectrogram", "n_fft", "win_length", "hop_length",
    "spectrogram_padding", "n_mels", "fmin", "fmax", "patch_size", "patch_dropout",
)  # fmt: skip


def add_tower_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name the files of pretrained towers."""
    # fmt: off
    add = parser.add_argument_group("pretrained towers").add_argument
    add("--text_tower", metavar="PATH",
        help="pretrained text tower: an open_clip state dict, or a transformers folder of CLIP, BERT or RoBERTa")
    add("--text_tower_quick_gelu", action="store_true",
        help="the state dict of --text_tower is of a model with OpenAI's activation, quick_gelu")
    add("--audio_tower", metavar="DIR",
        help="pretrained audio tower: a transformers folder of an audio spectrogram transformer (AST)")
    add("--freeze_text_tower", action="store_true", help="do not train the weights of --text_tower")
    add("--freeze_audio_tower", action="store_true", help="do not train the weights of --audio_tower")
    # fmt: on


def settle_tower_arguments(parser: ArgumentParser, args: argparse.Namespace) -> None:
    """Take the tokenizer that is in the folder of the text tower, unless one is given; end with a one-line error if a
    flag on the command line has no effect."""
    decided = {"text": _DECIDED_BY_TEXT_TOWER, "audio": _DECIDED_BY_AUDIO_TOWER}
    for name, flags in decided.items():
        parser.refuse_idle(args, [f"freeze_{name}_tower"], f"{name}_tower", "PATH", getattr(args, f"{name}_tower"))
        if getattr(args, f"{name}_tower") and (idle := [flag for flag in flags if flag in args.on_command_line]):
            parser.error(f"--{idle[0]} has no effect with --{name}_tower, which decides that; leave it out")
    if args.text_tower and "tokenizer" not in args.explicit:
        folder = Path(args.text_tower).expanduser()
        if (folder / "tokenizer.json").is_file():
            args.tokenizer = str(folder / "tokenizer.json")
        elif folder.is_dir() and not (folder / "open_clip_config.json").is_file():
            parser.error(f"--text_tower {args.text_tower} has no tokenizer.json: give --tokenizer, or clip for CLIP's")
