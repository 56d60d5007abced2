"""Counts floating point operations while they run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_IS_REPEATED = ContextVar("_IS_REPEATED", default=False)


@contextmanager
def recomputation() -> Iterator[None]:
    """Context for operations that an update repeats to save memory: `FlopCounter` leaves them out."""
    token = _IS_REPEATED.set(True)
    try:
        yield
    finally:
        _IS_REPEATED.reset(token)


class FlopCounter(TorchDispatchMode):
    """Context that counts the operations of matrix products, convolutions and attention, backward passes included, by
    the formulas of `torch.utils.flop_counter`. (PyTorch's own `FlopCounterMode` prevents torch.compile from compiling
    anything inside of it.) The kernels are the same as without the context, and so are the bits of the results. In a
    compiled model, library kernels are counted, but no generated ones, such as products of vectors. `flops` is NaN if a
    formula fails for one of the calls."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # takes 0.3 s

        super().__init__()
        self._formulas: Any = flop_registry
        self.flops: float = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether torch.compile works inside of this mode as it does without."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = self._formulas.get(getattr(func, "_overloadpacket", None))
        if formula is not None and not _IS_REPEATED.get():
            try:
                self.flops += formula(*args, **(kwargs or {}), out_val=out)
            except Exception:  # formulas assert shapes: no run may end because of a figure
                self.flops = math.nan
        return out
