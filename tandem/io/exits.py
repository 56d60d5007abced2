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
    """One line about a failure that is no mistake of the user, such as a full disk. Python's own exit code for it is
    ``FAILED``."""


class Ended(Exception):
    """The run ends on all processes. The reason has been printed; the script exits with ``code``."""

    code: int


class Failed(Ended):
    """The run failed, not by a mistake of the user."""

    code = FAILED


class AskedToStop(Ended):
    """A signal asked the run to stop. The training loop catches it, saves a checkpoint and raises it again."""

    code = ASKED_TO_STOP


@contextmanager
def exit_codes(
    error: Callable[[str], NoReturn], mistakes: type[Exception] | tuple[type[Exception], ...] = (ValueError, OSError)
) -> Iterator[None]:
    """A context that ends this process with the exit code of an error that is raised inside it.

    Args:
        error: Ends the process with one line about a mistake of the user, as ``argparse.ArgumentParser.error`` does.
        mistakes: The types of errors that are such mistakes.
    """
    try:
        yield
    except Ended as end:
        exit_process(end.code)
    except KeyboardInterrupt:
        exit_process(INTERRUPTED)
    except mistakes as mistake:
        error(str(mistake))


def exit_process(code: int, *, at_once: bool = False) -> NoReturn:
    """End this process with one of the codes above; scripts end processes only by it.

    ``at_once``: from any thread, without the interpreter's exit, which waits for threads and child processes.
    """
    if at_once:
        os._exit(code)
    sys.exit(code)
