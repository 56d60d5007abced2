"""What can end a run on purpose, each with a text meant for the person who started it."""

from __future__ import annotations


class UserMistake(ValueError):
    """One line: what was got, why it cannot be, what to do. Every process raises the same text; the exit code is 2."""


class TrainingStopped(RuntimeError):
    """The run cannot go on (non-finite updates, a lost process); the exit code is 1.

    ``alone``: this process found out by itself and says so; else all processes raise it and the root speaks.
    """

    def __init__(self, text: str, *, alone: bool = False) -> None:
        super().__init__(text)
        self.alone = alone
