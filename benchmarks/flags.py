"""What flags of several benchmarks have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def names_of(choices: Collection[str]) -> Callable[[str], list[str]]:
    """The type of a flag that takes a comma list of some of these names; it gives them in the order of `choices`."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in choices]:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; there are {', '.join(choices)}")
        return [name for name in choices if name in names]

    return parse
