"""How the processes of all scripts end: their exit codes, the errors that stand for them, and the way out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

FAILED = 1  # by no mistake of the user's: starting again may help
MISTAKE = 2  # of the user's, the same code as argparse's: starting again does not help
ASKED_TO_STOP = 75  # EX_TEMPFAIL of sysexits.h: run the same command again
INTERRUPTED = 130  # by Ctrl-C, without a save: what shells make of SIGINT


class CannotGoOn(RuntimeError):
    """What this process needs has failed, in one line: the exit code is ``FAILED``."""


class Ended(Exception):
    """The work ends here, on all processes, which have said why: nothing is left to do but to exit with ``code``."""

    code: int


class Failed(Ended):
    """By no mistake of the user's."""

    code = FAILED


class AskedToStop(Ended):
    """Whoever catches it saves what there is, and raises it again."""

    code = ASKED_TO_STOP


@contextmanager
def exit_codes(
    error: Callable[[str], NoReturn], mistakes: type[Exception] | tuple[type[Exception], ...] = (ValueError, OSError)
) -> Iterator[None]:
    """What the work of a script raises inside becomes the end of this process.

    Args:
        error: Ends it with one line about a mistake of the user's, as ``argparse.ArgumentParser.error`` does.
        mistakes: Errors that are such mistakes.
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
    """End this process with one of the codes above: no other line of the scripts ends one.

    ``at_once``: from any thread, without the interpreter's own exit, which waits for threads and other processes.
    """
    if at_once:
        os._exit(code)
    sys.exit(code)
