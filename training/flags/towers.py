"""The flags of the towers of MuLan: their sizes, and the files of pretrained ones."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .converters import fraction, size, size_or_0

if TYPE_CHECKING:
    from .parser import ArgumentParser

# Arguments of the model that a run of an older version has not got, with the values that it was trained with.
LATER_MODEL_ARGUMENTS: Mapping[str, Any] = {
    "audio_heads": None, "text_heads": None, "audio_dim_head": None, "text_dim_head": None, "ff_mult": 4,
    "win_length": None, "spectrogram_padding": "silence", "hierarchical_spacing": "last", "text_tower": None,
    "audio_tower": None, "layout": "tandem",
}  # fmt: skip

# Flags that have no effect beside a pretrained tower.
_DECIDED_BY_TEXT_TOWER = ("text_dim", "text_depth", "text_heads", "text_dim_head")
_DECIDED_BY_AUDIO_TOWER = (
    "audio_dim", "audio_depth", "audio_heads", "audio_dim_head", "spectrogram", "n_fft", "win_length", "hop_length",
    "spectrogram_padding", "n_mels", "fmin", "fmax", "patch_size", "patch_dropout",
)  # fmt: skip


def add_tower_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of both towers."""
    # fmt: off
    add = parser.add_argument_group("towers").add_argument
    add("--audio_dim", type=size, default=512, metavar="DIM", help="width of the audio tower")
    add("--audio_depth", type=size, default=6, metavar="LAYERS", help="transformer layers of the audio tower")
    add("--text_dim", type=size, default=512, metavar="DIM", help="width of the text tower")
    add("--text_depth", type=size, default=6, metavar="LAYERS", help="transformer layers of the text tower")
    add("--heads", type=size, default=8, metavar="N", help="attention heads of both towers")
    add("--dim_head", type=size, default=64, metavar="DIM", help="width of an attention head")
    add("--audio_heads", type=size, metavar="N", help="attention heads of the audio tower (default: --heads)")
    add("--audio_dim_head", type=size, metavar="DIM",
        help="width of an attention head of the audio tower (default: --dim_head)")
    add("--text_heads", type=size, metavar="N", help="attention heads of the text tower (default: --heads)")
    add("--text_dim_head", type=size, metavar="DIM",
        help="width of an attention head of the text tower (default: --dim_head)")
    add("--ff_mult", type=size, default=4, metavar="N",
        help="inner width of the feed-forwards, in widths of the tower, before the 2/3 of GEGLU")
    add("--attn_dropout", type=fraction, default=0.0, metavar="FRACTION",
        help="part of the attention weights, and of the outputs of attention, that is dropped in training")
    add("--ff_dropout", type=fraction, default=0.0, metavar="FRACTION",
        help="part of the inner numbers of the feed-forwards that is dropped in training")
    add("--patch_size", type=size, default=16, metavar="BINS", help="side of a patch of the spectrogram")
    add("--patch_dropout", type=fraction, default=0.25, metavar="FRACTION",
        help="part of the patches that is left out in training")
    add("--hierarchical_layers", type=size_or_0, default=0, metavar="LAYERS",
        help="apply the loss to the outputs of this number of layers before the last, too")
    add("--hierarchical_spacing", type=str.lower, choices=("last", "even"), default="last",
        help="layers of --hierarchical_layers: those next to the last, or spaced evenly from the first one on")

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


def resolved(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run with those that it has not got, or leaves to others, for comparison with another run's."""
    found = {**LATER_MODEL_ARGUMENTS, **settings}
    of_both = {f"{tower}_{name}": name for tower in ("audio", "text") for name in ("heads", "dim_head")}
    for name, other in {**of_both, "win_length": "n_fft"}.items():
        found[name] = found.get(other) if found[name] is None else found[name]
    # A checkpoint knows its towers itself, wherever their files are now. Of losses, which only the model of --layout
    # musiclm knows, it matters whether they have a bias.
    towers = {name: bool(found[name]) for name in ("text_tower", "audio_tower")}
    return {**found, **towers, "loss": found.get("loss") == "sigmoid"}
