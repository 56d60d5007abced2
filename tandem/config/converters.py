"""Converters from the text of a flag to its value: argparse types whose errors say what was expected."""

import argparse
import decimal
import difflib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


# Every number of 18 digits fits into 64 bits. The limit also keeps int() from writing out 1e999999999.
_LARGEST_NUMBER = 10**18 - 1
_LONGEST_QUOTE = 40


def _parse_int(text: str, minimum: int, expected: str, maximum: int = _LARGEST_NUMBER) -> int:
    try:
        number = decimal.Decimal(text)
    except decimal.InvalidOperation:
        number = decimal.Decimal("nan")
    if not number.is_finite() or not minimum <= number <= maximum or number != int(number):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {quoted(text)}")
    return int(number)


def quoted(text: str) -> str:
    """A text in quotation marks, cut off if it is long."""
    return repr(text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}...")


@dataclass(frozen=True)
class Converter:
    """Converts the text of a flag to its value; ``metavar`` is the word for the value in --help."""

    metavar: str
    convert: Callable[[str], Any]

    def __call__(self, text: str) -> Any:
        return self.convert(text)


def _bounded_int(maximum: int, minimum: int = 1, metavar: str = "N") -> Converter:
    expected = f"a whole number from {minimum} to {maximum}"
    return Converter(metavar, partial(_parse_int, minimum=minimum, expected=expected, maximum=maximum))


def _parse_float(text: str, accepts: Callable[[float], bool], expected: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and accepts(number)):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {quoted(text)}")
    return number


def _bounded_float(accepts: Callable[[float], bool], expected: str, metavar: str = "NUMBER") -> Converter:
    return Converter(metavar, partial(_parse_float, accepts=accepts, expected=expected))


