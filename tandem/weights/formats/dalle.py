"""DALLE-pytorch's vae-final.pt: {"hparams": ..., "weights": ...}."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tandem.io.archive import check_sizes
from tandem.io.published import refuse_weights_flag
from tandem.io.weights import first_names, on_cpu, read_content, save_pickled
from tandem.models.autoencoders.discrete_vae import DiscreteVAE
from tandem.models.building import check_arguments

HPARAMS = ("image_size", "num_layers", "num_tokens", "channels", "codebook_dim", "hidden_dim", "num_resnet_blocks")
_MOST_CHANNELS = 4  # it has no mean and deviation of further ones
# Releases before 1.6.0 did not write `channels`, because all models had 3.
_OLD_DEFAULTS = {"channels": 3}


def has_dalle_shape(config: Mapping[str, Any]) -> bool:
    """Whether DALLE-pytorch takes images like those of a `DiscreteVAE` of this configuration."""
    return isinstance(config["image_size"], int) and config["channels"] <= _MOST_CHANNELS


def save_dalle(model: DiscreteVAE, path: str | Path) -> None:
    """Write a vae-final.pt, {"hparams": ..., "weights": ...}; it appears whole or not at all. Raises ValueError, in one
    line, if DALLE-pytorch has no such model."""
    if not has_dalle_shape(model.config):
        raise ValueError("DALLE-pytorch has square images of 1 to 4 channels, and those of this model are others")
    content = {"hparams": {key: model.config[key] for key in HPARAMS}, "weights": on_cpu(model.state_dict())}
    save_pickled(content, Path(path))


def read_dalle(path: Path, weights: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and weights of a vae.pt or vae-final.pt of any release. The weights are mapped from the file and
    take memory only when used. `weights`: the value of --weights, which has no effect on such a file.

    Raises:
        ValueError: one line, if `weights` is not the default, or the file is missing, damaged, hostile or no vae.pt.
    """
    refuse_weights_flag(path, weights)
    content = read_content(path)
    parts: list[Any] = [content.get(name) if isinstance(content, dict) else None for name in ("hparams", "weights")]
    if not all(isinstance(part, dict) for part in parts):
        actual = first_names(content) if isinstance(content, dict) else f"a {type(content).__name__}"
        raise ValueError(f"{path} is no vae-final.pt, which has hparams and weights: it holds {actual}")
    hparams, state = _OLD_DEFAULTS | parts[0], parts[1]
    if missing := sorted(set(HPARAMS) - set(hparams)):
        raise ValueError(f"its hparams lack {', '.join(missing)}")
    if not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError("its weights hold something that is not a tensor")
    check_sizes(path, state.values())
    arguments = {key: hparams[key] for key in HPARAMS}
    if (channels := arguments["channels"]) not in range(1, _MOST_CHANNELS + 1):
        raise ValueError(f"its images have {str(channels)[:24]} channels; those of DALLE-pytorch have 1 to 4")
    check_arguments(arguments, state)
    return arguments, state
