"""The run that trained a model: its folder, its arguments, and of which update the weights are."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from tandem.commands import parser_of
from tandem.config.fields import itself
from tandem.config.parser import ArgumentParser
from tandem.training.run_folder.starts import script_of

from .card import KINDS, Kind, public_settings


def origin_of(where: Path, kind: str, which: str) -> str:
    """Of which update weights are, and whether they are an average, as the end of a sentence; "" if it is not known."""
    from tandem.io.reading import read_json_or_empty
    from tandem.training.checkpoint.format import read_checkpoint

    if kind == "checkpoint":
        is_average = which != "online" and bool(read_checkpoint(where, verify=False)[0].get("ema"))
        what, number = "the moving average" if is_average else "as trained", where.name.removeprefix("step_")
        return f", {what} after update {int(number):,}" if number.isdecimal() else f", {what}"
    step = read_json_or_empty(where / "training.json").get("step")
    return f", after update {step:,}" if type(step) is int else ""


def run_of(where: Path) -> Path | None:
    """The run folder of a checkpoint or of a run's model; None if it is in none."""
    path = where.absolute()
    return next((folder for folder in path.parents[:2] if script_of(folder)), None)


def arguments_of(run: Path) -> argparse.Namespace:
    """The arguments of a run, as its config.yaml has them, at their defaults where that does not say them; besides,
    its `script` and `data_flag`. Raises ValueError, in one line, if this is no run folder, or it cannot be read."""
    from tandem.io.reading import read_yaml

    name = script_of(run)
    try:
        config = read_yaml(run / "config.yaml") if name else None
    except OSError:
        config = None
    if name is None or not isinstance(config, dict) or name not in {kind.script for kind in KINDS.values()}:
        raise ValueError(f"{run} is no run folder: expected its config.yaml and starts.jsonl")
    parser = parser_of(name)
    arguments = vars(parser.with_values(_known(config, parser)))
    return argparse.Namespace(**arguments, script=name, data_flag=parser.data_flag)


def _known(config: dict[str, Any], parser: ArgumentParser) -> dict[str, Any]:
    """What of a run's config.yaml the script knows."""
    return {name: config[name] for name in parser.settings(parser.with_values({})) if name in config}


def settings_of(run: Path, kind: Kind) -> dict[str, Any]:
    """What may be shown of a run's configuration, as far as the script knows it; nothing if that cannot be read."""
    from tandem.io.reading import read_yaml

    with contextlib.suppress(OSError, ValueError):
        if isinstance(config := read_yaml(run / "config.yaml"), dict):
            parser = parser_of(kind.script)
            known = _known(config, parser)
            settings = public_settings(parser, known, [name for name, part in parser.lasting.items() if part is itself])
            if config.get("dataset"):  # the flag of the other data is at its default then, which may be a demonstration
                settings.pop(kind.data[0], None)
            return settings
    return {}
