"""Flags of a cascade of Unets, of which some have a value for each Unet. Imports the standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from .fields import Needs, flag, when

# Headings in --help.
ONE_EACH = "diffusion (one value for all Unets, or one for each)"
SAME_FOR_ALL = "diffusion (the same for all Unets)"

SEVERAL = Needs("image_sizes", "of several Unets", lambda args: len(args.image_sizes) > 1)
BY_IMAGE, BY_TEXT = (
    Needs("condition_on", f"{kind}, or image,text", when("condition_on", kind).is_met) for kind in ("image", "text")
)


def per_unet(
    default: Any, help: str, convert: Callable[[str], Any] | None = None, *, first: Any = None, **options: Any
) -> Any:
    """A flag of one value for all Unets, or of one for each; in a run it has one for each, or is None.

    Args:
        first: What the first of several Unets has if one value is given; None: that one, too.
        options: Others of `flag`.
    """
    said = flag(default, help, convert, nargs="+", **options)
    said.metadata = {**said.metadata, "first": first}
    return said


def spread(kind: type, holder: Any) -> None:
    """Give each field of `kind` that is `per_unet` a value for each Unet, in a configuration or in arguments. Raises
    ValueError, in one line, for another number of values."""
    count, sides = len(holder.image_sizes), " ".join(map(str, holder.image_sizes))
    needed = f"1 or {count}" if count > 1 else "1"
    for each in dataclasses.fields(kind):
        values = getattr(holder, each.name) if "first" in each.metadata else None
        if values is not None and len(values) not in (1, count):
            raise ValueError(
                f"--{each.name} has {len(values)} values for {count} Unets (--image_sizes {sides}): give {needed}"
            )
        if values is not None and len(values) < count:
            first = each.metadata["first"]
            setattr(holder, each.name, [values[0] if first is None else first, *values * (count - 1)])
