"""Command-line and YAML arguments of the scripts. Standard library only, so that `--help` answers at once."""

import argparse
import decimal
import difflib
import math
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


def _whole_number(text: str, minimum: int, expected: str) -> int:
    try:
        number = decimal.Decimal(text)
    except decimal.InvalidOperation:
        number = decimal.Decimal("nan")
    # 64 bits hold 18 full decimal digits; the test also keeps int() from unfolding 1e999999999.
    if not number.is_finite() or number.adjusted() > 17 or number != int(number) or number < minimum:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return int(number)


def _number(text: str, accepts: Callable[[float], bool], expected: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and accepts(number)):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return number


def positive_int(text: str) -> int:
    """A whole number >= 1. `1_000`, `1e6` and `8.0` are accepted: they are whole."""
    return _whole_number(text, 1, "a whole number above 0")


def non_negative_int(text: str) -> int:
    """A whole number >= 0, spelled as for `positive_int`."""
    return _whole_number(text, 0, "a whole number, 0 or more")


def positive_float(text: str) -> float:
    """A finite number > 0."""
    return _number(text, lambda number: number > 0, "a number above 0")


def non_negative_float(text: str) -> float:
    """A finite number >= 0."""
    return _number(text, lambda number: number >= 0, "a number, 0 or more")


def fraction(text: str) -> float:
    """A number in [0, 1)."""
    return _number(text, lambda number: 0 <= number < 1, "a number from 0 to below 1")


def names_of(*known: str) -> Callable[[str], str]:
    """Converter for a comma list out of `known`, any case, or `none`: returned sorted, without doubles, as "a,b"."""

    def convert(text: str) -> str:
        names = {name.strip().lower() for name in text.split(",")} - {""}
        unknown = sorted(names - {*known, "none"})
        if unknown or not names or ("none" in names and len(names) > 1):
            raise argparse.ArgumentTypeError(f"expected none, or a comma list of {', '.join(known)}; got {text!r}")
        return ",".join(sorted(names))

    return convert


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

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Arguments from `argv` (None: sys.argv[1:]), then from the file of `--config`, then the defaults.

        The namespace also carries `explicit`, the frozenset of the dest names that were said in either place.
        Mistakes end the process through `error`.
        """
        said = self._from_command_line(argv)
        settings = self._from_config_file(said["config"]) if "config" in said else {}
        explicit = {**settings, **said}
        args = argparse.Namespace(**{**self._defaults_by_dest(), **explicit})
        args.explicit = frozenset(explicit)
        return args

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


def add_run_arguments(
    parser: argparse.ArgumentParser,
    *,
    output_dir: str,
    epochs: float = 20,
    batch_size: int = 8,
    max_grad_norm: float = 0.0,
    precision: str = "fp32",
    num_workers: int = 2,
    ema_decay: float = 0.0,
    valid_fraction: float = 0.05,
    validate_every_n_steps: int = 100,
    sample_every_n_steps: int = 100,
    save_every_n_steps: int = 100,
) -> None:
    """Add the flags that every script has. The parameters are the script's own defaults."""
    # fmt: off
    add = parser.add_argument_group("run").add_argument
    add("--output_dir", default=output_dir, metavar="DIR", help="run folder; a run that it holds is resumed")
    add("--config", metavar="FILE", help="YAML file of flags without dashes; the command line wins")
    add("--fresh", action="store_true", help="start over; a run that output_dir holds is moved to DIR.old-N")
    add("--seed", type=non_negative_int, default=0, metavar="INT", help="of weights, data order, noise and split")
    add("--epochs", type=positive_float, default=epochs, metavar="EPOCHS", help="passes over the training data")
    add("--max_steps", type=positive_int, metavar="UPDATES", help="stop after so many updates if epochs last longer")

    add = parser.add_argument_group("optimisation").add_argument
    add("--batch_size", type=positive_int, default=batch_size, metavar="SAMPLES",
        help="samples per update, over all processes and accumulation steps")
    add("--grad_accum_steps", type=positive_int, default=1, metavar="N", help="micro-batches per update and process")
    add("--max_grad_norm", type=non_negative_float, default=max_grad_norm, metavar="NORM",
        help="clip the gradient to this 2-norm; 0: no clipping")
    add("--ema_decay", type=fraction, default=ema_decay, metavar="DECAY",
        help="of the exponential moving average of the weights, per update; 0: no average")
    add("--max_skipped_updates", type=non_negative_int, default=20, metavar="UPDATES",
        help="stop after so many non-finite updates in a row")

    add = parser.add_argument_group("precision").add_argument
    add("--precision", type=str.lower, choices=("fp32", "bf16", "fp16"), default=precision,
        help="of the forward and backward pass; weights and moments stay fp32")
    add("--compile", action="store_true", help="compile the model with torch.compile")

    add = parser.add_argument_group("data loading").add_argument
    add("--num_workers", type=non_negative_int, default=num_workers, metavar="N",
        help="loader processes per training process; 0: load in the training process")
    add("--valid_fraction", type=fraction, default=valid_fraction, metavar="FRACTION",
        help="of the data, held out by seed for validation; 0: none")
    add("--on_bad_sample", type=str.lower, choices=("replace", "error"), default="replace",
        help="where a file cannot be read: take the next in the order, or stop")

    add = parser.add_argument_group("validation and logging").add_argument
    add("--log_every_n_steps", type=positive_int, default=10, metavar="UPDATES", help="write a line of metrics.jsonl")
    add("--validate_every_n_steps", type=non_negative_int, default=validate_every_n_steps, metavar="UPDATES",
        help="measure on the validation split; 0: only at the end")
    add("--sample_every_n_steps", type=non_negative_int, default=sample_every_n_steps, metavar="UPDATES",
        help="write a picture to samples/; 0: only at the end")
    add("--report_to", type=names_of("tensorboard", "wandb"), default="none", metavar="NAMES",
        help="trackers beside metrics.jsonl: none, or a comma list of tensorboard, wandb")

    add = parser.add_argument_group("checkpoints").add_argument
    add("--save_every_n_steps", type=non_negative_int, default=save_every_n_steps, metavar="UPDATES",
        help="write a checkpoint; 0: only at the end")
    add("--keep_n_checkpoints", type=positive_int, default=3, metavar="N", help="the newest; older ones are deleted")
    add("--save_before_minutes", type=positive_float, metavar="MINUTES",
        help="save and exit with code 75 before the process is this old: for a scheduler's wall-time limit")
    # fmt: on
