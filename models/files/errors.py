"""Error messages about files from anywhere: one line each, with nothing that a terminal would obey."""

from __future__ import annotations

from pathlib import Path

_LONGEST_ERROR = 500


def one_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type where the message is empty."""
    lines = str(error).strip().splitlines()
    return printable(lines[0].strip()[:_LONGEST_ERROR]) if lines else type(error).__name__


def printable(text: str) -> str:
    """Text that may quote a file, with ``?`` for every control character: a file must not move the cursor."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def regular(path: Path) -> Path:
    """``path``, or a ValueError where it is a device or a pipe: reading it may never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path.name} is not a regular file")
    return path
