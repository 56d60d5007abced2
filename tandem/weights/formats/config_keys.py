"""The keys of another package's training configuration, and those of their values that have a counterpart here.
public_names.yaml lists each key with its default in that package and its flag here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from tandem.config.converters import did_you_mean

if TYPE_CHECKING:
    from tandem.config.public_names import Row

# Beginnings of the note of a key in public_names.yaml that may have any value: it is used by a flag or by the command,
# or has no effect. Any other note is the reason why values other than the default have no counterpart.
_ANY_VALUE_NOTES = ("--", "convert.py config reads it", "leave it out")

Section = Mapping[str, Any]
Flags = dict[str, tuple[str, Any]]
"""Name of a flag -> (key of the other package, value of the flag or None for its default)."""
SupportedValues = dict[str, tuple[Sequence[Any] | None, str]]
"""Key with its sections, such as "train.lr" -> (the values with a counterpart, None for all; why others have none). The
key "*" of a section stands for all its other keys."""


def supported_values(rows: Sequence[Row], equivalents: Mapping[str, Sequence[Any]]) -> SupportedValues:
    """The supported values of all keys in sections, from the rows of public_names.yaml. ``equivalents``: key -> values
    with a counterpart, for keys of which the other package's default is not the only one."""
    supported: SupportedValues = {}
    for row in rows:
        if "." in row.key:
            takes_any = row.flag or row.note.startswith(_ANY_VALUE_NOTES)
            values = None if takes_any else equivalents.get(row.key, (read_default(row),))
            supported[row.key] = (values, row.note)
    return supported


def without_counterpart(config: Section, supported: SupportedValues) -> Iterator[str]:
    """A line for each key that is unknown, or has a value without a counterpart here.

    Raises:
        ValueError: one line that names a key whose value should be a mapping.
    """
    sections = {key.rpartition(".")[0] for key in supported}
    sections |= {location.rpartition(".")[0] for location in sections} - {""}

    # A name, as in `supported`, has no indices of lists: decoder.unets.dim. A location does: decoder.unets[0].dim.
    def check_section(section: Section, prefix: str, location_prefix: str) -> Iterator[str]:
        for key, value in section.items():
            name, location = f"{prefix}{key}", f"{location_prefix}{key}"
            if name in sections:
                is_list = isinstance(value, list)
                for index, element in enumerate(value if is_list else [value]):
                    element_location = f"{location}[{index}]" if is_list else location
                    yield from check_section(require_mapping(element, location), f"{name}.", f"{element_location}.")
            elif name not in supported and f"{prefix}*" not in supported:
                siblings = [other.removeprefix(prefix) for other in supported if other.startswith(prefix)]
                yield f"{location}: unknown key{did_you_mean(str(key), siblings)}"
            else:
                values, reason = supported.get(name) or supported[f"{prefix}*"]
                if values is not None and value not in (None, "", *values):
                    yield f"{location} {shorten(value)}: {reason}"

    return check_section(config, "", "")


def read_default(row: Row) -> Any:
    """The default of a key in the other package."""
    return yaml.safe_load(row.public_default)


def get_section(config: Section, *names: str) -> Section:
    """A section of the configuration, {} if it is absent or null. Raises ValueError, in one line, if it is no
    mapping."""
    for name in names:
        config = require_mapping(config.get(name), name)
    return config


def require_mapping(value: Any, name: str) -> Section:
    """A section of a configuration, {} for null. Raises ValueError, in one line, if it is no mapping."""
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} {shorten(value)}: give a mapping of keys to values")
    return value or {}


def require_number(value: Any, name: str) -> float:
    """The value. Raises ValueError, in one line that names its key, if it is no number from 0 up."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} {shorten(value)}: expected a number, 0 or more")
    return value


def shorten(value: Any) -> str:
    """A value, shortened for a message. A mapping with a "target", a class with its options, is shown as that class."""
    return " ".join(str(value.get("target", value) if isinstance(value, dict) else value).split())[:60]
