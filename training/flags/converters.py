"""Converters from the text of a flag to its value: argparse types whose errors say what was expected."""

import argparse
import decimal
import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


def _whole_number(text: str, minimum: int, expected: str) -> int:
    try:
        number = decimal.Decimal(text)
    except decimal.InvalidOperation:
        number = decimal.Decimal("nan")
    # Every number of 18 digits fits into 64 bits. The limit also keeps int() from writing out 1e999999999.
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


# Whole numbers; `1_000`, `1e6` and `8.0` are accepted.
positive_int = partial(_whole_number, minimum=1, expected="a whole number above 0")
non_negative_int = partial(_whole_number, minimum=0, expected="a whole number, 0 or more")

# Finite numbers.
positive_float = partial(_number, accepts=lambda number: number > 0, expected="a number above 0")
non_negative_float = partial(_number, accepts=lambda number: number >= 0, expected="a number, 0 or more")
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


whole_numbers = Joined(",", non_negative_int)
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
