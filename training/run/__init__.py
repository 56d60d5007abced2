"""A run: its loop, folder, clock, trackers, pictures and checkpoints."""

ASKED_TO_STOP = 75  # exit code EX_TEMPFAIL of sysexits.h: run the same command again
NOT_SAVED = 1  # exit code of a run whose last checkpoint or model could not be written
