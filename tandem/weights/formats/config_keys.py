"""The keys of another package's training configuration: the known ones, and their values. public_names.yaml lists the
name of each key, its default there and its flag here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from tandem.config.converters import nearest

if TYPE_CHECKING:
    from tandem.config.public_names import Row

# The note of a key begins so if every value is used or has no effect. Any other note says why values but
# the default are left out.
_USED = ("--", "convert.py config reads it", "leave it out")

Section = Mapping[str, Any]
Flags = dict[str, tuple[str, Any]]
"""By flag, the key that it comes from and its value; None: the flag's own default."""
Known = dict[str, tuple[Sequence[Any] | None, str]]
"""By key, with its sections, the values that have a counterpart, None for all, and why others have none. A key `*`
stands for all others of its section."""


def known_of(rows: Sequence[Row], equivalents: Mapping[str, Sequence[Any]]) -> Known:
    """The values of the keys in sections, from the rows. ``equivalents``: values with a counterpart here, for
    keys where that is not the default there."""
    rows_by_key = {row.key: row for row in rows if "." in row.key}
    return {
        key: (None if row.flag or row.note.startswith(_USED) else equivalents.get(key, (default_of(row),)), row.note)
        for key, row in rows_by_key.items()
    }


def without_counterpart(config: Section, known: Known) -> Iterator[str]:
    """A line for each key that is unknown, or has a value without a counterpart here.

    Raises:
        ValueError: one line that names a key whose value should be a mapping.
    """
    sections = {key.rpartition(".")[0] for key in known}
    sections |= {path.rpartition(".")[0] for path in sections} - {""}

    def check_section(section: Section, prefix: str, shown_prefix: str) -> Iterator[str]:
        for key, value in section.items():
            name, path = f"{prefix}{key}", f"{shown_prefix}{key}"
            if name in sections:
                is_list = isinstance(value, list)
                for index, element in enumerate(value if is_list else [value]):
                    element_path = f"{path}[{index}]" if is_list else path
                    yield from check_section(checked(element, path), f"{name}.", f"{element_path}.")
            elif name not in known and f"{prefix}*" not in known:
                siblings = [element.removeprefix(prefix) for element in known if element.startswith(prefix)]
                yield f"{path}: unknown key{nearest(str(key), siblings)}"
            else:
                values, reason = known.get(name) or known[f"{prefix}*"]
                if values is not None and value not in (None, "", *values):
                    yield f"{path} {short(value)}: {reason}"

    return check_section(config, "", "")


def default_of(row: Row) -> Any:
    """The default there of a row of the page."""
    return yaml.safe_load(row.default_there)


def part_of(config: Section, *names: str) -> Section:
    """A section of the configuration, {} if it is absent or null."""
    for name in names:
        config = config.get(name) or {}
    return config


def checked(value: Any, name: str) -> Section:
    """A section of a configuration, {} for null. Raises ValueError, in one line, if it is no mapping."""
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} {short(value)}: give a mapping of keys to values")
    return value or {}


def number(value: Any, name: str) -> float:
    """The value. Raises ValueError, in one line that names its key, if it is no number from 0 up."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} {short(value)}: expected a number, 0 or more")
    return value


def short(value: Any) -> str:
    """A value, shortened for a message; of a class with its options, the class."""
    return " ".join(str(value.get("target", value) if isinstance(value, dict) else value).split())[:60]
