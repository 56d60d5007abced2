"""Names of arguments in public scripts and trainers, from public_names.yaml. A name with a flag is an alias of the flag
(`aliases` of `flag`); for a name without one the file says what to do instead."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, NamedTuple

from tandem.io.installed import command_of
from tandem.io.reading import counted

FILE = Path(__file__).with_name("public_names.yaml")


class Row(NamedTuple):
    """An argument of a public script, trainer or configuration; fields that the file leaves out are ""."""

    package: str  # name and version
    key: str  # the argument's name, with its sections in a configuration
    public_default: str  # its default in the package, as YAML
    flag: str  # its flag in this project, without dashes
    note: str  # what differs, or without a flag what to do instead

    @property
    def name(self) -> str:
        """The key without its sections."""
        return self.key.rpartition(".")[2]


def tables() -> dict[tuple[str, str], list[Row]]:
    """(title of a public script or configuration, script of this project that corresponds to it, with .py) -> rows."""
    import yaml  # only a name that is no flag needs it

    sections = yaml.load(FILE.read_text(encoding="utf-8"), yaml.BaseLoader)  # defaults stay texts
    return {
        (title, section["script"]): [
            Row(title.rpartition(" of ")[2], key, *(row.get(part, "") for part in ("default", "flag", "note")))
            for key, row in section["names"].items()
        ]
        for title, section in sections.items()
    }


def rows(script: str) -> list[Row]:
    """The rows of all public scripts and configurations that correspond to a script such as train_vae.py."""
    return [row for (_, name), table in tables().items() if name == script for row in table]


def advice_for(name: str, script: str) -> str | None:
    """What to do instead of an argument of a public script that `script` lacks; None for other names. `name`: without
    dashes."""
    row = next((row for row in rows(script) if row.name == name and not row.flag), None)
    if row is None:
        return None
    return f"{row.package} has it: {row.note}".replace("convert.py", shlex.join(command_of("convert.py")))


def batch_arithmetic(config: Any, world_size: int) -> str | None:
    """A line about the size of a run's batches if a public name of --grad_accum_steps was given, because the meaning of
    batch sizes then differs; else None. `config`: the `RunFlags` of the run."""
    name = config.invocation.aliases.get("grad_accum_steps", "grad_accum_steps")
    if name == "grad_accum_steps":
        return None
    batch, steps = config.batch_size, config.grad_accum_steps
    return (
        f"--{name} {steps}: an update trains on {counted(batch, 'sample')} in all, over "
        f"{counted(world_size, 'process')} and {counted(steps, 'micro-batch')}; "
        f"in the trainer that has --{name}, a batch size of {batch} counts a micro-batch of one process: here that is "
        f"--batch_size {batch * steps * world_size} ({batch} x {steps} x {world_size})"
    )
