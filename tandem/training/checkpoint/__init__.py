"""Checkpoints: their format on the disk (format.py), the copy of the state, and the thread that writes (store.py)."""
