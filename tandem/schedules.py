"""Schedules of learning rates, temperatures and loss weights. ``step`` is the number of an update, from 0."""

import math
from collections.abc import Callable, Sequence


def limit_warmup(requested: int, total_steps: int) -> int:
    """Updates of warm-up: the requested number, but at most half of the run, so that a short run reaches its rate."""
    return min(requested, total_steps // 2)


#: The choices of --lr_schedule: progress of the run after the warm-up, 0 to 1 -> factor on the peak rate.
SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: 0.5 + 0.5 * math.cos(math.pi * progress),
}


def with_warmup(shape: str, step: int, total_steps: int, peak: float, warmup_steps: int, lowest: float = 0.0) -> float:
    """Linear up to ``peak`` during the warm-up (`limit_warmup`), then one of `SHAPES`, from ``peak`` to
    ``lowest`` x ``peak`` at the end of the run."""
    warmup = limit_warmup(warmup_steps, total_steps)
    if step < warmup:
        return peak * ((step + 1) / warmup)
    progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    return peak * (lowest + (1 - lowest) * SHAPES[shape](progress))


def drop_factor(epoch: float, drop_epochs: Sequence[float] | None) -> float:
    """0.1 to the power of the number of ``drop_epochs`` that have passed."""
    return float(0.1 ** sum(epoch >= drop for drop in drop_epochs or ()))


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
