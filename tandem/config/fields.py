"""Dataclasses whose fields are flags: from one declaration come the flag, its help, its key in a config file and in
config.json, what it needs to have an effect, and what of it a resumed run may not change. Imports the standard library
only, so that `--help` is fast."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

DATA = "DATA"  # in `Needs`, the flag of the data: `data_flag` of the dataclass of all flags


class Needs(NamedTuple):
    """What a flag needs to have an effect.

    Args:
        flag: Another flag on which it depends, without dashes, or `DATA`.
        value: What that one has to be, in words; "" if it may not be given.
        is_met: Whether it is so, of the arguments of a run.
    """

    flag: str
    value: str
    is_met: Callable[[Any], bool]


def when(flag: str, *values: Any) -> Needs:
    """A flag has one of these values; of one with several values, any of them."""

    def is_met(args: Any) -> bool:
        value = getattr(args, flag)
        return any(each in values for each in (value if isinstance(value, (list, tuple)) else [value]))

    return Needs(flag, " or ".join(map(str, values)), is_met)


def given(flag: str, what: str) -> Needs:
    """A flag is given: `what` it takes, in a word."""
    return Needs(flag, what, lambda args: bool(getattr(args, flag)))


def without(flag: str) -> Needs:
    """A flag is not given, which decides the same."""
    return Needs(flag, "", lambda args: not getattr(args, flag))


def above_0(flag: str) -> Needs:
    """The number of a flag is above 0."""
    return Needs(flag, "above 0", lambda args: getattr(args, flag) > 0)


@dataclass(frozen=True)
class Flag:
    """What `flag` says of a field; see there."""

    help: str
    convert: Callable[[str], Any] | None
    also: tuple[str, ...]
    needs: tuple[Needs, ...]
    lasting: Callable[[Any], Any] | None
    is_of_weights: bool
    title: str
    options: dict[str, Any]


def itself(value: Any) -> Any:
    """The value."""
    return value


def flag(
    default: Any,
    help: str,
    convert: Callable[[str], Any] | None = None,
    *,
    also: str | Sequence[str] = (),
    needs: Needs | Sequence[Needs] = (),
    lasting: bool | Callable[[Any], Any] = False,
    in_weights: bool = False,
    title: str = "",
    **options: Any,
) -> Any:
    """A field of a dataclass that is a flag.

    Args:
        default: Its value if nobody says another one. False: the flag is a switch; True: a switch with a --no- of its
            own; None: `help` says what happens then. In a subclass a plain value changes the default alone.
        help: A line of --help.
        convert: Makes the value from text, and says what --help shows for it (`converters`); without one it is
            text, in lower case if there are `choices`.
        also: Further names, such as that of a public trainer.
        needs: What it needs to have an effect: on the command line it is refused without, so that nobody takes a flag
            that does nothing for what was asked for. A config file may say it: that of a run holds every flag.
        lasting: A resumed run may not change it, or what this function makes of it.
        in_weights: Weights fit no model in which it differs; a resumed run may not change it either.
        title: Heading in --help of this field, and of those after it, up to the next one in its class or its bases.
        options: Others of argparse's: choices, metavar, nargs.
    """
    names = (also,) if isinstance(also, str) else tuple(also)
    needed = (needs,) if isinstance(needs, Needs) else tuple(needs)
    if shown := getattr(convert, "metavar", None):
        options.setdefault("metavar", shown)
    compared = lasting if callable(lasting) else itself if lasting or in_weights else None
    said = Flag(help, convert, names, needed, compared, in_weights, title, options)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={"flag": said})
    return dataclasses.field(default=default, metadata={"flag": said})


def flags_of(config: type) -> Iterator[tuple[str, str, Flag, Any]]:
    """(heading, name, flag, default) of each flag of a dataclass, in the order of its base classes."""
    fields: dict[str, Any] = {field.name: field for field in dataclasses.fields(config)}
    seen: set[str] = set()
    title = ""
    for kind in config.__mro__:
        for name in vars(kind).get("__annotations__", ()):
            said = vars(kind)["__dataclass_fields__"][name].metadata.get("flag")
            if said is None:  # the class only changes the default of a base class
                continue
            title = said.title or title
            if name not in seen:
                seen.add(name)
                default = fields[name].default
                yield title, name, said, fields[name].default_factory() if default is dataclasses.MISSING else default


def add_flag(group: argparse._ArgumentGroup, name: str, said: Flag, default: Any) -> argparse.Action:
    """Add a flag to a group of argparse's."""
    options, convert = dict(said.options), said.convert
    if isinstance(default, bool) and convert is None:
        options["action"] = argparse.BooleanOptionalAction if default else "store_true"
    elif convert is not None or "choices" in options:
        options["type"] = convert or str.lower
    names = [f"--{each}" for each in (name, *said.also)]
    return group.add_argument(*names, dest=name, default=default, help=said.help, **options)


@dataclass
class ModelConfig:
    """Arguments of a model's constructor, which are flags of its script, too."""

    @classmethod
    def of(cls, args: Any) -> Any:
        """Those that a run's arguments say; the others, which are no flags, at their defaults."""
        return cls(**{name: getattr(args, name) for _, name, _, _ in flags_of(cls)})

    @classmethod
    def shape_of(cls, model: Mapping[str, Any], args: Any) -> dict[str, Any]:
        """The lasting flags that make a model again that has this `config`: what a run with the arguments `args` adopts
        of the model that it starts from."""
        return {name: model[name] for _, name, said, _ in flags_of(cls) if said.lasting and name in model}

    @classmethod
    def idle(cls, args: Any) -> frozenset[str]:
        """Names of those that have no effect beside the values that other arguments have."""
        return frozenset(
            name
            for _, name, said, _ in flags_of(cls)
            if any(need.value and hasattr(args, need.flag) and not need.is_met(args) for need in said.needs)
        )

    @classmethod
    def not_in_the_weights(cls) -> frozenset[str]:
        """Names of those that have no effect on the weights."""
        return frozenset(name for _, name, said, _ in flags_of(cls) if not said.is_of_weights)

    def plain(self) -> dict[str, Any]:
        """By name, of JSON's types."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
