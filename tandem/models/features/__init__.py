"""Frozen networks of other people whose features losses and metrics compare."""
