"""Arguments of the scripts, from command line and YAML. Imports the standard library only, so that `--help` is fast."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from tandem import __version__
from tandem.io.exits import MISTAKE, leave
from tandem.io.installed import HOME, IS_INSTALLED, installed_command
from tandem.io.reading import printable
from tandem.io.writing import open_standard_streams

from .converters import config_names, config_value, nearest, no_choice, said_as_flag, shown_default
from .fields import DATA, Flag, Needs, add_flag, flags_of
from .shell import HelpAll, Version, complete, short_help

# A config file may not set these: `config` would include another file, `fresh` would start over at every resume.
_COMMAND_LINE_ONLY = frozenset({"help", "help_all", "version", "config", "fresh", "dry_run", "profile_steps"})

# A launcher ends all processes when the first one fails, so the others wait until the root has printed its error. If
# they are still there much later, the root made no mistake.
_ROOT_SPEAKS_FIRST_SECONDS, _OTHERS_SPEAK_AFTER_SECONDS = 2.0, 10.0

# Who gives one of these has a run in mind: without data it is no demonstration, but refused.
_WITHOUT_DATA_NO_RUN = (
    "config", "init_from", "image_folder", "valid_folder", "image_embeddings", "text_embeddings"
)  # fmt: skip

_UNSET = object()

# Flags of other trainers for what takes none here.
_NO_FLAG = {
    **dict.fromkeys(
        ("resume", "resume_from", "resume_from_checkpoint", "continue"),
        "a run is resumed by the same command again, with the same --output_dir",
    ),
    **dict.fromkeys(
        ("gpus", "num_gpus", "devices", "ngpus", "n_gpus"),
        "the launcher starts the processes, such as torchrun --nproc_per_node 8 in front of the script",
    ),
}


class HelpFormatter(argparse.HelpFormatter):
    """Appends each default to its help, except None and False."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if any(action.default is nothing for nothing in (None, False, argparse.SUPPRESS)) or "%(default)" in text:
            return text
        return f"{text} (default: {shown_default(action)})"


