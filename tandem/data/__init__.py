"""Data sets, the order of samples, and the streams of batches that the scripts train on: see `tandem.data.sets`."""
