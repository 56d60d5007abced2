"""A run: its loop, folder, clock, trackers, pictures and checkpoints."""

from tandem.files.exits import ASKED_TO_STOP as ASKED_TO_STOP
from tandem.files.exits import FAILED

NOT_SAVED = FAILED  # exit code of a run whose last checkpoint or model could not be written
