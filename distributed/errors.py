"""What can end a run on purpose, each with a text meant for the person who started it."""

from __future__ import annotations


class UserMistake(ValueError):
    """One line: what was got, why it cannot be, what to do. Every process raises the same text; the exit code is 2."""


class TrainingStopped(RuntimeError):
    """The run cannot go on (non-finite updates, a lost process). Every process raises it; the exit code is 1."""
