"""How the processes of all scripts end: their exit codes and the errors for them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

FAILED = 1  # not by a mistake of the user: starting again may help
MISTAKE = 2  # of the user, argparse's code: starting again does not help
ASKED_TO_STOP = 75  # EX_TEMPFAIL of sysexits.h: run the same command again
INTERRUPTED = 130  # by Ctrl-C, without a save: the code of shells for SIGINT


class CannotGoOn(RuntimeError):
    """Something that this process needs has failed, in one line; the exit code is ``FAILED``."""


class Ended(Exception):
    """All processes end here and have reported why; each only has to exit with ``code``."""

    code: int


class Failed(Ended):
    """Not by a mistake of the user."""

    code = FAILED


class AskedToStop(Ended):
    """The handler saves the state and raises it again."""

    code = ASKED_TO_STOP


@contextmanager
def exit_codes(
    error: Callable[[str], NoReturn], mistakes: type[Exception] | tuple[type[Exception], ...] = (ValueError, OSError)
) -> Iterator[None]:
    """Errors of a script inside the context end this process.

    Args:
        error: Ends the process with one line about a mistake of the user, as ``argparse.ArgumentParser.error`` does.
        mistakes: The types of errors that are such mistakes.
    """
    try:
        yield
    except Ended as end:
        leave(end.code)
    except KeyboardInterrupt:
        leave(INTERRUPTED)
    except mistakes as mistake:
        error(str(mistake))


def leave(code: int, *, at_once: bool = False) -> NoReturn:
    """End this process with one of the codes above; scripts end processes only by it.

    ``at_once``: from any thread, without the interpreter's exit, which waits for threads and child processes.
    """
    if at_once:
        os._exit(code)
    sys.exit(code)
