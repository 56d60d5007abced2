"""What the coders of images and of videos share."""

import argparse
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tandem import distributed
from tandem.devices import to_device
from tandem.distributed import ProcessGroup
from tandem.models.layers.convolutional import without_range_checks

#: Flags of encode.py that models without codes have.
LATENT_FLAGS = ("latent", "latent_dtype", "with_flip", "normalize", "seed")


def run_model(
    processes: ProcessGroup, precision: str, activity: str, method: Callable[..., Tensor], values: Tensor, *state: Any
) -> Tensor:
    """The output of a method of the model for valid inputs, whose range is not checked, in the precision of the run."""
    processes.heartbeat(activity)
    with distributed.autocast(precision, processes.device), without_range_checks():
        return method(to_device(values, processes.device), *state)


def latent_settings(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The settings that latents depend on, without those of `ImageCoder.open`."""
    settings = {name: getattr(args, name) for name in LATENT_FLAGS if name != "latent_dtype"}
    if args.normalize == "channels":
        settings |= {"latents_mean": model.latents_mean, "latents_std": model.latents_std}
    return settings