def expand_path(text: str) -> str:
    """A path, or a name that may stand in its place, with the home folder for ~ at the beginning. A shell leaves the ~
    of `--flag=~/x` and of a config file to the program. Nothing is no path: a variable of the shell was not set."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return os.path.expanduser(text)


PATH, FILE, FOLDER, NAME_OR_PATH = (Converter(word, expand_path) for word in ("PATH", "FILE", "DIR", "NAME"))
NAME = Converter("NAME", str)

# Whole numbers; `1_000`, `1e6` and `8.0` are accepted.
_from_1 = partial(_parse_int, minimum=1, expected="a whole number above 0")
_from_0 = partial(_parse_int, minimum=0, expected="a whole number, 0 or more")
positive_int, non_negative_int = Converter("N", _from_1), Converter("N", _from_0)
int_above_1 = Converter("N", partial(_parse_int, minimum=2, expected="a whole number above 1"))
step_count, step_count_or_0 = Converter("UPDATES", _from_1), Converter("UPDATES", _from_0)

# Whole numbers of things that each take memory or time. Numbers beyond the memory of any machine are refused, so that a
# typo gives an error and not a machine without memory. `weights.formats` has the same limit for numbers in untrusted
# files.
MAX_COUNT = 1 << 22
size, size_or_0 = _bounded_int(MAX_COUNT), _bounded_int(MAX_COUNT, minimum=0)
width = _bounded_int(MAX_COUNT, metavar="DIM")
pixels, pixels_or_0 = _bounded_int(1 << 14, metavar="PIXELS"), _bounded_int(1 << 14, minimum=0, metavar="PIXELS")
channel_count = _bounded_int(16)
worker_count, thread_count = _bounded_int(1024, minimum=0), _bounded_int(1024)
digit_count = _bounded_int(18, metavar="DIGITS")

# Finite numbers.
any_float = _bounded_float(lambda number: True, "a number")
positive_float = _bounded_float(lambda number: number > 0, "a number above 0")
non_negative_float = _bounded_float(lambda number: number >= 0, "a number, 0 or more")
frame_rate = _bounded_float(lambda number: 0 < number <= 1000, "a number above 0 and at most 1000", "HZ")
# PyTorch's timeouts cannot be much longer than two years.
timeout = _bounded_float(lambda number: 0 < number <= 1e6, "a number above 0 and at most 1e6", "MINUTES")
epoch_count = _bounded_float(lambda number: 0 < number <= 1e9, "a number above 0 and at most 1e9", "EPOCHS")
fraction = _bounded_float(lambda number: 0 <= number < 1, "a number from 0 to below 1", "FRACTION")
# Length of an average of the weights: the standard deviation of its profile as a fraction of the training. The limit
# is that of the plain mean, 1/sqrt(12); see `tandem.training.power_function`.
average_length = _bounded_float(lambda number: 0 < number <= 0.2886, "a number above 0 and at most 0.2886", "LENGTH")


@dataclass(frozen=True)
class Joined(Generic[T]):
    """Converter of values with a separator between them, such as "1,2", to a tuple.

    Args:
        metavar: The word for the values in --help.
        convert: Converts each value.
        count: The required number of values; None: any number, at least one.
        is_ascending: No value may be smaller than the one before it.
    """

    metavar: str
    separator: str
    convert: Callable[[str], T]
    count: int | None = None
    is_ascending: bool = False

    def __call__(self, text: str) -> tuple[T, ...]:
        parts = text.split(self.separator)
        if self.count is not None and len(parts) != self.count:
            expected = f"{self.count} values with {self.separator!r} between them"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        values: tuple[Any, ...] = tuple(self.convert(part) for part in parts)
        if self.is_ascending and list(values) != sorted(values):
            raise argparse.ArgumentTypeError(f"expected the smaller number first, got {quoted(text)}")
        return values

    def text(self, values: Iterable[T]) -> str:
        """These values as a config file holds them."""
        return self.separator.join(map(str, values))


class SidesConverter(Joined[int]):
    """Converter of a number of pixels, the side of squares, or HEIGHTxWIDTH: "256" -> 256, "256x384" -> (256, 384)."""

    def __call__(self, text: str) -> Any:
        if text.count(self.separator) > 1:
            raise argparse.ArgumentTypeError(f"expected a side, or HEIGHTxWIDTH, got {quoted(text)}")
        sides = super().__call__(text)
        return sides[0] if len(set(sides)) == 1 else sides


class WordsConverter(Joined[str]):
    """Converter of words with a separator between them, which stay one text."""

    def __call__(self, text: str) -> Any:
        return text


class Names:
    """Converter of "none" or a comma list of these names, upper or lower case, to a sorted tuple of unique names."""

    metavar = "NAME,..."
    separator = ","

    def __init__(self, *choices: str) -> None:
        self.choices = choices

    def __call__(self, text: str) -> tuple[str, ...]:
        names = {name.strip().lower() for name in text.split(self.separator)} - {""}
        unknown = names - {*self.choices, "none"}
        if unknown or not names or ("none" in names and len(names) > 1):
            hint = next(filter(None, (did_you_mean(name, self.choices) for name in sorted(unknown))), "")
            expected = f"none, or a comma list of {', '.join(self.choices)}"
            raise argparse.ArgumentTypeError(f"expected {expected}; got {text!r}{hint}")
        return tuple(sorted(names - {"none"}))

    def text(self, names: Iterable[str]) -> str:
        """These names as a config file holds them."""
        return self.separator.join(names) or "none"


def _check_template(text: str) -> str:
    if "{}" not in text:
        raise argparse.ArgumentTypeError(f"expected {{}} for the name in every sentence, got {text!r}")
    return text


sizes = Joined("N,...", ",", size_or_0)
epoch_counts = Joined("EPOCHS,...", ",", epoch_count)
two_fractions = Joined("B1,B2", ",", fraction, count=2)
# A smaller crop has few pixels, because frames are read at little more than the size that the model takes.
_area = _bounded_float(lambda number: 0.01 <= number <= 1, "a share of the area from 0.01 to 1")
area_range = Joined("MIN,MAX", ",", _area, count=2, is_ascending=True)
picture_sides = SidesConverter("SIDE|HEIGHTxWIDTH", "x", pixels)
templates = Joined("TEXT|...", "|", _check_template)
words = Joined("WORD,...", ",", str)
layer_names = WordsConverter("NAME[:N],...", ",", str)
# Updates, counted from 1, the last one included.
step_range = Joined("FIRST:LAST", ":", _from_1, count=2, is_ascending=True)


def number_or(word: str) -> Converter:
    """Converter for a number >= 0, or `word` in upper or lower case."""

    def convert(text: str) -> float | str:
        expected = f"{word}, or a number, 0 or more"
        return word if text.lower() == word else _parse_float(text, lambda number: number >= 0, expected)

    return Converter(f"{word}|NUMBER", convert)


PRECISIONS = ("fp32", "tf32", "bf16", "fp16")

# Names of flags in other trainers -> names here, of which the first that the script has is suggested.
_OTHER_NAMES = {
    "accumulate_grad_batches": ("grad_accum_steps",), "amp": ("precision",), "batch": ("batch_size",),
    "bf16": ("precision",), "checkpoint": ("init_from", "model"), "clip_grad": ("max_grad_norm",),
    "data": ("image_folder", "video_folder", "audio_data", "audio"), "ema": ("ema_decay",), "ema_rate": ("ema_decay",),
    "eval_every": ("validate_every_n_steps",), "fp16": ("precision",), "grad_clip": ("max_grad_norm",),
    "gradient_accumulation_steps": ("grad_accum_steps",), "gradient_clip_val": ("max_grad_norm",),
    "iterations": ("max_steps",), "log_interval": ("log_every_n_steps",), "lr": ("learning_rate",),
    "max_iters": ("max_steps",), "mixed_precision": ("precision",), "num_epochs": ("epochs",),
    "num_steps": ("max_steps",), "out_dir": ("output_dir", "output"), "outdir": ("output_dir", "output"),
    "overwrite": ("fresh",), "pretrained": ("init_from", "model"), "resolution": ("image_size", "image_sizes"),
    "results_folder": ("output_dir", "output"), "run_dir": ("output_dir", "output"),
    "save_every": ("save_every_n_steps",), "save_interval": ("save_every_n_steps",), "steps": ("max_steps",),
    "tf32": ("precision",),
    "use_ema": ("ema_decay",), "use_wandb": ("report_to",), "wandb": ("report_to",), "warmup": ("lr_warmup_steps",),
    "warmup_steps": ("lr_warmup_steps",), "wd": ("weight_decay",), "workers": ("num_workers",),
}  # fmt: skip
_DATA_NAMES = ("data_dir", "data_path", "dataset", "dataset_path", "train_data", "train_data_dir")
_OTHER_NAMES.update(dict.fromkeys(_DATA_NAMES, _OTHER_NAMES["data"]))
_NEAR = 0.66  # least ratio of difflib: one wrong letter in three


def did_you_mean(word: str, choices: Sequence[str]) -> str:
    """`"; did you mean x?"` for the choice that has this name in other trainers, begins with the word, or differs from
    it in a letter or two; `""` if there is none. Words may begin with dashes."""
    names_by_plain = {name.lstrip("-").replace("-", "_").lower(): name for name in reversed(choices)}
    plain = word.lstrip("-").replace("-", "_").lower()
    if synonyms := [name for name in _OTHER_NAMES.get(plain, ()) if name in names_by_plain]:
        return f"; did you mean {names_by_plain[synonyms[0]]}?"
    longer = [name for name in names_by_plain if len(plain) > 2 and name.startswith(plain)]
    # Of equally close names, such as fsq and lfq for fqs, one with the same letters comes first.
    matches = [name for name in names_by_plain if sorted(name) == sorted(plain)]
    matches = longer if len(longer) == 1 else matches or difflib.get_close_matches(plain, names_by_plain, 1, _NEAR)
    return f"; did you mean {names_by_plain[matches[0]]}?" if matches else ""


def choice_error(value: Any, choices: Iterable[Any]) -> str:
    """The text of the error about a value that is none of the choices."""
    words = [str(choice) for choice in choices]
    return f"expected one of {', '.join(words)}; got {quoted(str(value))}{did_you_mean(str(value), words)}"


def config_names(action: argparse.Action) -> list[str]:
    """Keys of a flag in a config file: its long names with underscores, in their order; `--no-x` is `x: false`."""
    is_negatable = isinstance(action, argparse.BooleanOptionalAction)
    return [
        option[2:].replace("-", "_")
        for option in action.option_strings
        if option.startswith("--") and not (is_negatable and option.startswith("--no-"))
    ]


def config_value(action: argparse.Action, value: Any) -> Any:
    """A flag's value, which may be of JSON's types, as a config file holds it: joined text for a flag that splits
    text."""
    if not isinstance(action.type, (Joined, Names)) or not isinstance(value, (list, tuple)):
        return value
    if action.nargs:
        return [action.type.text(element) if isinstance(element, (list, tuple)) else element for element in value]
    return action.type.text(value)


def format_flag(action: argparse.Action, value: Any) -> str:
    """A flag with a value as on a command line, such as "--dim 64"; "no --x" if the flag is to be left out."""
    flag = action.option_strings[0]
    if value is None or (value is False and not isinstance(action, argparse.BooleanOptionalAction)):
        return f"no {flag}"
    if isinstance(value, bool):
        return flag if value else f"--no-{flag[2:]}"
    return f"{flag} {format_value(action, value)}"


def format_value(action: argparse.Action, value: Any) -> str:
    """A value of a flag as on a command line; "" for None."""
    value = config_value(action, value)
    values = value if isinstance(value, list) else [value]
    return "" if value is None else " ".join(f"{x:g}" if isinstance(x, float) else str(x) for x in values)
