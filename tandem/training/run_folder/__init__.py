"""The files of a run folder besides checkpoints."""
