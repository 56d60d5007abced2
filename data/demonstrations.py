"""The names by which generated sets of samples are opened: demo:shapes, demo:tones:100."""

from __future__ import annotations

PREFIX = "demo:"
DEFAULT_SIZE = 4096


def demonstration_size(spec: str, name: str, noun: str) -> int | None:
    """How many samples the set `demo:<name>` or `demo:<name>:<number>` holds; None where `spec` names no demonstration.
    `noun` is what messages call the samples.

    Raises ValueError, in one line, where it names another demonstration or no number above 0.
    """
    if not spec.startswith(PREFIX):
        return None
    said, _, number = spec.removeprefix(PREFIX).partition(":")
    if said != name:
        raise ValueError(f"there is no demonstration set {spec!r}: the only one is {PREFIX}{name}")
    if number == "":
        return DEFAULT_SIZE
    if not (number.isascii() and number.isdigit() and int(number) > 0):
        raise ValueError(
            f"{spec!r} asks for {number!r} {noun}, which is no positive number: write e.g. "
            f"{PREFIX}{name}:{DEFAULT_SIZE}"
        )
    return int(number)
