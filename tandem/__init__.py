"""Training scripts for the parts of generative models, with the same numbers on every backend."""

__version__ = "0.2.0"
