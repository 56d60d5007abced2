"""Read by every Python process of a job when it starts (benchmarks/launching.py). Imports take most of a start, and a
sixth of them was the search for garbage among what they leave, of which nothing is garbage."""

import gc

gc.set_threshold(100_000, 20, 100)
