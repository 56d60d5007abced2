"""DeepSpeed: the backend, its engine, the JSON that configures it, and its sharded state."""

from __future__ import annotations

from .backend import DeepSpeedBackend

__all__ = ["DeepSpeedBackend"]
