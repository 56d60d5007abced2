"""The files of public packages that `convert.py` reads and writes, by the name that --to gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tandem.io.archive import has_weight_name
from tandem.io.reading import READ_ERRORS, one_line
from tandem.io.weights import first_names, read_content, why_no_weights
from tandem.models.base import CONFIG_FILE, build

from . import wan
from .dalle import read_dalle, save_dalle
from .dalle2 import is_public_decoder, read_public_decoder, save_public_decoder
from .description import describe_weights
from .diffusers import read_folder, save_folder
from .muse import PACKAGE as MUSE
from .muse import read_public_discriminator, read_public_vqgan, save_public_vqgan
from .musiclm import PACKAGE as MUSICLM
from .musiclm import musiclm_assumptions, read_public_mulan, save_public_mulan
from .taming import LLAMAGEN, TAMING_LAYOUT, Layout, llamagen_assumptions, read_autoencoder, save_autoencoder

_READ_ERRORS: tuple[type[Exception], ...] = (*READ_ERRORS, RuntimeError)

Contents = tuple[dict[str, Any], dict[str, Tensor]]
"""Constructor arguments and weights of a model of this package."""


class PublicFormat(NamedTuple):
    """The format of a public package's files. No code in a file is run. Except for `read` and `read_discriminator`, all
    functions raise ValueError, in one line, for files and models that do not fit."""

    package: str
    models: tuple[str, ...]
    """Names of the classes of its models."""
    is_format: Callable[[Path], bool]
    read: Callable[[Path, str], Contents]
    """(path, "best", "ema" or "online") -> contents, with the class as the argument "model" if there are several.
    Raises `READ_ERRORS` or RuntimeError."""
    save: Callable[..., str | None]
    """(model, path), and a keyword `discriminator` if the format has one -> a note about the file for the user."""
    read_discriminator: Callable[[Path], Contents | None] | None = None
    """path -> contents of the discriminator in the file, or None; None for a format that has none."""
    assumptions: Callable[[Mapping[str, Any]], str] | None = None
    """`config` of a model that was read -> a text about the values that its file lacks; None for a complete format."""

    def load(self, path: Path, weights: str = "best", is_lazy: bool = False) -> Any:
        """The model in a file or folder, in eval mode.

        Args:
            weights: Of a file with both: the moving average ("ema" or "best"), or the weights as trained ("online").
            is_lazy: See `build_with_weights`.
        """
        with _errors_with_path(path):
            arguments, state = self.read(path, weights)
        return build({"model": self.models[0], **arguments}, state, path, is_lazy)

    def load_discriminator(self, path: Path) -> Any:
        """The discriminator in a file, in eval mode; None if there is none."""
        with _errors_with_path(path):
            contents = self.read_discriminator(path) if self.read_discriminator else None
        return contents and build({**contents[0], "model": "Discriminator"}, contents[1], path)

    def describe(self, path: Path) -> dict[str, Any]:
        """Facts about a file or folder, for a person or a program."""
        with _errors_with_path(path):
            arguments, state = self.read(path, "best")
            discriminator = self.read_discriminator(path) if self.read_discriminator else None
        kind, files = ("folder", sorted(path.iterdir())) if path.is_dir() else ("file", [path])
        model = arguments.pop("model", self.models[0])
        facts = {"kind": f"{self.package} {kind}", "model": model, "arguments": arguments}
        facts |= describe_weights(state)
        if self.assumptions:
            facts["assumed"] = self.assumptions(arguments)
        if discriminator:
            facts["discriminator"] = {**discriminator[0], **describe_weights(discriminator[1])}
        return {**facts, "bytes": {file.name: file.stat().st_size for file in files}}


@contextmanager
def _errors_with_path(path: Path) -> Iterator[None]:
    """Turn every error of reading a public file into a ValueError of one line that names the path."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot read {error.filename or path}: {error.strerror or error}") from None
    except _READ_ERRORS as error:
        error_text = one_line(error)
        raise ValueError(error_text if str(path) in error_text else f"{path}: {error_text}") from None


def _vqgan_format(layout: Layout, is_format: Callable[[Path], bool]) -> PublicFormat:
    """The format of a package whose files a `Layout` describes."""
    read = partial(read_autoencoder, layout)
    return PublicFormat(layout.package, ("VQGAN",), is_format, read, partial(save_autoencoder, layout))


# The format of a file, or of a folder of diffusers, is the first one whose `is_format` is true.
FORMATS = {
    "diffusers": PublicFormat("diffusers", ("VQGAN", "VideoTokenizer"), Path.is_dir, read_folder, save_folder),
    "dalle2": PublicFormat("DALLE2-pytorch", ("Decoder",), is_public_decoder, read_public_decoder, save_public_decoder),
    "muse": PublicFormat(
        MUSE, ("VQGAN",), lambda path: has_weight_name(path, b"enc_dec."), read_public_vqgan, save_public_vqgan,
        read_public_discriminator,
    ),
    "musiclm": PublicFormat(
        MUSICLM, ("MuLaN",), lambda path: has_weight_name(path, b"audio.dynamic_pos_bias_mlp."), read_public_mulan,
        save_public_mulan, assumptions=musiclm_assumptions,
    ),
    "wan": PublicFormat(
        "Wan", ("VideoTokenizer",), lambda path: has_weight_name(path, b"encoder.middle.0.residual.0.gamma"),
        wan.read_file, wan.save_file, assumptions=wan.assumptions,
    ),
    "llamagen": _vqgan_format(LLAMAGEN, lambda path: has_weight_name(path, b"encoder.conv_blocks."))._replace(
        assumptions=llamagen_assumptions
    ),
    "taming": _vqgan_format(TAMING_LAYOUT, lambda path: has_weight_name(path, b"encoder.conv_in.weight")),
    "dalle": PublicFormat(
        "DALLE-pytorch", ("DiscreteVAE",), lambda path: has_weight_name(path, b"hparams"), read_dalle, save_dalle
    ),
}  # fmt: skip


def detect_format(path: Path) -> PublicFormat:
    """The format of a file. Reads little of it, and runs none of its code.

    Raises:
        ValueError: one line, with what the file holds, if it has none of the formats.
    """
    with _errors_with_path(path):
        if path.is_file() and (reason := why_no_weights(path)):
            raise ValueError(f"{path} holds no weights: {reason}")
        if public_format := next((candidate for candidate in FORMATS.values() if candidate.is_format(path)), None):
            return public_format
    if (path.parent / CONFIG_FILE).is_file():
        raise ValueError(f"{path} is one file of a model folder: give {path.parent}")
    content = read_content(path)
    names = first_names(content) if isinstance(content, dict) else f"a {type(content).__name__}"
    raise ValueError(
        f"{path} holds {names}: no model of {', '.join(FORMATS)} has such names (see README.md, Trained weights)"
    )
