"""Sums over features that are the same bits in any order, and so for any number of processes: what is added is rounded
to a grid first, on which float64 adds without error."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .averages import AllReduce, no_reduce

# Features are of the size of 1, and the sums of their products exact for two million samples; so are probabilities.
_FEATURE, _PROBABILITY = 2.0**-16, 2.0**-32


def on_grid(features: Tensor) -> Tensor:
    """Feature vectors (b, d), rounded to multiples of 2^-16, float64, for `FrechetStatistics`: it adds 2e-11 to each
    variance."""
    return (features.double() / _FEATURE).round() * _FEATURE


class InceptionScore:
    """The inception score of images (Salimans et al. 2016), exp E KL(p(class | image) || p(class)), over all of them at
    once. Values that are published as a mean over ten parts of the images are a little lower.

    Args:
        logits: Features (b, d) -> logits of classes (b, 1008), such as `Inception.logits`.
    """

    def __init__(self, logits: Callable[[Tensor], Tensor], device: torch.device | str = "cpu") -> None:
        self._logits = logits
        self._sums = torch.zeros(2 + 1008, dtype=torch.float64, device=device)  # images, sum of p log p, and sums of p

    def add(self, features: Tensor) -> None:
        """Add the features of some images (b, d)."""
        p = self._logits(features).double().softmax(1)
        terms = torch.cat([torch.ones_like(p[:, :1]), torch.special.xlogy(p, p).sum(1, keepdim=True), p], dim=1)
        self._sums += ((terms / _PROBABILITY).round() * _PROBABILITY).sum(0)

    def result(self, all_reduce: AllReduce = no_reduce) -> float:
        """The score over all processes, from 1 to 1008. Collective: one all-reduce."""
        count, entropy, *classes = all_reduce(self._sums.clone()).tolist()
        return math.exp(entropy / count - math.fsum(p / count * math.log(p / count) for p in classes if p))
