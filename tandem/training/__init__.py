"""What the training scripts have in common: the loop (loop.py), the run (run.py), losses, metrics, logs, checkpoints.

The metrics are also those of evaluate.py. Nothing here starts or connects processes, which `tandem.launch` does. This
file imports nothing, so that `--help` stays quick.
"""
