"""Pictures whose pixels are independent and normal: the best network is linear, and samples and losses have closed
forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem.models.diffusion.losses import prediction_target
from tandem.models.diffusion.sampling import Denoised
from tandem.models.diffusion.schedule import Schedule


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def prediction_of(objective: str, x0: Tensor, x: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """The prediction that means the clean picture x0, at the noisy picture x."""
    return prediction_target(objective, x0, (x - alpha * x0) / sigma, alpha, sigma)


class Gaussian:
    """Pixels of N(mean, deviation^2), and what is known of them at each noise level of a schedule."""

    def __init__(self, schedule: Schedule, deviation: float, mean: float = 0.0) -> None:
        self.schedule, self.deviation, self.mean = schedule, deviation, mean
        self.variance = schedule.alpha**2 * deviation**2 + schedule.sigma**2  # D_t of a noisy pixel, (T,)
        self.gain = schedule.alpha * deviation**2 / self.variance  # of the best estimate, (T,)
        self.floor = deviation**2 * schedule.sigma**2 / self.variance  # its squared error, (T,)
        before = torch.cat([torch.tensor([deviation**2]).double(), self.variance[:-1]])
        kept = schedule.alpha / torch.cat([torch.ones(1).double(), schedule.alpha[:-1]])
        # Var(x_{t-1} | x_t): of two normal numbers with covariance kept * before.
        self.reverse_variance = before - (kept * before) ** 2 / self.variance

    def estimate(self, x: Tensor, t: Tensor | int) -> Tensor:
        """The best estimate of clean pictures, given noisy ones x (b, c, h, w) at levels t."""
        gain, alpha = (table[t].view(-1, 1, 1, 1) for table in (self.gain, self.schedule.alpha))
        return self.mean + gain * (x - alpha * self.mean)

    def denoise(self, x: Tensor, t: int) -> Denoised:
        return Denoised(self.estimate(x, t))

    def network(self, objective: str) -> Callable[..., Tensor]:
        def predict(x: Tensor, times: Tensor, **conditions: Tensor) -> Tensor:
            alpha, sigma = self.schedule.at(times, x)
            return prediction_of(objective, self.estimate(x, times).to(x), x, alpha, sigma)

        return predict

    def shrinking(self, visited: Sequence[int]) -> float:
        """How much DDIM shrinks the distance from the mean, along levels from the noisiest to the clean picture."""
        alpha, sigma, variance = self.schedule.alpha, self.schedule.sigma, self.variance
        product = 1.0
        for t, s in zip(visited, [*visited[1:], None], strict=True):
            alpha_s, sigma_s = (1.0, 0.0) if s is None else (alpha[s].item(), sigma[s].item())
            product *= ((alpha_s * alpha[t] * self.deviation**2 + sigma_s * sigma[t]) / variance[t]).item()
        return product


def no_draw(name: str, step: int) -> Tensor:
    raise AssertionError(f"a deterministic sampler asked for noise {name} {step}")


class OnePixelEach:
    """Noise as unit vectors: pixel 0 holds the first noise, each further draw the next pixel. What a linear sampler
    makes of it are the weights of the noises, whose squares sum to the variance of its samples."""

    def __init__(self, draws: int) -> None:
        self.draws, self.asked = draws, list[tuple[str, int]]()
        self.first = self._unit(0)

    def _unit(self, pixel: int) -> Tensor:
        return torch.eye(self.draws + 1, dtype=torch.float64)[pixel].view(1, 1, 1, -1)

    def __call__(self, name: str, step: int) -> Tensor:
        self.asked.append((name, step))
        return self._unit(len(self.asked))


def uniform_levels(first: int, steps: int) -> list[int]:
    return [round(first * (1 - step / (steps - 1))) for step in range(steps)]
