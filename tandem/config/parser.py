"""Arguments of the scripts, from command line and YAML. Imports the standard library only, so that `--help` is fast."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from tandem import __version__
from tandem.io.exits import MISTAKE, exit_process
from tandem.io.installed import HOME, IS_INSTALLED, installed_command
from tandem.io.reading import printable
from tandem.io.renamed import FORMER_SETTINGS
from tandem.io.writing import open_standard_streams

from .converters import (
    FILE,
    FOLDER,
    PATH,
    choice_error,
    config_names,
    config_value,
    did_you_mean,
    format_flag,
    format_value,
)
from .fields import DATA, Flag, Invocation, Requirement, add_flag, flags_of, specs_of
from .shell import HelpAll, complete, short_help

# A config file may not set these: `config` would include another file, `fresh` would start over at every resume.
_COMMAND_LINE_ONLY = frozenset({"help", "help_all", "version", "config", "fresh", "dry_run", "profile_steps"})
# Paths, and what a machine can do at once, may differ between machines.
_SETTINGS_OF_A_MACHINE = frozenset({"model", "output", "deepspeed_config", "num_workers", "cpu_threads"})

# Seconds that a process other than the root waits after an error. A launcher ends all processes when the first one
# exits: the short delay leaves the root the time to print an error that all have. A process that still runs after the
# long one is alone with its error and prints it.
_AGREED_DELAY, _OWN_DELAY = 2.0, 10.0

# Flags that show that a real run is meant: with one of them, but neither `data_flag` nor --dataset, a command is
# refused and does not run the demonstration.
_NEEDS_DATA = ("config", "init_from", "image_folder", "valid_folder", "image_embeddings", "text_embeddings")

_UNSET = object()

# Flags of other trainers that have no counterpart here, and what to do instead.
_ADVICE = {
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
        if any(action.default is hidden for hidden in (None, False, argparse.SUPPRESS)) or "%(default)" in text:
            return text
        return f"{text} (default: {format_value(action, action.default)})"


class ArgumentParser(argparse.ArgumentParser):
    """argparse with a YAML config file, suggestions for misspelt flags, and errors of one line.

    No flag may be `required=True`, because argparse would not see its value in the config file.

    Args:
        prog: The script's file name. Every error starts with it, in an installed package with the script's command.
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
        version = f"tandem-training {__version__}"
        self.add_argument("--help_all", action=HelpAll, help="explain every flag and exit")
        self.add_argument("--version", action="version", version=version, help="print the version and exit")
        #: Names of flags -> the other scripts that have all of them, for the message about an unknown flag.
        self.scripts_with: Callable[[Sequence[str]], list[str]] = lambda names: []
        self._raises = False  # whether `error` raises, because the processes are connected and have to agree
        #: The dataclass of the flags, and the name of the flag for the training data; None if there is none.
        self.config: Any = None
        self.data_flag: str | None = None
        self._fields: dict[str, Flag] = {}
        #: Flags that a resumed run may not change: name -> function whose result for the value is compared.
        self.fixed_on_resume: dict[str, Callable[[Any], Any]] = {}

    def error(self, message: str, *, is_agreed: bool = False) -> NoReturn:
        """Print `prog: error: message` as one line on stderr, and exit with code 2.

        `is_agreed`: all processes end with this message, so the root alone prints it. Otherwise it may concern one
        process, such as one on a machine that lacks a file. Then the others print it too, but so late that the launcher
        has ended them if the root printed it.
        """
        if self._raises:
            raise ValueError(message)
        if not self._is_root():
            time.sleep(_AGREED_DELAY if is_agreed else _OWN_DELAY)
        if self._is_root() or not is_agreed:
            self._print_message(f"{self.prog}: error: {printable(' '.join(message.splitlines()))}\n", sys.stderr)
        exit_process(MISTAKE)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        complete(self)
        return super().parse_known_args(args, namespace)

    def print_help(self, file: Any = None, *, explain_all: bool = False) -> None:
        """Print the help, a short one if there are many flags, unless `explain_all`."""
        text = (None if explain_all else short_help(self)) or self.format_help()
        docs_note = f"\nThe files of docs/ are in {HOME / 'docs'}.\n" if IS_INSTALLED and "docs/" in text else ""
        self._print_message(text + docs_note, file or sys.stdout)

    def _print_message(self, message: str, file: Any = None) -> None:
        """As argparse, but help and version are printed by the root alone."""
        if file is sys.stderr or self._is_root():
            super()._print_message(message, file)

    def add_config(self, config: type) -> None:
        """Add a flag for each field of a dataclass (`tandem.config.fields`).

        A class among its bases may have a classmethod `validate(args, parser)`, which is called with the result of
        every `parse`: it fills in what depends on other flags, and refuses contradictions by `error`; and a class
        variable `data_flag`, the name of the flag without which a script runs its demonstration.
        """
        groups: dict[str, argparse._ArgumentGroup] = {}
        for title, name, spec, default in flags_of(config):
            if title not in groups:
                groups[title] = self.add_argument_group(title)
            add_flag(groups[title], name, spec, default)
        self._fields = specs_of(config)
        self.fixed_on_resume = {n: spec.fixed_on_resume for n, spec in self._fields.items() if spec.fixed_on_resume}
        self.config, self.data_flag = config, getattr(config, "data_flag", None)

    def parse(
        self, argv: Sequence[str] | None = None, demonstration: str | os.PathLike[str] | None = None
    ) -> argparse.Namespace:
        """Arguments from `argv` (None: sys.argv[1:]), then from the file of `--config`, then the defaults.

        If neither `argv` nor the file of `--config` has `data_flag` or `--dataset`, the config file `demonstration` is
        read, and --help says so. But if `argv` has one of `_NEEDS_DATA`, such as `--init_from`, that is an error,
        because the user would take the result for a model of the user's data.

        The namespace also holds `explicit`, the dest names that were set in either place (frozenset);
        `on_command_line`, those set in `argv`; `aliases`, for each name in `explicit` the one of the flag's names by
        which it was set; `script`, the script's file name; and `config_note`, a line with the path of the file that was
        read, or None.

        An error ends the process through `error`.
        """
        data = [str(self.data_flag), "dataset"]
        if demonstration:
            demonstration_path = os.path.relpath(os.path.realpath(demonstration), HOME)  # configs/..., in any folder
            self.epilog = (
                f"Without --{self.data_flag}, --dataset and --config, it runs its demonstration: the flags of "
                f"{demonstration_path}, which differ from the defaults above."
            )
        values, aliases = self._parse_command_line(sys.argv[1:] if argv is None else argv)
        on_command_line = frozenset(values)
        note = f"configuration: {values['config']}" if "config" in values else None
        settings, keys = self._read_config_file(values["config"]) if "config" in values else ({}, {})
        if demonstration and (settings.keys() | values.keys()).isdisjoint(data):
            if name := next((name for name in _NEEDS_DATA if name in values), None):
                flag = f"--{self.data_flag}"
                self.error(
                    f"--{aliases[name]} {values[name]} alone does not say what to train on: give {flag} PATH as well, "
                    f"or {flag} {self.get_default(data[0])}, samples that this script makes itself"
                )
            values["config"] = os.fspath(demonstration)
            settings, keys = self._read_config_file(values["config"])
            note = f"demonstration: {demonstration_path}, because neither --{self.data_flag} nor --config was given"
        explicit = {**settings, **values}
        args = argparse.Namespace(**{**self._defaults_by_dest(), **explicit})
        args.explicit, args.on_command_line = frozenset(explicit), on_command_line
        args.script, args.config_note, args.aliases = self._script, note, {**keys, **aliases}
        if not getattr(args, "init_from", None):  # with it, `adopt` validates
            self._validate(args)
        return args

    def to_config(
        self, args: argparse.Namespace, settings: Mapping[str, Any], resumed: Mapping[str, Any] | None = None
    ) -> Any:
        """The arguments as an instance of the dataclass of the flags. `settings` and `resumed`: as in `Invocation`."""
        invocation = Invocation(
            args.script, settings, args.explicit, args.aliases, self.fixed_on_resume, args.config_note, resumed
        )
        # Without a model's `__post_init__`: it needs what is read later, such as a tower's configuration from its path.
        config = self.config.__new__(self.config)
        vars(config).update({name: getattr(args, name) for name in self._fields}, invocation=invocation)
        return config

    def _validate(self, args: argparse.Namespace) -> None:
        """Fill in values that follow from other flags, and refuse contradictions and, on the command line, flags
        without effect. A config file may have them, because config.yaml of a run holds every flag."""
        for base in self.config.__mro__ if self.config else ():
            if "validate" in vars(base):
                vars(base)["validate"].__func__(self.config, args, self)
        for name, spec in self._fields.items():
            for requirement in spec.requires:
                if name in args.on_command_line and not requirement.is_met(args):
                    self._refuse_unused(args, name, requirement)

    def adopt(self, args: argparse.Namespace, values: Mapping[str, Any], source: str) -> list[str]:
        """Set the flags that the user did not set to the values of the model that the run starts from, which are not
        trusted. Then validate all flags for the first time.

        Args:
            values: Of JSON's types, by name.
            source: Their file or folder, as the user names it.

        Returns:
            The values that were taken and are no defaults, as flags on a command line.

        Raises:
            ValueError: one line, if a value does not fit its flag, or a flag of the user does not fit the weights.
        """
        model_values = {  # those on which the weights depend, and those that the user has not set
            name: values[name]
            for name, spec in self._fields.items()
            if name in values and (spec.is_architecture or name not in args.explicit)
        }
        model_args = argparse.Namespace(**vars(args))  # the arguments, if all values of the model are taken
        model_args.on_command_line = frozenset()  # so that `_validate` refuses no flag as one without effect
        vars(model_args).update(self._convert(model_values, source))
        defaults = {name: getattr(args, name) for name in model_values if name not in args.explicit}
        vars(args).update({name: getattr(model_args, name) for name in defaults})
        args.explicit |= defaults.keys()
        model_args.explicit = args.explicit
        self._raises = True
        try:
            for namespace in (args, model_args):
                self._validate(namespace)
        finally:
            self._raises = False
        conflicts = [name for name in model_values if getattr(args, name) != getattr(model_args, name)]
        if flags := self._as_flags(model_args, conflicts):
            raise ValueError(f"the weights in {source} are of another model; they need {', '.join(flags)}")
        return self._as_flags(args, [name for name in defaults if getattr(args, name) != defaults[name]])

    def _as_flags(self, args: argparse.Namespace, names: Sequence[str]) -> list[str]:
        """The arguments of these names as flags of a command line, without those that have no effect and are
        refused."""
        unused = self.config.unused(args)
        return [format_flag(self._config_flags[name], getattr(args, name)) for name in names if name not in unused]

    def _convert(self, flags: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Values of JSON's types from ``source``, converted to the types of their flags."""
        from .config_file import convert_value

        values = {}
        for name, value in flags.items():
            action = self._config_flags[name]
            try:
                values[action.dest] = None if value is None and action.default is None else convert_value(value, action)
            except ValueError as error:
                raise ValueError(f"{source} has {name} {repr(value)[:40]}: {error}") from None
        return values

    def _hint(self, name: str, names: Sequence[str], keys: Sequence[str] = ()) -> str:
        """Advice about a name that is no flag, to be appended to an error; "" if there is none. ``keys``: all keys of
        the config file in which the name stands, if any."""
        from .public_names import advice_for

        plain = name.lstrip("-").replace("-", "_")
        scripts = self.scripts_with(keys or [plain])
        if keys and scripts:
            return f": the file is a config of {' or '.join(scripts)}"
        advice = _ADVICE.get(plain) or advice_for(plain, self._script)
        if not advice and scripts:
            advice = f"it is a flag of {' and '.join(scripts)}"
        return f": {advice}" if advice else did_you_mean(name, names)

    def has_flags(self, names: Sequence[str]) -> bool:
        """Whether a config file may have all of these keys."""
        return self._config_flags.keys() >= set(names)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse, with a suggestion for a misspelt choice."""
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, choice_error(value, action.choices))

    def with_values(self, flags: Mapping[str, Any]) -> argparse.Namespace:
        """The defaults, with these values of flags from a config file. Raises ValueError, in one line, for a value that
        does not fit."""
        from .config_file import convert_value

        actions = {self._config_flags[name]: value for name, value in flags.items() if value is not None}
        values = {action.dest: convert_value(value, action) for action, value in actions.items()}
        return argparse.Namespace(**{**self._defaults_by_dest(), **values})

    def choose_one(self, args: argparse.Namespace, **off_values: Any) -> None:
        """Set all but one of some mutually exclusive flags to their ``off_values``. A flag on the command line takes
        precedence over one in the config file, and either over a default; two in the same place are an error."""
        active = [name for name, value in off_values.items() if getattr(args, name) != value]
        for names in (args.on_command_line, args.explicit, active):
            candidates = [name for name in active if name in names]
            if len(candidates) > 1:
                self.error(f"--{candidates[0]} and --{candidates[1]} exclude one another; give one of them")
            if candidates:
                vars(args).update({name: off_values[name] for name in active if name != candidates[0]})
                return

    def _refuse_unused(self, args: argparse.Namespace, flag: str, requirement: Requirement) -> NoReturn:
        other = str(self.data_flag if requirement.flag == DATA else requirement.flag)
        text = format_value(self._config_flags[other], getattr(args, other))
        state = f"with --{other} {text}" if text else f"without --{other}"
        advice = f"it out, or give --{other} {requirement.value}" if requirement.value else "out one of the two"
        self.error(f"--{args.aliases.get(flag, flag)} has no effect {state}; leave {advice}")

    def settings(self, args: argparse.Namespace) -> dict[str, Any]:
        """Every argument that describes the run, by flag name, as config.yaml holds it and `--config` reads it.

        Left out are `_COMMAND_LINE_ONLY`, flags without a help text, which a launcher passes, and former flags.
        """
        return {
            config_names(action)[0]: config_value(action, getattr(args, action.dest))
            for name, action in self._config_flags.items()
            if name not in FORMER_SETTINGS
        }

    def settings_of_all(self, args: argparse.Namespace) -> dict[str, Any]:
        """Those of the `settings` that have to be the same on every process: all but paths and
        `_SETTINGS_OF_A_MACHINE`."""
        paths = {config_names(a)[0] for a in self._config_flags.values() if a.type in (PATH, FILE, FOLDER)}
        settings = self.settings(args).items()
        return {name: value for name, value in settings if name not in paths | _SETTINGS_OF_A_MACHINE}

    def _parse_command_line(self, argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Values, and the aliases that were used, by dest name."""
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
            previous = argv[max(argv.index(unknown[0]) - 1, 0)]
            switch = self._option_string_actions.get(previous)
            if switch is not None and switch.nargs == 0:
                off = f"--no-{previous[2:]}" if isinstance(switch, argparse.BooleanOptionalAction) else "nothing"
                self.error(f"{previous} is a switch without a value, got {flag!r}: give {previous} or {off} alone")
            self.error(f"unexpected argument {flag!r}: every value follows a flag")
        aliases: dict[str, str] = {}
        for name in (token.split("=")[0] for token in argv):
            if action := self._option_string_actions.get(name):
                first = f"--{aliases.get(action.dest, name[2:])}"
                if first != name and not isinstance(action, argparse.BooleanOptionalAction):
                    self.error(f"{first} and {name} are two names of one flag; give one of them")
                aliases[action.dest] = name[2:]
        return {dest: value for dest, value in vars(namespace).items() if value is not unset.get(dest)}, aliases

    def _read_config_file(self, path: str) -> tuple[dict[str, Any], dict[str, str]]:
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
        """Flags that a config file may set, by each of their names there, former ones included."""
        actions = (action for action in self._actions if action.dest not in _COMMAND_LINE_ONLY)
        return {
            name: action
            for action in actions
            for name in config_names(action)
            if action.help is not argparse.SUPPRESS or name in FORMER_SETTINGS
        }
