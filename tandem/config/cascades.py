"""Flags with a value for each Unet of a cascade. Imports the standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from .fields import Requirement, flag, when

# Headings in --help.
ONE_EACH = "diffusion (one value for all Unets, or one for each)"
SAME_FOR_ALL = "diffusion (the same for all Unets)"

SEVERAL_UNETS = Requirement("image_sizes", "of several Unets", lambda args: len(args.image_sizes) > 1)
CONDITIONED_ON_IMAGE, CONDITIONED_ON_TEXT = (
    Requirement("condition_on", f"{kind}, or image,text", when("condition_on", kind).is_met)
    for kind in ("image", "text")
)


def per_unet(
    default: Any, help: str, convert: Callable[[str], Any] | None = None, *, first: Any = None, **options: Any
) -> Any:
    """A flag that takes one value for all Unets, or one for each. `expand_per_unet` turns the former into the latter.

    Args:
        first: The value of the first Unet if one value is given for several Unets; None: the same value.
        options: Further arguments of `flag`.
    """
    field = flag(default, help, convert, nargs="+", **options)
    field.metadata = {**field.metadata, "first": first}
    return field


def expand_per_unet(config_class: type, config_or_args: Any) -> None:
    """Give each `per_unet` field of a configuration class a list with a value for each Unet, in place. Raises
    ValueError, in one line, if a field has neither one value nor one for each Unet."""
    count, sizes_text = len(config_or_args.image_sizes), " ".join(map(str, config_or_args.image_sizes))
    expected = f"1 or {count}" if count > 1 else "1"
    for field in dataclasses.fields(config_class):
        values = getattr(config_or_args, field.name) if "first" in field.metadata else None
        if values is not None and len(values) not in (1, count):
            raise ValueError(
                f"--{field.name} has {len(values)} values for {count} Unets (--image_sizes {sizes_text}): "
                f"give {expected}"
            )
        if values is not None and len(values) < count:
            first = field.metadata["first"]
            setattr(config_or_args, field.name, [values[0] if first is None else first, *values * (count - 1)])
