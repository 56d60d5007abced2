"""The parts of every training script around its loop: arguments, clock, noise, checkpoints, metrics, tracking.

Nothing here starts or connects processes: collectives are passed in as callables. Import the modules by name, as
`from tandem.config.parser import ArgumentParser`: this file imports nothing, so that `--help` stays quick.
"""
