"""Command-line and YAML arguments of the scripts. Standard library only, so that `--help` answers at once."""

import argparse
import difflib
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

# Exit code of a mistake in the arguments, as argparse has it.
USAGE_ERROR = 2

# Given by hand on each start: a config file that could say them would nest, or would start over at every resume.
COMMAND_LINE_ONLY = frozenset({"help", "config", "fresh"})

# A launcher ends every process at the first that fails: the root must have spoken by then.
_ROOT_SPEAKS_FIRST_SECONDS = 2.0

_UNSAID = object()


def nearest(word: str, known: Sequence[str]) -> str:
    """`"; did you mean x?"` for the most similar known word, or `""` where none is similar."""
    matches = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


class HelpFormatter(argparse.HelpFormatter):
    """Appends each default; flags that are simply off or unset have none worth showing."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if any(action.default is nothing for nothing in (None, False, argparse.SUPPRESS)) or "%(default)" in text:
            return text
        return f"{text} (default: %(default)s)"


class ArgumentParser(argparse.ArgumentParser):
    """argparse with a YAML config file, suggestions, and errors of one line that the root alone prints.

    Flags need a default: `required=True` would refuse a value that stands in the config file.

    Args:
        prog: The script's file name, which starts every error.
        description: What the script does.
        is_root: Whether this process speaks. Called when there is something to say.
    """

    def __init__(
        self, prog: str | None = None, description: str | None = None, is_root: Callable[[], bool] = lambda: True
    ) -> None:
        super().__init__(
            prog=prog,
            usage="%(prog)s [--config FILE] [flags]",
            description=description,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        self._is_root = is_root

    def error(self, message: str) -> NoReturn:
        """Print `prog: error: message` as one line on the root's stderr, and exit with code 2."""
        if not self._is_root():
            time.sleep(_ROOT_SPEAKS_FIRST_SECONDS)
            sys.exit(USAGE_ERROR)
        self.exit(USAGE_ERROR, f"{self.prog}: error: {' '.join(message.splitlines())}\n")

    def print_help(self, file: Any = None) -> None:
        if self._is_root():
            super().print_help(file)

    def parse(
        self,
        argv: Sequence[str] | None = None,
        demonstration: str | os.PathLike[str] | None = None,
        data_flag: str = "image_folder",
    ) -> argparse.Namespace:
        """Arguments from `argv` (None: sys.argv[1:]), then from the file of `--config`, then the defaults.

        Where neither `--config` nor the flag that names the data is said there is nothing to train on yet: the file
        `demonstration`, if there is one, then stands for `--config`.

        The namespace also carries `explicit`, the frozenset of the dest names that were said in either place, and
        `on_command_line`, that of those in `argv`.
        Mistakes end the process through `error`.
        """
        said = self._from_command_line(argv)
        spoken = frozenset(said)
        if demonstration and data_flag not in said:
            said.setdefault("config", os.fspath(demonstration))
        settings = self._from_config_file(said["config"]) if "config" in said else {}
        explicit = {**settings, **said}
        args = argparse.Namespace(**{**self._defaults_by_dest(), **explicit})
        args.explicit, args.on_command_line = frozenset(explicit), spoken
        return args

    def refuse_idle(
        self, args: argparse.Namespace, flags: Sequence[str], other: str, needed: str, is_met: bool
    ) -> None:
        """End with an error where one of `flags` stands on the command line and does nothing in this run.

        A config file may hold what the command line switches off, and config.yaml of a run holds every flag: what
        they say without effect is let pass.

        Args:
            args: From `parse`.
            flags: Dest names.
            other: Name of the flag on which they depend.
            needed: The value of `other` with which they have an effect, in words.
            is_met: Whether `other` has such a value.
        """
        idle = [] if is_met else [flag for flag in flags if flag in args.on_command_line]
        if idle:
            now = f"--{other} {getattr(args, other)}"
            self.error(f"--{idle[0]} has no effect with {now}; leave it out, or give --{other} {needed}")

    def settings(self, args: argparse.Namespace) -> dict[str, Any]:
        """Every argument that describes the run, by flag name: what config.yaml holds and `--config` reads back.

        Left out are the flags given by hand at each start (`COMMAND_LINE_ONLY`) and those that only a launcher passes.
        """
        return {
            _config_names(action)[0]: _config_value(action, getattr(args, action.dest))
            for action in self._config_actions()
        }

    def _from_command_line(self, argv: Sequence[str] | None) -> dict[str, Any]:
        # argparse leaves an attribute alone that is there already, so what is still unsaid afterwards was not said.
        # None stands for unsaid where values are appended, because argparse extends what it finds.
        unsaid = {
            action.dest: None if _appends(action) else _UNSAID
            for action in self._actions
            if action.default is not argparse.SUPPRESS
        }
        namespace, unknown = self.parse_known_args(argv, argparse.Namespace(**unsaid))
        if unknown:
            flag = unknown[0].split("=")[0]
            if flag.startswith("-"):
                self.error(f"unknown flag {flag}{nearest(flag, list(self._option_string_actions))}")
            self.error(f"unexpected argument {flag!r}: every value follows a flag")
        return {
            dest: value for dest, value in vars(namespace).items() if dest not in unsaid or value is not unsaid[dest]
        }

    def _from_config_file(self, path: str) -> dict[str, Any]:
        from .config_file import read_config

        try:
            return read_config(path, {name: flag for flag in self._config_actions() for name in _config_names(flag)})
        except ValueError as error:
            self.error(str(error))

    def _config_actions(self) -> list[argparse.Action]:
        """Flags that a config file may set."""
        return [
            action
            for action in self._actions
            if action.dest not in COMMAND_LINE_ONLY and action.help is not argparse.SUPPRESS
        ]

    def _defaults_by_dest(self) -> dict[str, Any]:
        return {
            action.dest: _converted_default(action)
            for action in self._actions
            if action.default is not argparse.SUPPRESS
        }


def _converted_default(action: argparse.Action) -> Any:
    """The default, converted where it is text, as argparse does it."""
    if isinstance(action.default, str) and callable(action.type):
        return action.type(action.default)
    return action.default


def _appends(action: argparse.Action) -> bool:
    return isinstance(action, (argparse._AppendAction, argparse._ExtendAction))


def _config_names(action: argparse.Action) -> list[str]:
    """Keys of a flag in a config file: its long names with underscores, the first first; `--no-x` is `x: false`."""
    negatable = isinstance(action, argparse.BooleanOptionalAction)
    return [
        option[2:].replace("-", "_")
        for option in action.option_strings
        if option.startswith("--") and not (negatable and option.startswith("--no-"))
    ]


def _config_value(action: argparse.Action, value: Any) -> Any:
    """What a config file would say for `value`: switches are true where they were thrown."""
    return value == action.const if isinstance(action, argparse._StoreConstAction) else value
