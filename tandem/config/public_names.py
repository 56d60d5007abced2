"""What public scripts and trainers call their arguments: the rows of docs/coming_from.md. Their names for flags are
second names of these (`also` of a field); of a name without a flag the page says what to do instead. It is read when
such a name is met. Imports the standard library only."""

from __future__ import annotations

import argparse
import shlex
from typing import NamedTuple

from tandem.io.installed import HOME, command_of
from tandem.io.reading import counted

PAGE = HOME / "docs" / "coming_from.md"


class Row(NamedTuple):
    """An argument of a public script, trainer or configuration, as its row says it, "" for an empty cell: the name and
    version of its package, the name, with the section that it has in a configuration, its default there, the flag
    without dashes, the default here, and what differs or, without a flag, what to do instead."""

    package: str
    key: str
    default_there: str
    flag: str
    default: str
    note: str

    @property
    def name(self) -> str:
        """Without its section."""
        return self.key.rpartition(".")[2]


def rows(script: str) -> list[Row]:
    """The rows of the arguments of all that is public and like `script`, which is named with its ending."""
    found = []
    for section in PAGE.read_text(encoding="utf-8").split("\n## "):
        head, *lines = section.splitlines()
        title, _, like = head.rpartition(": ")
        for line in lines if like == script else ():
            if line.startswith("| `"):
                key, there, flag, *others = (cell.strip() for cell in line.strip("|").split("|"))
                package = title.rpartition(" of ")[2]
                found.append(Row(package, key.strip("`"), there, flag.strip("`-"), *others))
    return found


def instead_of(name: str, script: str) -> str | None:
    """What to do instead of an argument, named without dashes, that a public script or trainer has and the one here has
    not; None for others."""
    row = next((row for row in rows(script) if row.name == name and not row.flag), None)
    if row is None:
        return None
    return f"{row.package} has it: {row.note}".replace("convert.py", shlex.join(command_of("convert.py")))


def batch_arithmetic(args: argparse.Namespace, world_size: int) -> str | None:
    """What a run trains on that is given a public name of gradient accumulation, in one line; None for others."""
    name = args.said_as.get("grad_accum_steps", "grad_accum_steps")
    if name == "grad_accum_steps":
        return None
    batch, steps = args.batch_size, args.grad_accum_steps
    return (
        f"--{name} {steps}: an update trains on {counted(batch, 'sample')} in all, over "
        f"{counted(world_size, 'process')} and {counted(steps, 'micro-batch')}; "
        f"where --{name} comes from, a batch size of {batch} is that of a micro-batch of one process, for which "
        f"--batch_size is {batch} x {steps} x {world_size} = {batch * steps * world_size} here"
    )
