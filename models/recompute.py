"""Gradient checkpointing (Chen et al. 2016, "Training deep nets with sublinear memory cost")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


def recomputed(function: Callable[..., Result], *inputs: Any, when: bool) -> Result:
    """``function(*inputs)``; ``when`` and with a graph, of its activations only the inputs are kept for the backward
    pass, which calls it again: less memory, the same bits.

    The function may have modules among its inputs or be one; it must be deterministic, and must change nothing.
    """
    if when and torch.is_grad_enabled():
        result: Result = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
        return result
    return function(*inputs)
