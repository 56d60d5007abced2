"""The shapes of learning rates, temperatures and weights over a run, which a script calls by name.

``step`` is the number of an update, from 0. Standard library only.
"""

import math
from collections.abc import Callable, Sequence


def warmup_of(requested: int, total_steps: int) -> int:
    """Updates of warm-up: the requested number, but at most half of the run, so that a short run reaches its rate."""
    return min(requested, total_steps // 2)


#: The choices of --lr_schedule: the part of the run after the warm-up that is done -> the share of the highest rate.
SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: 0.5 + 0.5 * math.cos(math.pi * done),
}


def with_warmup(shape: str, step: int, total_steps: int, peak: float, warmup_steps: int, lowest: float = 0.0) -> float:
    """Linear up to ``peak`` over ``warmup_of`` updates, then along one of `SHAPES`, which ends with the run; where that
    is 0, the rate is the share ``lowest`` of the peak."""
    warmup = warmup_of(warmup_steps, total_steps)
    if step < warmup:
        return peak * ((step + 1) / warmup)
    done = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    return peak * (lowest + (1 - lowest) * SHAPES[shape](done))


def drops(epoch: float, at: Sequence[float] | None, factor: float = 0.1) -> float:
    """1, times ``factor`` for each number of epochs in ``at`` that has passed."""
    return float(factor ** sum(epoch >= drop for drop in at or ()))


def decay(step: int, start: float, factor: float, every: int = 100) -> float:
    """``start``, times ``factor`` after each of the updates 0, ``every``, 2 ``every``, ..."""
    return start * factor ** math.ceil(step / every)


def anneal(step: int, start: float, rate: float, lowest: float, every: int = 100) -> float:
    """``start``, times exp(-``rate`` x n) after each of the updates n = 0, ``every``, 2 ``every``, ..., but not below
    ``lowest``: the temperature of DALLE-pytorch, in closed form."""
    n = math.ceil(step / every)
    return max(start * math.exp(-(rate * every * n * (n - 1) / 2)), lowest)


def linear(step: int, steps: int, first: float, last: float) -> float:
    """From ``first`` to ``last`` along a line over ``steps`` updates, then ``last``; 0 steps: ``last``."""
    remaining = max(1 - step / steps, 0.0) if steps else 0.0
    return last + (first - last) * remaining
