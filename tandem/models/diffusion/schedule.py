"""Noise schedules: a table of log SNR, from which everything else follows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.config.models.decoder import SCHEDULES
from tandem.devices import sum_dtype


def _linspace(start: float, end: float, timesteps: int) -> Tensor:
    return torch.linspace(start, end, timesteps, dtype=torch.float64)


def _cosine(timesteps: int) -> Tensor:
    """Betas of Nichol and Dhariwal 2021, eq. 17: 1 - f(t) / f(t - 1), f(t) = cos^2(pi / 2 (t / T + s) / (1 + s)), with
    s = 0.008."""
    signal = torch.cos((_linspace(0, 1, timesteps + 1) + 0.008) / 1.008 * math.pi / 2) ** 2
    return 1 - signal[1:] / signal[:-1]


# The betas of n levels go from _FIRST_BETA / n to _LAST_BETA / n: from 1e-4 to 0.02 for 1000 levels (Ho et al. 2020,
# section 4). "sigmoid" has betas along a logistic curve; it comes from DALLE2-pytorch, not from a paper.
_FIRST_BETA, _LAST_BETA = 0.1, 20.0

_BETAS: dict[str, Callable[[int], Tensor]] = {
    "cosine": _cosine,
    "linear": lambda n: _linspace(_FIRST_BETA, _LAST_BETA, n) / n,
    "sigmoid": lambda n: (_FIRST_BETA + (_LAST_BETA - _FIRST_BETA) * _linspace(-6, 6, n).sigmoid()) / n,
}


class Schedule:
    """T noise levels, from 0, the least noise, to T - 1. A noisy picture is x = alpha x0 + sigma noise.

    The table `log_snr` = log(alpha^2 / sigma^2), fp64 (T,), falls strictly and may end at -inf. Two families:
    variance preserving, alpha^2 = sigmoid(log_snr) and sigma^2 = 1 - alpha^2; and flow, alpha = 1 - sigma =
    sigmoid(log_snr / 2). Both forms are exact where alpha or sigma is near 0.
    """

    def __init__(self, log_snr: Tensor, *, is_flow: bool = False) -> None:
        self.log_snr, self.is_flow = log_snr, is_flow
        if is_flow:
            self.alpha, self.sigma = (log_snr / 2).sigmoid(), (-log_snr / 2).sigmoid()
        else:
            self.alpha, self.sigma = log_snr.sigmoid().sqrt(), (-log_snr).sigmoid().sqrt()
        self.ends_at_zero_snr = bool(self.alpha[-1] == 0)

    @classmethod
    def from_name(cls, name: str = "cosine", timesteps: int = 1000, *, zero_terminal_snr: bool = False) -> Schedule:
        """A schedule by its name.

        Args:
            name: One of SCHEDULES. "flow" has sigma = (t + 1) / T; the others are made from T values of beta.
            timesteps: T, at least 2.
            zero_terminal_snr: Shift and scale alpha so that the last is 0 and the first unchanged (Lin et al. 2023,
                Alg. 1). "flow" always ends at 0.

        Raises:
            ValueError: an unknown name, or fewer than 2 levels.
        """
        if name not in SCHEDULES:
            raise ValueError(f"noise schedule {name!r} does not exist: choose one of {', '.join(SCHEDULES)}")
        if timesteps < 2:
            raise ValueError(f"{timesteps} noise levels are too few: timesteps has to be 2 or more")
        if name == "flow":
            time = _linspace(1 / timesteps, 1, timesteps)
            return cls(2 * (torch.log1p(-time) - time.log()), is_flow=True)
        # A beta of 1 would make all later alphas 0.
        log_signal = torch.log1p(-_BETAS[name](timesteps).clamp_max(0.999)).cumsum(0)
        if zero_terminal_snr:
            alpha = (log_signal / 2).exp()
            log_signal = 2 * ((alpha - alpha[-1]) * (alpha[0] / (alpha[0] - alpha[-1]))).log()
        return cls(log_signal - (-torch.expm1(log_signal)).log())

    @property
    def timesteps(self) -> int:
        """T."""
        return len(self.log_snr)

    def to(self, device: torch.device | str) -> Schedule:
        """This schedule with its tables on another device, in fp32 if that has no fp64."""
        other, dtype = copy.copy(self), sum_dtype(torch.device(device))
        tables = (table.to(dtype).to(device) for table in (self.log_snr, self.alpha, self.sigma))
        other.log_snr, other.alpha, other.sigma = tables
        return other

    @property
    def betas(self) -> Tensor:
        """1 - alpha_t^2 / alpha_{t-1}^2, fp64 (T,), of a variance preserving schedule."""
        assert not self.is_flow, "a flow has no betas"
        return -torch.expm1(F.logsigmoid(self.log_snr).diff(prepend=self.log_snr.new_zeros(1)))

    def at(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """alpha and sigma of int64 levels t (b,); see `at_levels`."""
        return at_levels(self.alpha, t, like), at_levels(self.sigma, t, like)

    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """x = alpha x0 + sigma noise (b, c, h, w) at int64 levels t (b,); at least fp32."""
        alpha, sigma = self.at(t, x0)
        return alpha * x0 + sigma * noise


def at_levels(table: Tensor, t: Tensor, like: Tensor) -> Tensor:
    """Entries of a table (T,) for int64 levels t (b,): (b, 1, ...) with as many dimensions as `like`, in its dtype but
    at least fp32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return table[t].to(dtype).view(-1, *[1] * (like.ndim - 1))
