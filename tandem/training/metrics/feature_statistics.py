"""Statistics of features for FID, FVD and the inception score of evaluate.py, with the same bits on any number of
processes: each term is first rounded to a grid on which float64 sums are exact, so that their order does not matter."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tandem.devices import double, fp64_device

from .averages import AllReduce, identity
from .fid import FrechetStatistics, Gaussian

# Steps of the grids. Features are about 1; sums of their products are exact for two million samples, as are the sums of
# probabilities.
_FEATURE_STEP, _PROBABILITY_STEP = 2.0**-16, 2.0**-32


class FeatureStatistics:
    """Mean and covariance of a network's features of samples, and their inception score.

    Args:
        network: Samples in [0, 1] -> vectors (b, dim), which are rounded to multiples of 2^-16: that adds 2e-11 to each
            variance. If it has `logits`, as `Inception`, there is an inception score.
    """

    def __init__(self, network: Callable[[Tensor], Tensor], dim: int, device: torch.device | str = "cpu") -> None:
        self._network, self._statistics = network, FrechetStatistics(dim, device)
        self._logits = getattr(network, "logits", None)
        # Number of samples, sum of p log p over samples and classes, and the sum of p of each of the 1008 classes.
        self._sums = torch.zeros(2 + 1008, dtype=torch.float64, device=fp64_device(device))

    def add(self, samples: Tensor) -> None:
        """Add samples in [0, 1] on the device of the network."""
        features = self._network(samples)
        self._statistics.add((double(features) / _FEATURE_STEP).round() * _FEATURE_STEP)
        if self._logits:
            p = double(self._logits(features)).softmax(1)
            terms = torch.cat([torch.ones_like(p[:, :1]), torch.special.xlogy(p, p).sum(1, keepdim=True), p], dim=1)
            self._sums += ((terms / _PROBABILITY_STEP).round() * _PROBABILITY_STEP).sum(0)

    def result(self, all_reduce: AllReduce = identity) -> tuple[Gaussian, dict[str, float]]:
        """The distribution of the features, on the CPU, and `inception_score` if there is one: exp E KL(p(class |
        sample) || p(class)) over all samples at once (Salimans et al. 2016), from 1 to 1008. Collective.

        Raises:
            ValueError: fewer than 2 samples in all.
        """
        statistics = Gaussian(*(statistic.cpu() for statistic in self._statistics.result(all_reduce)))
        count, sum_p_log_p, *sums = all_reduce(self._sums.clone()).tolist()
        shares = [p / count for p in sums if p]
        divergence = sum_p_log_p / count - math.fsum(p * math.log(p) for p in shares) if shares else 0.0
        return statistics, {"inception_score": math.exp(divergence)} if self._logits else {}
