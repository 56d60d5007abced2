"""Checkpoints: their format on the disk, and the thread that writes them while training goes on."""
