"""The exit codes of all scripts, and the error of a run that cannot go on."""

from __future__ import annotations

FAILED = 1  # by no mistake of the user's: starting again may help
MISTAKE = 2  # of the user's, the same code as argparse's: starting again does not help
ASKED_TO_STOP = 75  # EX_TEMPFAIL of sysexits.h: run the same command again


class CannotGoOn(RuntimeError):
    """What this process needs has failed, in one line: the exit code is ``FAILED``."""
