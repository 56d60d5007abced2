"""Write the tables of docs/coming_from.md: python scripts/coming_from.py

Under each heading "## PUBLIC SCRIPT: SCRIPT" of that page stands a table of the public script's names, from
tandem/config/public_names.yaml, beside the flags of SCRIPT with their defaults. The other lines of the page stay.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from tandem.commands import script_parser  # noqa: E402
from tandem.config.converters import format_value  # noqa: E402
from tandem.config.public_names import tables  # noqa: E402

PAGE = ROOT / "docs" / "coming_from.md"
_HEAD = ["| there | default there | here | default here | what differs |", "|---|---|---|---|---|"]


def table(title: str, script: str) -> list[str]:
    """The lines of a table."""
    flags = script_parser(script)._option_string_actions

    def line(key: str, public_default: str, flag: str, note: str) -> str:
        action = flags[f"--{flag}"] if flag else None
        flag_cells = (f"`--{flag}`", format_value(action, action.default)) if action else ("", "")
        return "|" + "".join(f" {cell} |" if cell else " |" for cell in (f"`{key}`", public_default, *flag_cells, note))

    return [*_HEAD, *(line(row.key, row.public_default, row.flag, row.note) for row in tables()[title, script])]


def page(text: str) -> str:
    """The page with today's tables."""

    def lines() -> Iterator[str]:
        title = script = ""
        for is_table, group in itertools.groupby(text.splitlines(), lambda line: line.startswith("|")):
            lines_of_group = list(group)
            heading = next((line for line in reversed(lines_of_group) if line.startswith("## ")), "")
            if heading:
                title, _, script = heading.removeprefix("## ").rpartition(": ")
            yield from table(title, script) if is_table and (title, script) in tables() else lines_of_group

    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
