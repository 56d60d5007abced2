"""What the text of a flag stands for: argparse types whose errors say what was expected."""

import argparse
import decimal
import math
from collections.abc import Callable


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


def whole_numbers(text: str) -> str:
    """A comma list of whole numbers >= 0, returned as "a,b"."""
    return ",".join(str(non_negative_int(part)) for part in text.split(","))


def two_fractions(text: str) -> str:
    """Two numbers in [0, 1), returned as "a,b"."""
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"expected two numbers with a comma between them, got {text!r}")
    return ",".join(str(fraction(part)) for part in parts)


def templates_with_a_gap(text: str) -> str:
    """Sentences between `|`, each with a {} in it, returned as they are."""
    for sentence in text.split("|"):
        if "{}" not in sentence:
            raise argparse.ArgumentTypeError(f"expected {{}} for the name in every sentence, got {sentence!r}")
    return text


def number_or(word: str) -> Callable[[str], float | str]:
    """Converter for a number >= 0, or `word` in any case."""

    def convert(text: str) -> float | str:
        expected = f"{word}, or a number, 0 or more"
        return word if text.lower() == word else _number(text, lambda number: number >= 0, expected)

    return convert


def names_of(*known: str) -> Callable[[str], str]:
    """Converter for a comma list out of `known`, any case, or `none`: returned sorted, without doubles, as "a,b"."""

    def convert(text: str) -> str:
        names = {name.strip().lower() for name in text.split(",")} - {""}
        unknown = sorted(names - {*known, "none"})
        if unknown or not names or ("none" in names and len(names) > 1):
            raise argparse.ArgumentTypeError(f"expected none, or a comma list of {', '.join(known)}; got {text!r}")
        return ",".join(sorted(names))

    return convert
