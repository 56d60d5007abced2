"""Dataclasses whose fields are flags. One declaration gives the flag, its help, its key in a config file and in
config.json, its requirements, and whether a resumed run may change it. Imports the standard library only, so that
`--help` is fast."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tandem.io.renamed import FORMER_SETTINGS, FORMER_SWITCHES

DATA = "DATA"  # in a `Requirement`, stands for the script's flag for the training data, its `data_flag`


class Requirement(NamedTuple):
    """A requirement without which a flag has no effect.

    Args:
        flag: The other flag on which it depends, without dashes, or `DATA`.
        value: The values of that flag that meet it, in words; "" if that flag may not be given.
        is_met: Whether the arguments of a run meet it.
    """

    flag: str
    value: str
    is_met: Callable[[Any], bool]


def when(flag: str, *values: Any) -> Requirement:
    """The flag has one of these values, or is a list with one of them."""

    def is_met(args: Any) -> bool:
        value = getattr(args, flag)
        return any(element in values for element in (value if isinstance(value, (list, tuple)) else [value]))

    return Requirement(flag, " or ".join(map(str, values)), is_met)


def given(flag: str, what: str) -> Requirement:
    """The flag is given; `what` is a word for its value."""
    return Requirement(flag, what, lambda args: bool(getattr(args, flag)))


def without(flag: str) -> Requirement:
    """The flag is not given, because it would decide the same thing."""
    return Requirement(flag, "", lambda args: not getattr(args, flag))


def above_0(flag: str) -> Requirement:
    """The number of a flag is above 0."""
    return Requirement(flag, "above 0", lambda args: getattr(args, flag) > 0)


@dataclass(frozen=True)
class Flag:
    """The specification of a field that is a flag; see `flag`."""

    help: str
    convert: Callable[[str], Any] | None
    aliases: tuple[str, ...]
    requires: tuple[Requirement, ...]
    fixed_on_resume: Callable[[Any], Any] | None
    is_architecture: bool
    title: str
    options: dict[str, Any]


def identity(value: Any) -> Any:
    """The value itself: what `Flag.fixed_on_resume` compares of most flags."""
    return value


def flag(
    default: Any,
    help: str,
    convert: Callable[[str], Any] | None = None,
    *,
    aliases: str | Sequence[str] = (),
    requires: Requirement | Sequence[Requirement] = (),
    fixed_on_resume: bool | Callable[[Any], Any] = False,
    architecture: bool = False,
    title: str = "",
    **options: Any,
) -> Any:
    """A field of a dataclass that is a flag.

    Args:
        default: The value without the flag. False: the flag is a switch; True: a switch with a --no- form; None:
            `help` says what happens then. A subclass that assigns a plain value to the field changes only the default.
        help: A line of --help.
        convert: Converts text to the value, and has the `metavar` of --help (`converters`); without one the value is
            text, in lower case if there are `choices`.
        aliases: Further names, such as that of a public trainer.
        requires: Requirements without which the flag has no effect. Then it is refused on the command line, but not in
            a config file, because config.yaml of a run holds every flag.
        fixed_on_resume: A resumed run may not change the value; if this is a function, only what it returns for the
            value may not change.
        architecture: Weights fit only models with the same value; a resumed run may not change it either.
        title: Heading in --help of this field, and of those after it, up to the next one in its class or its bases.
        options: Further arguments of `add_argument`: choices, metavar, nargs.
    """
    names = (aliases,) if isinstance(aliases, str) else tuple(aliases)
    requirements = (requires,) if isinstance(requires, Requirement) else tuple(requires)
    if metavar := getattr(convert, "metavar", None):
        options.setdefault("metavar", metavar)
    compare = fixed_on_resume if callable(fixed_on_resume) else identity if fixed_on_resume or architecture else None
    spec = Flag(help, convert, names, requirements, compare, architecture, title, options)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={"flag": spec})
    return dataclasses.field(default=default, metadata={"flag": spec})


def flags_of(config: type) -> Iterator[tuple[str, str, Flag, Any]]:
    """(heading, name, flag, default) of each flag of a dataclass, in the order of its base classes."""
    fields: dict[str, Any] = {field.name: field for field in dataclasses.fields(config)}
    names: set[str] = set()
    title = ""
    for base in config.__mro__:
        for name in vars(base).get("__annotations__", ()):
            spec = vars(base)["__dataclass_fields__"][name].metadata.get("flag")
            if spec is None:  # no flag, or a new default for the flag of a base class
                continue
            title = spec.title or title
            if name not in names:
                names.add(name)
                default = fields[name].default
                yield title, name, spec, fields[name].default_factory() if default is dataclasses.MISSING else default


def specs_of(config: type) -> dict[str, Flag]:
    """Name of a field -> its flag."""
    return {name: spec for _, name, spec, _ in flags_of(config)}


def add_flag(group: argparse._ArgumentGroup, name: str, spec: Flag, default: Any) -> argparse.Action:
    """Add a flag to an argument group, and hidden flags of its former names."""
    options, convert = dict(spec.options), spec.convert
    if isinstance(default, bool) and convert is None:
        options["action"] = argparse.BooleanOptionalAction if default else "store_true"
    elif convert is not None or "choices" in options:
        options["type"] = convert or str.lower
    for former_name, (present_name, convert_value) in FORMER_SETTINGS.items():
        if present_name == name:
            former_options = {**options, "type": _compose(convert_value, options["type"])} if convert else options
            if former_name in FORMER_SWITCHES:
                former_options = {"action": "store_const", "const": convert_value(True)}
            former = group.add_argument(f"--{former_name}", dest=name, default=default, **former_options)
            former.help = argparse.SUPPRESS
    names = [f"--{alias}" for alias in (name, *spec.aliases)]
    return group.add_argument(*names, dest=name, default=default, help=spec.help, **options)


def _compose(convert_value: Callable[[Any], Any], convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """The converter of a flag's former name: `convert` reads the former value from the text, `convert_value` turns it
    into the present one (`tandem.io.renamed`)."""

    def convert_text(text: str) -> Any:
        try:
            return convert_value(convert(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert_text


@dataclass(frozen=True)
class Invocation:
    """How a script was started: its settings, which of them were given, and by which names."""

    script: str = ""
    """The script's file name."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Every flag of the run by name, those of its backend included, as config.yaml holds them."""
    explicit: frozenset[str] = frozenset()
    """Names of the flags that were set on the command line or in a config file."""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By name of a flag, the alias by which it was set."""
    fixed_on_resume: Mapping[str, Callable[[Any], Any]] = dataclasses.field(default_factory=dict)
    """Flags that a resumed run may not change: name -> function whose result for the value is compared."""
    config_note: str | None = None
    """A line with the path of the config file that was read."""
    resumed: Mapping[str, Any] | None = None
    """The settings in config.yaml of the run that is resumed; None for a new run."""

    def namespace(self, flags: Mapping[str, Any]) -> argparse.Namespace:
        """The argument of the function of --dataset: `flags`, those of the backend, and this object's attributes."""
        return argparse.Namespace(**{**self.settings, **flags, **vars(self)})


