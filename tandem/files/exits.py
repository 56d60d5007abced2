"""How the processes of all scripts end: their exit codes, the errors that stand for them, and the way out."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

FAILED = 1  # by no mistake of the user's: starting again may help
MISTAKE = 2  # of the user's, the same code as argparse's: starting again does not help
ASKED_TO_STOP = 75  # EX_TEMPFAIL of sysexits.h: run the same command again
INTERRUPTED = 130  # by Ctrl-C, without a save: what shells make of SIGINT


class CannotGoOn(RuntimeError):
    """What this process needs has failed, in one line: the exit code is ``FAILED``."""


class AskedToStop(Exception):
    """All processes are asked to stop here; whoever catches it saves what there is, and leaves."""


def leave(code: int, *, at_once: bool = False) -> NoReturn:
    """End this process with one of the codes above: no other line of the scripts ends one.

    ``at_once``: from any thread, without the interpreter's own exit, which waits for threads and other processes.
    """
    if at_once:
        os._exit(code)
    sys.exit(code)
