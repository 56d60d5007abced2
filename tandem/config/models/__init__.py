"""Configurations of the models, as dataclasses: nothing here imports PyTorch."""
