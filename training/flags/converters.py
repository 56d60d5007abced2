"""Converters from the text of a flag to its value: argparse types whose errors say what was expected."""

import argparse
import decimal
import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


# Every number of 18 digits fits into 64 bits. The limit also keeps int() from writing out 1e999999999.
_LARGEST_NUMBER = 10**18 - 1
_LONGEST_QUOTE = 40


def _whole_number(text: str, minimum: int, expected: str, maximum: int = _LARGEST_NUMBER) -> int:
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


def _up_to(maximum: int, minimum: int = 1) -> Callable[[str], int]:
    expected = f"a whole number from {minimum} to {maximum}"
    return partial(_whole_number, minimum=minimum, expected=expected, maximum=maximum)


def _number(text: str, accepts: Callable[[float], bool], expected: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and accepts(number)):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {quoted(text)}")
    return number


# Whole numbers; `1_000`, `1e6` and `8.0` are accepted.
positive_int = partial(_whole_number, minimum=1, expected="a whole number above 0")
non_negative_int = partial(_whole_number, minimum=0, expected="a whole number, 0 or more")

# Whole numbers of what takes memory or time for each one. They are refused beyond what any machine has room for, so
# that a slip of the keyboard gets a line and not a machine without memory. `models.files` has the same limit for the
# numbers in strangers' files.
MOST = 1 << 22
size, size_or_0 = _up_to(MOST), _up_to(MOST, minimum=0)
pixels, pixels_or_0 = _up_to(1 << 14), _up_to(1 << 14, minimum=0)
worker_count, thread_count = _up_to(1024, minimum=0), _up_to(1024)
digit_count = _up_to(18)

# Finite numbers.
positive_float = partial(_number, accepts=lambda number: number > 0, expected="a number above 0")
non_negative_float = partial(_number, accepts=lambda number: number >= 0, expected="a number, 0 or more")
frame_rate = partial(_number, accepts=lambda number: 0 < number <= 1000, expected="a number above 0 and at most 1000")
epoch_count = partial(_number, accepts=lambda number: 0 < number <= 1e9, expected="a number above 0 and at most 1e9")
fraction = partial(_number, accepts=lambda number: 0 <= number < 1, expected="a number from 0 to below 1")
# 0.2886 is the length of the plain mean, see `training.profiles`.
average_length = partial(
    _number, accepts=lambda number: 0 < number <= 0.2886, expected="a number above 0 and at most 0.2886"
)


class Joined(Generic[T]):
    """Converter of values with a separator between them, such as "1,2", to a tuple.

    Args:
        count: How many values there must be; None: any number, at least one.
    """

    def __init__(self, separator: str, convert: Callable[[str], T], count: int | None = None) -> None:
        self._separator, self._convert, self._count = separator, convert, count

    def __call__(self, text: str) -> tuple[T, ...]:
        parts = text.split(self._separator)
        if self._count is not None and len(parts) != self._count:
            expected = f"{self._count} values with {self._separator!r} between them"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return tuple(self._convert(part) for part in parts)

    def text(self, values: Iterable[T]) -> str:
        """What a config file says for these values."""
        return self._separator.join(map(str, values))


class Names:
    """Converter of a comma list out of `known`, in any case, or "none", to a tuple: sorted, each name once."""

    def __init__(self, *known: str) -> None:
        self._known = known

    def __call__(self, text: str) -> tuple[str, ...]:
        names = {name.strip().lower() for name in text.split(",")} - {""}
        unknown = names - {*self._known, "none"}
        if unknown or not names or ("none" in names and len(names) > 1):
            raise argparse.ArgumentTypeError(
                f"expected none, or a comma list of {', '.join(self._known)}; got {text!r}"
            )
        return tuple(sorted(names - {"none"}))

    def text(self, names: Iterable[str]) -> str:
        """What a config file says for these names."""
        return ",".join(names) or "none"


def _template(text: str) -> str:
    if "{}" not in text:
        raise argparse.ArgumentTypeError(f"expected {{}} for the name in every sentence, got {text!r}")
    return text


sizes = Joined(",", size_or_0)
two_fractions = Joined(",", fraction, count=2)
templates = Joined("|", _template)


def number_or(word: str) -> Callable[[str], float | str]:
    """Converter for a number >= 0, or `word` in any case."""

    def convert(text: str) -> float | str:
        expected = f"{word}, or a number, 0 or more"
        return word if text.lower() == word else _number(text, lambda number: number >= 0, expected)

    return convert


def nearest(word: str, known: Sequence[str]) -> str:
    """`"; did you mean x?"` for the most similar known word, or `""` if none is similar."""
    matches = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
