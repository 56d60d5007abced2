"""The files of public packages that `convert.py` reads and writes, by the name that --to gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tandem.io.archive import has_weight_name
from tandem.io.published import check_has_one_set
from tandem.io.weights import first_names, read_content, why_no_weights
from tandem.models.base import CONFIG_FILE

from .dalle import load_dalle, save_dalle
from .dalle2 import describe_public_decoder, is_public_decoder, load_public_decoder, save_public_decoder
from .description import describe_dalle_file
from .diffusers import DIFFUSERS, save_folder
from .muse import (
    describe_public_vqgan,
    is_public_vqgan,
    load_public_discriminator,
    load_public_vqgan,
    save_public_vqgan,
)
from .musiclm import assumed, describe_public_mulan, is_public_mulan, load_public_mulan, save_public_mulan
from .taming import (
    LLAMAGEN,
    TAMING_LAYOUT,
    Layout,
    describe_autoencoder,
    llamagen_assumption,
    load_autoencoder,
    save_autoencoder,
)


class PublicFormat(NamedTuple):
    """The format of a public package's files. All functions raise ValueError, in one line, for files and models that do
    not fit."""

    model: str
    """Class of its models."""
    is_format: Callable[[Path], bool]
    load: Callable[[Path, str], Any]
    """(path, "best", "ema" or "online") -> model in eval mode."""
    save: Callable[..., str | None]
    """(model, path), and a keyword `discriminator` if the format has one -> a note about the file for the user."""
    describe: Callable[[Path], dict[str, Any]]
    load_discriminator: Callable[[Path], Any] | None = None
    """path -> the discriminator in the file, or None; None for a format that has none."""
    assumed: Callable[[Mapping[str, Any]], str] | None = None
    """`config` of a model that was read -> a text about the values that its file lacks; None for a complete format."""


def _load_dalle(path: Path, weights: str) -> Any:
    check_has_one_set(path, weights)
    return load_dalle(path)


def _taming_format(layout: Layout, is_format: Callable[[Path], bool], save: Any = None) -> PublicFormat:
    load, describe = partial(load_autoencoder, layout), partial(describe_autoencoder, layout)
    return PublicFormat("VQGAN", is_format, load, save or partial(save_autoencoder, layout), describe)


# The format of a file, or of a folder of diffusers, is the first one whose `is_format` is true.
FORMATS = {
    "diffusers": _taming_format(DIFFUSERS, Path.is_dir, save_folder),
    "dalle2": PublicFormat(
        "Decoder", is_public_decoder, lambda path, weights: load_public_decoder(path, weights=weights),
        save_public_decoder, describe_public_decoder,
    ),
    "muse": PublicFormat(
        "VQGAN", is_public_vqgan, lambda path, weights: load_public_vqgan(path, weights=weights), save_public_vqgan,
        describe_public_vqgan, load_public_discriminator,
    ),
    "musiclm": PublicFormat(
        "MuLaN", is_public_mulan, lambda path, weights: load_public_mulan(path, weights=weights),
        save_public_mulan, describe_public_mulan, assumed=assumed,
    ),
    "llamagen": _taming_format(LLAMAGEN, lambda path: has_weight_name(path, b"encoder.conv_blocks."))._replace(
        assumed=llamagen_assumption
    ),
    "taming": _taming_format(TAMING_LAYOUT, lambda path: has_weight_name(path, b"encoder.conv_in.weight")),
    "dalle": PublicFormat(
        "DiscreteVAE", lambda path: has_weight_name(path, b"hparams"), _load_dalle, save_dalle,
        describe_dalle_file,
    ),
}  # fmt: skip


def detect_format(path: Path) -> PublicFormat:
    """The format of a file. Reads little of it, and runs none of its code.

    Raises:
        ValueError: one line, with what the file holds, if it has none of the formats.
    """
    if path.is_file() and (reason := why_no_weights(path)):
        raise ValueError(f"{path} holds no weights: {reason}")
    if public_format := next((candidate for candidate in FORMATS.values() if candidate.is_format(path)), None):
        return public_format
    if (path.parent / CONFIG_FILE).is_file():
        raise ValueError(f"{path} is of the model folder that it is in: give {path.parent}")
    content = read_content(path)
    names = first_names(content) if isinstance(content, dict) else f"a {type(content).__name__}"
    raise ValueError(f"{path} holds {names}: no model of {', '.join(FORMATS)} has such names (README, trained weights)")
