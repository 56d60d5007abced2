"""Gradient checkpointing (Chen et al. 2016, "Training deep nets with sublinear memory cost")."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from tandem.flops import repeated

Result = TypeVar("Result")


def recomputed(function: Callable[..., Result], *inputs: Any, when: bool) -> Result:
    """``function(*inputs)``; ``when`` and with a graph, of its activations only the inputs are kept for the backward
    pass, which calls it again: less memory, the same bits.

    The function may have modules among its inputs or be one; it must be deterministic, and must change nothing.
    """
    if when and torch.is_grad_enabled():
        # The compiler takes no contexts; of what it compiled, `FlopCounter` sees the second call too.
        contexts: dict[str, Any] = {}
        if not torch.compiler.is_compiling():
            contexts["context_fn"] = lambda: (nullcontext(), repeated())
        result: Result = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, **contexts)
        return result
    return function(*inputs)
