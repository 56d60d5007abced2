"""Checkpoints: what one is on the disk, and the thread that writes it while training goes on."""
