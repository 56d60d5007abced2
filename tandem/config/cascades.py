"""Flags with a value for each Unet of a cascade. Imports the standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from .fields import Requirement, flag, when

# Headings in --help.
ONE_EACH = "diffusion (one value for all Unets, or one for each)"
SAME_FOR_ALL = "diffusion (the same for all Unets)"

SEVERAL = Requirement("image_sizes", "of several Unets", lambda args: len(args.image_sizes) > 1)
BY_IMAGE, BY_TEXT = (
    Requirement("condition_on", f"{kind}, or image,text", when("condition_on", kind).is_met)
    for kind in ("image", "text")
)


def per_unet(
    default: Any, help: str, convert: Callable[[str], Any] | None = None, *, first: Any = None, **options: Any
) -> Any:
    """A flag of one value for all Unets, or of one for each; in a run it has one for each, or is None.

    Args:
        first: The value of the first of several Unets if one value is given; None: that value, too.
        options: Others of `flag`.
    """
    field = flag(default, help, convert, nargs="+", **options)
    field.metadata = {**field.metadata, "first": first}
    return field


def spread(config_class: type, holder: Any) -> None:
    """Give each field of `kind` that is `per_unet` a value for each Unet, in a configuration or in arguments. Raises
    ValueError, in one line, for another number of values."""
    count, sides = len(holder.image_sizes), " ".join(map(str, holder.image_sizes))
    expected = f"1 or {count}" if count > 1 else "1"
    for field in dataclasses.fields(config_class):
        values = getattr(holder, field.name) if "first" in field.metadata else None
        if values is not None and len(values) not in (1, count):
            raise ValueError(
                f"--{field.name} has {len(values)} values for {count} Unets (--image_sizes {sides}): give {expected}"
            )
        if values is not None and len(values) < count:
            first = field.metadata["first"]
            setattr(holder, field.name, [values[0] if first is None else first, *values * (count - 1)])
