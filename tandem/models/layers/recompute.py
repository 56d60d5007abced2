"""Gradient checkpointing (Chen et al. 2016, "Training deep nets with sublinear memory cost")."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from tandem.flops import recomputation

Result = TypeVar("Result")


def recompute_in_backward(function: Callable[..., Result], *inputs: Any, when: bool) -> Result:
    """``function(*inputs)``. If ``when`` and gradients are enabled, only the inputs are kept for the backward pass,
    which calls the function again: less memory, the same bits.

    The function may be a module or have modules among its inputs; it must be deterministic and without side effects.
    """
    if when and torch.is_grad_enabled():
        # The compiler takes no contexts, so `FlopCounter` counts the second call of compiled functions, too.
        contexts: dict[str, Any] = {}
        if not torch.compiler.is_compiling():
            contexts["context_fn"] = lambda: (nullcontext(), recomputation())
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, **contexts)
    return function(*inputs)
