"""Data sets, the order of samples, and the streams of batches that the scripts train on: see `data.sets`."""
