"""What public scripts and trainers call their arguments: public_names.yaml. A name with a flag is a second name of it
(`also` of a field); of a name without a flag the file says what to do instead, and is read when such a name is met."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import NamedTuple

from tandem.io.installed import command_of
from tandem.io.reading import counted

FILE = Path(__file__).with_name("public_names.yaml")


class Row(NamedTuple):
    """An argument of a public script, trainer or configuration; "" where the file says nothing: the name and version of
    its package, the name, with the section that it has in a configuration, its default there, as YAML, the flag without
    dashes, and what differs or, without a flag, what to do instead."""

    package: str
    key: str
    default_there: str
    flag: str
    note: str

    @property
    def name(self) -> str:
        """Without its section."""
        return self.key.rpartition(".")[2]


def tables() -> dict[tuple[str, str], list[Row]]:
    """The rows by what is public and the script here that is like it, which is named with its ending."""
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
    """The rows of the arguments of all that is public and like `script`, which is named with its ending."""
    return [row for (_, name), rows in tables().items() if name == script for row in rows]


def instead_of(name: str, script: str) -> str | None:
    """What to do instead of an argument, named without dashes, that a public script or trainer has and the one here has
    not; None for others."""
    row = next((row for row in rows(script) if row.name == name and not row.flag), None)
    if row is None:
        return None
    return f"{row.package} has it: {row.note}".replace("convert.py", shlex.join(command_of("convert.py")))


def batch_arithmetic(args: argparse.Namespace, world_size: int) -> str | None:
    """What a run trains on that is given a public name of gradient accumulation, in one line; None for others."""
    name = args.aliases_used.get("grad_accum_steps", "grad_accum_steps")
    if name == "grad_accum_steps":
        return None
    batch, steps = args.batch_size, args.grad_accum_steps
    return (
        f"--{name} {steps}: an update trains on {counted(batch, 'sample')} in all, over "
        f"{counted(world_size, 'process')} and {counted(steps, 'micro-batch')}; "
        f"where --{name} comes from, a batch size of {batch} is that of a micro-batch of one process, for which "
        f"--batch_size is {batch} x {steps} x {world_size} = {batch * steps * world_size} here"
    )
