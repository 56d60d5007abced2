"""The keys of a public training configuration: which of them are known here, and their values. What a key is called,
its default there and its flag stand in public_names.yaml."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from tandem.config.converters import nearest

if TYPE_CHECKING:
    from tandem.config.public_names import Row

# What the note of a key begins with whose value is used, or has no effect. Another note says why a value
# that is not the default is left out.
_USED = ("--", "convert.py config reads it", "leave it out")

Section = Mapping[str, Any]
Flags = dict[str, tuple[str, Any]]
"""By flag, the key that it comes from and its value; None: the flag's own default."""
Known = dict[str, tuple[Sequence[Any] | None, str]]
"""By key, with its sections, the values that have a counterpart, None for all, and why others have none. A key `*`
stands for all others of its section."""


def known_of(rows: Sequence[Row], here: Mapping[str, Sequence[Any]]) -> Known:
    """What the rows say of the keys in sections. ``here``: values that are what happens here, where that is not the
    default there."""
    said = {row.key: row for row in rows if "." in row.key}
    return {
        key: (None if row.flag or row.note.startswith(_USED) else here.get(key, (default_of(row),)), row.note)
        for key, row in said.items()
    }


def without_counterpart(config: Section, known: Known) -> Iterator[str]:
    """A line for each key that is unknown, or has a value to which nothing here corresponds.

    Raises:
        ValueError: one line that names a key whose value should hold keys, and does not.
    """
    parts = {key.rpartition(".")[0] for key in known}
    parts |= {part.rpartition(".")[0] for part in parts} - {""}

    def look(section: Section, above: str, shown: str) -> Iterator[str]:
        for key, value in section.items():
            name, place = f"{above}{key}", f"{shown}{key}"
            if name in parts:
                several = isinstance(value, list)
                for index, each in enumerate(value if several else [value]):
                    at = f"{place}[{index}]" if several else place
                    yield from look(checked(each, place), f"{name}.", f"{at}.")
            elif name not in known and f"{above}*" not in known:
                others = [each.removeprefix(above) for each in known if each.startswith(above)]
                yield f"{place}: unknown key{nearest(str(key), others)}"
            else:
                values, why = known.get(name) or known[f"{above}*"]
                if values is not None and value not in (None, "", *values):
                    yield f"{place} {short(value)}: {why}"

    return look(config, "", "")


def default_of(row: Row) -> Any:
    """The default there of a row."""
    return yaml.safe_load(row.default_there)


def part_of(config: Section, *names: str) -> Section:
    """A part of the configuration, {} if it is absent or null."""
    for name in names:
        config = config.get(name) or {}
    return config


def checked(value: Any, name: str) -> Section:
    """A part of a configuration, {} for null. Raises ValueError, in one line, if it holds no keys."""
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} {short(value)}: give a mapping of keys to values")
    return value or {}


def number(value: Any, name: str) -> float:
    """The value. Raises ValueError, in one line that names its key, if it is no number from 0 up."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} {short(value)}: expected a number, 0 or more")
    return value


def short(value: Any) -> str:
    """A value as a line quotes it; of a class with its options, the class."""
    return " ".join(str(value.get("target", value) if isinstance(value, dict) else value).split())[:60]