@dataclass
class ModelConfig:
    """Arguments of a model's constructor, which are flags of its script, too."""

    @classmethod
    def from_args(cls, args: Any) -> Any:
        """The configuration in a run's arguments; fields that are no flags have their defaults."""
        return cls(**{name: getattr(args, name) for name in specs_of(cls)})

    @classmethod
    def derive_missing(cls, args: Any) -> None:
        """Set a run's arguments to the fields of their configuration, whose `__post_init__` derives missing ones."""
        config = cls.from_args(args)
        vars(args).update({name: getattr(config, name) for name in specs_of(cls)})

    @classmethod
    def architecture_of(cls, model: Mapping[str, Any], args: Any) -> dict[str, Any]:
        """What a run that starts from a model's weights takes from the `config` of the model: the flags that a resumed
        run may not change. `args`: the arguments of that run."""
        return {name: model[name] for name, spec in specs_of(cls).items() if spec.fixed_on_resume and name in model}

    @classmethod
    def unused(cls, args: Any) -> frozenset[str]:
        """Names of fields that have no effect with the values of the other arguments. Requirements of the kind
        `without` do not count: text_dim, for example, then holds the width of the pretrained text tower."""
        return frozenset(
            name
            for name, spec in specs_of(cls).items()
            if any(rule.value and hasattr(args, rule.flag) and not rule.is_met(args) for rule in spec.requires)
        )

    @classmethod
    def without_effect_on_weights(cls) -> frozenset[str]:
        """Names of fields that may differ from those of a model whose weights are loaded."""
        return frozenset(name for name, spec in specs_of(cls).items() if not spec.is_architecture)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON types."""
        return {name: _to_plain(value) for name, value in dataclasses.asdict(self).items()}


def check_whole(name: str, value: Any, minimum: int = 1) -> None:
    """Raise a ValueError, in one line, if an untrusted value is not a whole number of at least ``minimum``."""
    if type(value) is not int or value < minimum:
        raise ValueError(f"{name} {repr(value)[:80]} is not a whole number of at least {minimum}")


def _to_plain(value: Any) -> Any:
    return [_to_plain(element) for element in value] if isinstance(value, (list, tuple)) else value
