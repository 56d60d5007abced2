"""Learned variances of the reverse steps, and the variational bound that trains them (Nichol and Dhariwal 2021)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .schedule import Schedule, at_levels


def variance_fraction(channels: Tensor) -> Tensor:
    """The network's output for the variance -> fraction: 0.5 for the output 0, 0 and 1 for -1 and 1."""
    return (channels + 1) / 2


class LearnedVariance:
    """The reverse step from level t to t - 1 has the log variance (1 - f) log b~ + f log beta, with f per pixel.

    b~ is the variance of the step if x0 is known, beta that of the forward step; with r = SNR_t / SNR_{t-1},
    b~ = sigma_{t-1}^2 (1 - r) and beta = sigma_t^2 (1 - r), for both families of schedules (Kingma et al. 2021,
    appendix A). The step from level 0 ends at the clean picture, where b~ is 0: its logarithm is replaced by that of
    level 1. Tables are fp64 (T,) on the schedule's device.
    """

    def __init__(self, schedule: Schedule) -> None:
        clean, log_snr = schedule.log_snr.new_ones(1), schedule.log_snr
        snr_drop = torch.cat([clean, -torch.expm1(log_snr.diff())])  # 1 - r; the clean picture has infinite SNR
        previous_sigma = torch.cat([0 * clean, schedule.sigma[:-1]])
        small = (previous_sigma.square() * snr_drop).log()
        self.log_small = torch.cat([small[1:2], small[1:]])
        self.log_large = (schedule.sigma.square() * snr_drop).log()
        # The coefficient of x0 in the mean of the step.
        self._x0_coefficient = torch.cat([clean, schedule.alpha[:-1]]) * snr_drop

    def log_variance(self, fraction: Tensor, t: Tensor) -> Tensor:
        """Log variance (b, c, h, w) of the steps from levels t, int64 (b,)."""
        small, large = (at_levels(table, t, fraction) for table in (self.log_small, self.log_large))
        return small + fraction * (large - small)

    def bits(self, x0: Tensor, x_start: Tensor, fraction: Tensor, t: Tensor) -> Tensor:
        """The term of the variational bound of levels t, int64 (b,), in bits per pixel and channel: (b,).

        For t > 0 the KL divergence of the modelled step from the step that knows x0; for t = 0 minus the log likelihood
        of x0, whose values have 256 steps in [-1, 1]. The mean is detached: only the variance learns from it.

        Args:
            x0: Clean pictures (b, c, h, w).
            x_start: The network's estimates of them.
            fraction: f of this class, (b, c, h, w).
        """
        log_variance = self.log_variance(fraction, t)
        is_first = (t == 0).view(-1, *[1] * (x0.ndim - 1))
        x_start = x_start.detach()
        difference = at_levels(self._x0_coefficient, t, fraction) * (x0 - x_start)
        ratio = at_levels(self.log_small, t, fraction) - log_variance
        kl = (torch.expm1(ratio) - ratio + difference.square() * (-log_variance).exp()) / 2
        nll = -log_likelihood(x0, x_start, log_variance)
        return torch.where(is_first, nll, kl).flatten(1).mean(1) / math.log(2)


def log_likelihood(x0: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """Log probability of values k / 127.5 - 1, k in 0..255, under a normal distribution that is cut into 256 bins, of
    which the first and the last have no outer edge (Ho et al. 2020, eq. 13). Nats, elementwise; finite in far tails."""
    scale = (-log_variance / 2).exp()
    # In fp32, torch's gradient of log_ndtr is wrong beyond some thousand standard deviations, and infinite further out;
    # an infinite number makes the gradient NaN even where torch.where does not select it.
    centre, half = ((x0 - mean) * scale).clamp(-2000, 2000), scale / 255
    is_first, is_last, is_above = x0 < -1 + 1 / 255, x0 > 1 - 1 / 255, centre > 0
    # Use the smaller of the two tails, where probabilities do not cancel: above the mean, mirror everything.
    centre = -centre.abs()
    low_is_open = torch.where(is_above, is_last, is_first)
    high_is_open = torch.where(is_above, is_first, is_last)
    log_high = torch.special.log_ndtr(centre + half).masked_fill(high_is_open, 0.0)
    log_ratio = (torch.special.log_ndtr(centre - half) - log_high).masked_fill(low_is_open, -torch.inf)
    return log_high + torch.log1p(-log_ratio.exp())
