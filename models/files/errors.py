"""Error messages about files from untrusted sources: one line each, without control characters."""

from __future__ import annotations

from tandem.files.reading import printable

_LONGEST_ERROR = 500


def one_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type if the message is empty."""
    lines = str(error).strip().splitlines()
    return printable(lines[0].strip()[:_LONGEST_ERROR]) if lines else type(error).__name__
