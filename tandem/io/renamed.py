"""The names that settings and weights had in earlier versions. All readers of model folders, checkpoints, run folders,
config files and command lines use these tables; no other module knows a former name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, nn

Value = TypeVar("Value")


def logarithm(value: Any) -> float:
    """The natural logarithm of a value of JSON. Raises ValueError, in one line, if it is no positive number."""
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{str(value)[:40]} is no number above 0")
    return math.log(value)


#: Former name of a setting (flag and constructor argument) -> its name, and the function that converts its value.
FORMER_SETTINGS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "init_temperature": ("init_logit_scale", logarithm),
    "centred": ("normalize_input", lambda value: value),
    "transparent": ("channels", lambda value: 4 if value else 3),
    "scaled": ("normalize", lambda value: "scale" if value else "none"),
}
#: Those among them that were switches and are none any more.
FORMER_SWITCHES = ("scaled", "transparent")
#: Former name of a weight or a buffer in a state dict -> its name.
FORMER_WEIGHTS = {"tau": "logit_scale", "quantizer.moments": "quantizer.latent_stats"}
#: Statistics in a state dict that earlier versions did not measure. They start at 0.
ADDED_STATISTICS = ("quantizer.channel_stats",)


def rename_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under their present names, also those inside of mappings among them. A present name takes
    precedence over a former one. Raises ValueError, in one line, for a value that cannot be converted."""
    renamed: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in FORMER_SETTINGS:
            renamed[name] = rename_settings(value) if isinstance(value, Mapping) else value
            continue
        present_name, convert = FORMER_SETTINGS[name]
        try:
            renamed.setdefault(present_name, convert(value))
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    return renamed


def rename_weights(weights: Mapping[str, Value]) -> dict[str, Value]:
    """The weights of a state dict under their present names."""
    return {FORMER_WEIGHTS.get(name, name): weight for name, weight in weights.items()}


def with_added_statistics(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model, whole, with those `ADDED_STATISTICS` of it that they lack."""
    added = {name: buffer for name, buffer in model.named_buffers() if name in ADDED_STATISTICS}
    return {**{name: buffer.new_zeros(buffer.shape, device="cpu") for name, buffer in added.items()}, **weights}


def without_unmeasured_statistics(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model, whole, without those `ADDED_STATISTICS` that have not been measured, all 0: they then are
    those that an earlier version wrote, with the same checksum."""
    return {name: weight for name, weight in weights.items() if name not in ADDED_STATISTICS or weight.any()}
