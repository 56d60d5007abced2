"""Learning rates as functions of the update. Standard library only."""

import math


def warmup_of(asked: int, total_steps: int) -> int:
    """Updates of warm-up: as many as are asked for, at most half of the run, so that a short one gets to its rate."""
    return min(asked, total_steps // 2)


def share_of_rate(step: int, total_steps: int, warmup_steps: int, lowest: float = 1.0) -> float:
    """Share of the highest learning rate at update ``step`` (from 0): linear over ``warmup_of`` updates, then along
    a cosine from 1 down to ``lowest``, which it reaches at the end of the run and keeps; 1: constant."""
    warmup = warmup_of(warmup_steps, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    done = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    return lowest + (1 - lowest) * (0.5 + 0.5 * math.cos(math.pi * done))
