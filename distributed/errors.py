"""The errors that end a run on purpose, each with a text for the user who started it."""

from __future__ import annotations

import re

# Places in C++ source, which Gloo's errors name, and the ends of Gloo's and Horovod's errors: mostly wrong guesses at
# causes.
_FOR_DEVELOPERS = re.compile(
    r"\[[^\[\]\s]+\.(?:cc|cpp|cu|h|hpp):\d+\][ \t]*|\s*This (?:is typically|was) caused by an? .*"
)


class UserMistake(ValueError):
    """One line: the value given, why it does not work and what to do. Every process raises the same text; the exit code
    is 2."""


class TrainingStopped(RuntimeError):
    """The run cannot go on (non-finite updates, a lost process); the exit code is 1.

    ``on_one_rank``: only this process raises it and prints its text; otherwise all processes raise it and the root
    prints it.
    """

    def __init__(self, text: str, *, on_one_rank: bool = False) -> None:
        super().__init__(text)
        self.on_one_rank = on_one_rank


def first_line(error: BaseException) -> str:
    """The first line of the error's text, without the parts for C++ developers; its type if it has no text."""
    text = _FOR_DEVELOPERS.sub("", str(error)).strip() or type(error).__name__
    return text.splitlines()[0].rstrip()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory is exhausted, on the CPU or on a GPU."""
    # PyTorch raises a plain RuntimeError if the CPU's memory is exhausted, or if a size overflows.
    phrases = ("not enough memory", "can't allocate memory", "out of memory", "Storage size calculation overflowed")
    return isinstance(error, MemoryError) or any(phrase in str(error) for phrase in phrases)