class ArgumentParser(argparse.ArgumentParser):
    """argparse with a YAML config file, suggestions for misspelt flags, and errors of one line.

    No flag may be `required=True`, because argparse would not see its value in the config file.

    Args:
        prog: The script's file name, which starts every error; in an installed package its command does.
        is_root: Whether this process prints; called when there is something to print.
    """

    def __init__(
        self, prog: str | None = None, description: str | None = None, is_root: Callable[[], bool] = lambda: True
    ) -> None:
        open_standard_streams()
        super().__init__(
            prog=installed_command(prog) if prog and IS_INSTALLED else prog,
            usage="%(prog)s [--config FILE] [flags]",
            description=description,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        self._script, self._is_root = prog or self.prog, is_root
        self.add_argument("--help_all", action=HelpAll, default=argparse.SUPPRESS, help="explain every flag and exit")
        self.add_argument("--version", action=Version, default=argparse.SUPPRESS, help="print the version and exit")
        #: Which other scripts have all of some flags, by their names; for the message about one that is none here.
        self.scripts_with: Callable[[Sequence[str]], list[str]] = lambda names: []
        self._raises = False  # by `error`: the processes are connected, and have to agree on it
        #: The dataclass of the flags, if there is one, and of these the flag of the data.
        self.config: Any = None
        self.data_flag: str | None = None
        self._fields: dict[str, Flag] = {}
        #: What a resumed run may not change: names of flags, each with what of its value is compared.
        self.lasting: dict[str, Callable[[Any], Any]] = {}

    def error(self, message: str, *, is_agreed: bool = False) -> NoReturn:
        """Print `prog: error: message` as one line on stderr, and exit with code 2.

        `is_agreed`: all processes end with this message, so the root alone prints it. Otherwise it may be that of one
        process, such as one on a machine that lacks a file: the others print it too, but so late that their launcher
        has ended them if the root printed it.
        """
        if self._raises:
            raise ValueError(message)
        if not self._is_root():
            time.sleep(_ROOT_SPEAKS_FIRST_SECONDS if is_agreed else _OTHERS_SPEAK_AFTER_SECONDS)
        if self._is_root() or not is_agreed:
            self._print_message(f"{self.prog}: error: {printable(' '.join(message.splitlines()))}\n", sys.stderr)
        leave(MISTAKE)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        complete(self)
        return super().parse_known_args(args, namespace)

    def print_help(self, file: Any = None, *, whole: bool = False) -> None:
        """Print what people need first, if there are many flags; the `whole` help explains all."""
        if self._is_root():
            text = (None if whole else short_help(self)) or self.format_help()
            where = f"\nThe files of docs/ are in {HOME / 'docs'}.\n" if IS_INSTALLED and "docs/" in text else ""
            self._print_message(text + where, file or sys.stdout)

    def print_version(self) -> None:
        """Print the name of the package and its version."""
        if self._is_root():
            self._print_message(f"tandem-training {__version__}\n", sys.stdout)

    def add_config(self, config: type) -> None:
        """Add a flag for each field of a dataclass (`tandem.config.fields`).

        A class among its bases may have a classmethod `settle(args, parser)`, which is called with the result of every
        `parse`: it fills in what depends on other flags, and refuses contradictions by `error`; and a class variable
        `data_flag`, the name of the flag without which a script runs its demonstration.
        """
        groups: dict[str, argparse._ArgumentGroup] = {}
        for title, name, said, default in flags_of(config):
            if title not in groups:
                groups[title] = self.add_argument_group(title)
            add_flag(groups[title], name, said, default)
            self._fields[name] = said
            if said.lasting:
                self.lasting[name] = said.lasting
        self.config, self.data_flag = config, getattr(config, "data_flag", None)

    def parse(
        self, argv: Sequence[str] | None = None, demonstration: str | os.PathLike[str] | None = None
    ) -> argparse.Namespace:
        """Arguments from `argv` (None: sys.argv[1:]), then from the file of `--config`, then the defaults.

        If neither `argv` nor the file of `--config` has the flag of the data or `--dataset`, the config file
        `demonstration` is read, and --help says so; but it is a mistake if `argv` has `--config`, a model to start from
        or samples of another flag, because the run would end as if it had been trained on the user's data.

        The namespace also holds `explicit`, the frozenset of the dest names that were set in either place,
        `on_command_line`, that of those set in `argv`, `said_as`, the name of the flag that was used for each of them,
        `script`, the script's file name, `lasting`, as the attribute, `config_in_force`, a line that says which file
        was read, or None, and `resumed`, None, where `hub.start_training` puts config.yaml of a run that goes on. A
        mistake ends the process through `error`.
        """
        data = [str(self.data_flag), "dataset"]
        if demonstration:
            self.epilog = (
                f"Without {' and '.join(f'--{name}' for name in (*data, 'config'))} it runs its demonstration: the "
                f"flags of {_shown(demonstration)}, which differ from the defaults above."
            )
        given, said_as = self._from_command_line(sys.argv[1:] if argv is None else argv)
        on_command_line = frozenset(given)
        in_force = f"configuration: {given['config']}" if "config" in given else None
        settings, keys = self._from_config_file(given["config"]) if "config" in given else ({}, {})
        if demonstration and (settings.keys() | given.keys()).isdisjoint(data):
            if other := next((name for name in _WITHOUT_DATA_NO_RUN if name in given), None):
                flag = f"--{self.data_flag}"
                self.error(
                    f"--{said_as[other]} {given[other]} alone does not say what to train on: give {flag} PATH as well, "
                    f"or {flag} {self.get_default(data[0])}, which this script makes itself"
                )
            given["config"] = os.fspath(demonstration)
            settings, keys = self._from_config_file(given["config"])
            in_force = (
                f"demonstration: {_shown(demonstration)}, because neither --{self.data_flag} nor --config was given"
            )
        explicit = {**settings, **given}
        args = argparse.Namespace(**{**self._defaults_by_dest(), **explicit})
        args.explicit, args.on_command_line = frozenset(explicit), on_command_line
        args.script, args.config_in_force, args.lasting = self._script, in_force, dict(self.lasting)
        args.said_as, args.resumed = {**keys, **said_as}, None
        if not getattr(args, "init_from", None):  # the shape of the model that it starts from comes first: `adopt`
            self._settled(args)
        return args

    def _settled(self, args: argparse.Namespace) -> None:
        """Fill in what follows from other flags, and refuse contradictions, and flags of the command line without
        effect. In a config file these are allowed: config.yaml of a run holds every flag."""
        for kind in self.config.__mro__ if self.config else ():
            if "settle" in vars(kind):
                vars(kind)["settle"].__func__(self.config, args, self)
        for name, said in self._fields.items():
            for needed in said.needs:
                if name in args.on_command_line and not needed.is_met(args):
                    self._refuse_idle(args, name, needed)

    def adopt(self, args: argparse.Namespace, values: Mapping[str, Any], source: str) -> list[str]:
        """Give flags that nobody has set these values, which may be a stranger's, of the model that the run starts
        from; and settle, for the first time, what follows from all flags.

        Args:
            values: Of JSON's types, by name.
            source: Where they stand, as the user calls it.

        Returns:
            What was adopted and is no default, as a command line says it.

        Raises:
            ValueError: one line, if a value does not fit its flag, or what the user has set does not fit the weights.
        """
        taken = {  # of flags that are not of the weights, what the user says holds
            name: values[name]
            for name, said in self._fields.items()
            if name in values and (said.is_of_weights or name not in args.explicit)
        }
        model = argparse.Namespace(**vars(args))  # the arguments, if the user had said nothing else
        model.on_command_line, model.lasting = frozenset(), dict(args.lasting)
        vars(model).update(self._converted(taken, source))
        before = {name: getattr(args, name) for name in taken if name not in args.explicit}
        vars(args).update({name: getattr(model, name) for name in before})
        args.explicit |= before.keys()
        model.explicit = args.explicit
        self._raises = True
        try:
            for each in (args, model):
                self._settled(each)
        finally:
            self._raises = False
        differing = [name for name in taken if getattr(args, name) != getattr(model, name)]
        if needed := self._said(model, [name for name in differing if name not in self.config.idle(model)]):
            raise ValueError(f"the weights in {source} are of another model; they need {', '.join(needed)}")
        idle = self.config.idle(args)  # a command line that says them is refused
        return self._said(args, [name for name in before if getattr(args, name) != before[name] and name not in idle])

    def _said(self, args: argparse.Namespace, names: Sequence[str]) -> list[str]:
        return [said_as_flag(self._config_flags[name], getattr(args, name)) for name in names]

    def _converted(self, flags: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Values of JSON's types, which stand in ``source``, as their flags have them."""
        from .config_file import converted

        values = {}
        for name, value in flags.items():
            action = self._config_flags[name]
            try:
                values[action.dest] = None if value is action.default is None else converted(value, action)
            except ValueError as error:
                raise ValueError(f"{source} has {name} {repr(value)[:40]}: {error}") from None
        return values

    def _hint(self, name: str, known: Sequence[str], keys: Sequence[str] = ()) -> str:
        """What to do instead of a name that is no flag, as the end of a line; "" if that is not known. ``keys``: all of
        the config file that has the name, if one has it."""
        from .public_names import instead_of

        bare = name.lstrip("-").replace("-", "_")
        others = self.scripts_with(keys or [bare])
        if keys and others:
            return f": the file is a config of {' or '.join(others)}"
        instead = _NO_FLAG.get(bare) or instead_of(bare, self._script)
        if not instead and others:
            instead = f"it is a flag of {' and '.join(others)}"
        return f": {instead}" if instead else nearest(name, known)

    def knows(self, names: Sequence[str]) -> bool:
        """Whether a config file may have all of these keys."""
        return self._config_flags.keys() >= set(names)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse, with the choice that was probably meant."""
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, no_choice(value, action.choices))

    def with_values(self, flags: Mapping[str, Any]) -> argparse.Namespace:
        """The defaults, but for these flags, which are as a config file has them. Raises ValueError, in one line, for a
        value that does not fit."""
        from .config_file import converted

        known = self._config_flags
        said = {known[name].dest: converted(value, known[name]) for name, value in flags.items() if value is not None}
        return argparse.Namespace(**{**self._defaults_by_dest(), **said})

    def choose(self, args: argparse.Namespace, **off: Any) -> None:
        """Switch off all but one of some flags of which only one can have an effect, each named with the value that it
        has then. One on the command line wins over one in the config file, and either over a default; two in the same
        place are an error."""
        on = [name for name, value in off.items() if getattr(args, name) != value]
        places = ([name for name in on if name in said] for said in (args.on_command_line, args.explicit, on))
        chosen, *others = next(filter(None, places), [None])
        if others:
            self.error(f"--{chosen} and --{others[0]} exclude one another; give one of them")
        for name in set(on) - {chosen}:
            setattr(args, name, off[name])

    def _refuse_idle(self, args: argparse.Namespace, flag: str, needed: Needs) -> NoReturn:
        other = self.data_flag if needed.flag == DATA else needed.flag
        value = getattr(args, str(other))
        each = value if isinstance(value, list) else [value]
        now = " ".join((",".join(part) or "none") if isinstance(part, tuple) else str(part) for part in each)
        state = f"without --{other}" if value is None else f"with --{other} {now}"
        leave = f"it out, or give --{other} {needed.value}" if needed.value else "out one of them"
        self.error(f"--{args.said_as.get(flag, flag)} has no effect {state}; leave {leave}")

    def settings(self, args: argparse.Namespace) -> dict[str, Any]:
        """Every argument that describes the run, by flag name, as config.yaml holds it and `--config` reads it.

        Left out are `_COMMAND_LINE_ONLY` and the flags that only a launcher passes.
        """
        return {
            config_names(action)[0]: config_value(action, getattr(args, action.dest))
            for action in self._config_flags.values()
        }

    def _from_command_line(self, argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Values, and the names that said them, by dest name."""
        # argparse sets no default for an attribute that exists: a flag that is still _UNSET afterwards was not in argv.
        # A flag that appends starts from None, because argparse would append to _UNSET.
        unset = {
            action.dest: None if isinstance(action, argparse._AppendAction) else _UNSET
            for action in self._actions
            if action.default is not argparse.SUPPRESS
        }
        namespace, unknown = self.parse_known_args(argv, argparse.Namespace(**unset))
        if unknown:
            flag = unknown[0].split("=")[0]
            if flag.startswith("-"):
                self.error(f"unknown flag {flag}{self._hint(flag, list(self._option_string_actions))}")
            before = argv[max(argv.index(unknown[0]) - 1, 0)]
            switch = self._option_string_actions.get(before)
            if switch is not None and switch.nargs == 0:
                off = f"--no-{before[2:]}" if isinstance(switch, argparse.BooleanOptionalAction) else "nothing"
                self.error(f"{before} is a switch without a value, got {flag!r}: give {before} or {off} alone")
            self.error(f"unexpected argument {flag!r}: every value follows a flag")
        said_as: dict[str, str] = {}
        for name in (token.split("=")[0] for token in argv):
            if action := self._option_string_actions.get(name):
                first = f"--{said_as.get(action.dest, name[2:])}"
                if first != name and not isinstance(action, argparse.BooleanOptionalAction):
                    self.error(f"{first} and {name} are two names of one flag; give one of them")
                said_as[action.dest] = name[2:]
        return {dest: value for dest, value in vars(namespace).items() if value is not unset.get(dest)}, said_as

    def _from_config_file(self, path: str) -> tuple[dict[str, Any], dict[str, str]]:
        from .config_file import read_flags

        try:
            return read_flags(path, self._config_flags, _COMMAND_LINE_ONLY, self._hint)
        except ValueError as error:
            self.error(str(error))

    def _defaults_by_dest(self) -> dict[str, Any]:
        """By dest name, converted from text as argparse does it."""
        return {
            action.dest: self._get_value(action, action.default) if isinstance(action.default, str) else action.default
            for action in self._actions
            if action.default is not argparse.SUPPRESS
        }

    @property
    def _config_flags(self) -> dict[str, argparse.Action]:
        """Flags that a config file may set, by each of their names there."""
        shown = (action for action in self._actions if action.help is not argparse.SUPPRESS)
        return {
            name: action for action in shown if action.dest not in _COMMAND_LINE_ONLY for name in config_names(action)
        }


def _shown(path: str | os.PathLike[str]) -> str:
    """A path as people write it: relative to the working folder if it is below it, and as `shipped` finds it if it is
    below configs/."""
    relative, at_home = os.path.relpath(path), os.path.relpath(path, HOME)
    if not relative.startswith(".."):
        return relative
    return os.fspath(path) if at_home.startswith("..") else at_home
