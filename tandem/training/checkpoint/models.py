"""The part of a checkpoint that describes its models, and where the models' weights are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tandem.io.renamed import rename_settings

from .format import Tree, damage_error, read_checkpoint

#: The name of the part.
MODELS = "models"


class ModelDescriptions:
    """The part of a checkpoint that describes each model, as the config.json of a model folder does: its class, as
    "model", and its constructor arguments. So a checkpoint can be loaded without the script and the flags of its run.

    Args:
        models: Models (`Pretrained`) by the name of the part that holds their weights; those of a decoder are in
            several parts. Only the first model is averaged.
    """

    def __init__(self, models: Mapping[str, Any]) -> None:
        self._descriptions = {name: model.description() for name, model in models.items()}

    def state_dict(self) -> dict[str, Any]:
        """The descriptions by name."""
        return self._descriptions

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError, in one line, if a checkpoint's model is of another class, or was trained with another
        pretrained model. An argument that is a mapping describes a pretrained model: if it has a SHA-256, only that is
        compared. Arguments that the checkpoint lacks are not compared. `RunFolder.check_config` compares all others, as
        flags."""
        for name, description in self._descriptions.items():
            for key, value in description.items():
                saved_value = state.get(name, {}).get(key, value if key != "model" else None)
                is_compared = key == "model" or isinstance(value, dict) or isinstance(saved_value, dict)
                if is_compared and _compared_part(value) != _compared_part(saved_value):
                    difference = f"is a {saved_value}" if key == "model" else f"was trained with another --{key}"
                    raise ValueError(
                        f"the checkpoint's {name} {difference}; give the old one, another --output_dir, or --fresh to "
                        "start over"
                    )


def _compared_part(value: Any) -> Any:
    """The part of an argument that is compared."""
    return value.get("sha256", value) if isinstance(value, dict) else value


def read_descriptions(parts: Mapping[str, Tree], folder: Path) -> dict[str, dict[str, Any]]:
    """The descriptions of a checkpoint's models, by name. Raises ValueError, in one line, if there are none."""
    models = parts.get(MODELS)
    if models is None:
        raise ValueError(
            f"{folder} was written by an earlier version, whose checkpoints do not describe their models: this version "
            "does not read it"
        )
    if not models or not all(isinstance(m, dict) and isinstance(m.get("model"), str) for m in models.values()):
        raise ValueError(f"cannot read the checkpoint {folder}: it does not say what its models are")
    return {name: rename_settings(description) for name, description in models.items()}


def read_model(folder: Path, which: str = "best", name: str | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description of a model in a checkpoint, and its weights.

    Args:
        which: "ema" (the moving average of its weights), "online" (as trained), or "best", which means the average if
            there is one. Only the first model has an average.
        name: The model's name; None: the first.

    Raises:
        ValueError: one line, if the checkpoint does not hold it.
    """
    parts = read_checkpoint(folder)[0]
    descriptions = read_descriptions(parts, folder)
    average = parts.get("ema") if name is None else None
    if which == "ema" and not average:
        raise ValueError(f"{folder} holds no average of the weights; leave --weights out, or use --weights online")
    name = name or next(iter(descriptions))
    try:
        weights = final_average(average)["weights"] if average and which != "online" else _online_weights(name, parts)
        return descriptions[name], dict(weights)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise damage_error(folder, f"it does not hold the model {name[:80]}: {type(error).__name__}: {error}") from None


def final_average(part: Mapping[str, Any]) -> Any:
    """The average that becomes the model of the run, from the part "ema": the only one, or of the first --ema_power."""
    if not isinstance(part.get("powers"), dict):
        return part
    first = next(iter(part["powers"].values()), None)
    return first if isinstance(first, dict) else {}


def _online_weights(name: str, parts: Mapping[str, Tree]) -> Any:
    """The weights of a model as trained. Those of a decoder are in the parts "unet1" and so on, one for each engine,
    and in "others" for Unets that were not trained."""
    if name in parts:
        return parts[name]["weights"]
    weights = {f"unets.{key}": tensor for key, tensor in parts["others"]["weights"].items()}
    for part, content in parts.items():
        number = part.removeprefix("unet")
        if part != number and number.isdecimal():
            weights |= {f"unets.{int(number) - 1}.{key}": tensor for key, tensor in content["weights"].items()}
    return weights
