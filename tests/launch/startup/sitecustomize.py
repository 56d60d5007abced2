"""Read by every Python process of a job when it starts (launching.py). Imports take most of a start, and looking for
garbage among what they leave, of which nothing is garbage, took a sixth of them."""

import gc

gc.set_threshold(100_000, 20, 100)
