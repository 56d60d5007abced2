"""PyTorch's fully sharded data parallel: weights, gradients and moments are spread over the processes."""

from __future__ import annotations

from .backend import FSDPBackend

__all__ = ["FSDPBackend"]
