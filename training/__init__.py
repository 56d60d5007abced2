"""What every training script needs around its loop: arguments, clock, noise, checkpoints, metrics, tracking.

Nothing here knows of processes: collectives come in as callables. Import the modules by name, as
`from training.flags.parser import ArgumentParser`: this file imports nothing, so that `--help` stays quick.
"""
