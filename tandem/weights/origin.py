"""The run that trained a model: its folder, its arguments, and the update after which the weights were saved."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from tandem.commands import script_parser
from tandem.config.fields import identity
from tandem.config.parser import ArgumentParser
from tandem.io.reading import read_json_or_empty, read_yaml
from tandem.io.renamed import rename_settings
from tandem.training.run_folder.starts import script_of

from .card import KINDS, Kind, public_settings


def describe_origin(location: Path, kind: str, weights: str) -> str:
    """The end of a sentence: the update of the weights, and whether they are a moving average; "" if it is unknown."""
    from tandem.training.checkpoint.format import read_checkpoint

    if kind == "checkpoint":
        is_average = weights != "online" and bool(read_checkpoint(location, verify=False)[0].get("ema"))
        state, step_text = "the moving average" if is_average else "as trained", location.name.removeprefix("step_")
        return f", {state} after update {int(step_text):,}" if step_text.isdecimal() else f", {state}"
    step = read_json_or_empty(location / "training.json").get("step")
    return f", after update {step:,}" if type(step) is int else ""


def find_run(location: Path) -> Path | None:
    """The run folder of a checkpoint or of a run's model; None if it is in no run folder."""
    path = location.absolute()
    return next((folder for folder in path.parents[:2] if script_of(folder)), None)


def read_run_arguments(run: Path) -> argparse.Namespace:
    """The arguments of a run from its config.yaml, completed by defaults, with its `script` and `data_flag`. Raises
    ValueError, in one line, if this is no run folder, or it cannot be read."""
    script = script_of(run)
    try:
        config = read_yaml(run / "config.yaml") if script else None
    except OSError:
        config = None
    if script is None or not isinstance(config, dict) or script not in {kind.script for kind in KINDS.values()}:
        raise ValueError(f"{run} is no run folder: expected its config.yaml and starts.jsonl")
    parser = script_parser(script)
    arguments = vars(parser.with_values(_supported_settings(config, parser)))
    return argparse.Namespace(**arguments, script=script, data_flag=parser.data_flag)


def _supported_settings(config: dict[str, Any], parser: ArgumentParser) -> dict[str, Any]:
    """The settings in a run's config.yaml that are flags of the present script, by their present names."""
    settings = rename_settings(config)
    return {name: settings[name] for name in parser.settings(parser.with_values({})) if name in settings}


def read_public_settings(run: Path, kind: Kind) -> dict[str, Any]:
    """The settings of a run's configuration that may be published; {} if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        if isinstance(config := read_yaml(run / "config.yaml"), dict):
            parser = script_parser(kind.script)
            supported = _supported_settings(config, parser)
            # Flags that a resumed run may not change; the paths of pretrained towers are not compared by `identity`.
            fixed = [name for name, compare in parser.fixed_on_resume.items() if compare is identity]
            settings = public_settings(parser, supported, fixed)
            if config.get("dataset"):  # the data flag then has its default, which may be a demonstration
                settings.pop(kind.data[0], None)
            return settings
    return {}
