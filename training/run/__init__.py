"""A run: its loop, folder, clock, trackers, pictures and checkpoints."""
