"""Random numbers of the training of a diffusion model, and losses by noise level.

A draw is a function of (seed, name of the network, step, position in the global batch), and never of processes,
micro-batches or the other networks that are trained beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..measures.averages import AllReduce, no_reduce
from ..noise import Noise

TIME_SAMPLINGS = ("uniform", "logit_normal")


@dataclass(frozen=True)
class LowresDraws:
    """How low-resolution pictures are made worse in training."""

    timesteps: int = 0  # noise levels, drawn uniformly; 0 adds no noise
    blur_prob: float = 0.5  # 0: none is blurred
    blur_sigma: tuple[float, float] = (0.6, 0.6)  # least and greatest, in pixels, drawn uniformly


class DiffusionDraws:
    """Draws for the losses of one network.

    Args:
        seed: Seed of the run.
        name: Name of the network; those of different names are independent.
        timesteps: T, number of noise levels.
        image_drop: Probability of dropping the image embedding; None if the network has none.
        text_drop: The same for the text.
        time_sampling: "uniform", or "logit_normal": t = sigmoid(mean + std n), n standard normal, 1 the most noise
            (Esser et al. 2024, section 3.1).
        logit_normal: Mean and standard deviation of "logit_normal".
        stratified: Times are (pi(position) + u) / batch_size quantiles, with a permutation pi of the global batch that
            changes with the step and u uniform in [0, 1). So each batch has one time in each of batch_size strata, and
            the loss hardly varies through the choice of times (after Kingma et al. 2021, appendix I.1).
        lowres: If the network sees low-resolution pictures.
        device: Where noise is drawn, and where all draws are put. Scalars are the same on every device.

    Raises:
        ValueError: an unknown time_sampling, or a standard deviation that is not positive.
    """

    def __init__(
        self,
        seed: int,
        name: str,
        timesteps: int,
        *,
        image_drop: float | None = None,
        text_drop: float | None = None,
        time_sampling: str = "uniform",
        logit_normal: tuple[float, float] = (0.0, 1.0),
        stratified: bool = True,
        lowres: LowresDraws | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if time_sampling not in TIME_SAMPLINGS:
            raise ValueError(f"time sampling {time_sampling!r} does not exist: choose {' or '.join(TIME_SAMPLINGS)}")
        if not logit_normal[1] > 0:
            raise ValueError(f"the standard deviation {logit_normal[1]:g} of logit_normal is not above 0")
        self._seed, self._name, self._timesteps = seed, name, timesteps
        self._drops = {"keep_image": image_drop, "keep_text": text_drop}
        self._stratified, self._lowres, self._device = stratified, lowres, device
        self._logit = logit_normal if time_sampling == "logit_normal" else None

    def __call__(
        self,
        step: int,
        positions: Sequence[int],
        batch_size: int,
        shape: Sequence[int],
        lowres_shape: Sequence[int] | None = None,
    ) -> dict[str, Tensor]:
        """Draws of an update, by the names of the arguments of `models.diffusion.DiffusionLoss`, and
        "blur_sigma" of `models.Decoder.training_pictures`.

        Args:
            step: Completed updates.
            positions: Places of the b pictures in the global batch, in 0..batch_size - 1.
            shape: (c, h, w) of the pictures.
            lowres_shape: (c, h, w) of the low-resolution pictures.
        """
        return self._draw("", step, positions, batch_size, shape, lowres_shape)

    def fixed(
        self, positions: Sequence[int], total: int, shape: Sequence[int], lowres_shape: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        """Draws for validation, the same at every step: times stratified over all `total` pictures of the split, whose
        numbers are the positions; no condition is dropped."""
        draws = self._draw("/valid", 0, positions, total, shape, lowres_shape)
        certain = {name: torch.ones_like(draw) for name, draw in draws.items() if draw.dtype == torch.bool}
        return {**draws, **certain}

    def _draw(
        self,
        use: str,
        step: int,
        positions: Sequence[int],
        batch_size: int,
        shape: Sequence[int],
        lowres_shape: Sequence[int] | None,
    ) -> dict[str, Tensor]:
        def noise(draw: str) -> Noise:
            return Noise(self._seed, f"diffusion/{self._name}{use}/{draw}")

        def uniform(draw: str) -> Tensor:
            return noise(draw).uniform(step, positions, ()).double()

        def between(draw: str, low: float, high: float) -> Tensor:
            return low + (high - low) * uniform(draw)

        quantiles = uniform("times")
        if self._stratified:
            permutation = np.random.Generator(np.random.Philox(key=noise("strata").seed_of(step, 0)))
            strata = torch.from_numpy(permutation.permutation(batch_size))[list(positions)]
            quantiles = (strata + quantiles) / batch_size
        draws = {"times": self._levels(quantiles)}
        draws |= {name: uniform(name) >= drop for name, drop in self._drops.items() if drop is not None}
        if self._lowres:
            if self._lowres.blur_prob:
                is_blurred = uniform("blur") < self._lowres.blur_prob
                draws["blur_sigma"] = (between("blur_sigma", *self._lowres.blur_sigma) * is_blurred).float()
            if self._lowres.timesteps:
                draws["lowres_time"] = between("lowres_time", 0, self._lowres.timesteps).long()
        draws = {name: draw.to(self._device, non_blocking=True) for name, draw in draws.items()}
        draws["noise"] = noise("noise").normal(step, positions, shape, self._device)
        if "lowres_time" in draws:
            assert lowres_shape is not None
            draws["lowres_noise"] = noise("lowres_noise").normal(step, positions, lowres_shape, self._device)
        return draws

    def _levels(self, quantiles: Tensor) -> Tensor:
        """int64 levels at fp64 quantiles in [0, 1) of the distribution of times."""
        times = quantiles
        if self._logit:
            mean, deviation = self._logit
            times = (mean + deviation * torch.special.ndtri(quantiles)).sigmoid()
        return (times * self._timesteps).long().clamp_max(self._timesteps - 1)

    def losses_by_noise(self) -> LossesByNoise:
        """Empty means of the quarters of the noise levels, of equal probability in training."""
        return LossesByNoise(self._levels(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)), self._device)


class LossesByNoise:
    """Means of losses by quarter of the noise levels, from q0, the least noise, to q3, over all processes.

    Args:
        edges: int64 levels (3,), the first of q1, q2 and q3.
        device: Of the sums; `add` does not wait for it.
    """

    def __init__(self, edges: Tensor, device: torch.device | str = "cpu") -> None:
        self._edges = edges.to(device)
        self._sums_and_counts = torch.zeros(len(edges) + 1, 2, dtype=torch.float64, device=device)

    def add(self, times: Tensor, losses: Tensor) -> None:
        """Add losses (b,) at int64 levels times (b,)."""
        quarters = torch.bucketize(times, self._edges, right=True)
        is_of = (quarters == torch.arange(len(self._sums_and_counts), device=times.device)[:, None]).double()
        self._sums_and_counts += is_of @ torch.stack([losses.detach().double(), torch.ones_like(losses).double()], 1)

    def result(self, all_reduce: AllReduce = no_reduce) -> dict[str, float]:
        """{"q0": mean, ...}; NaN for a quarter without pictures. Collective: one all-reduce."""
        sums, counts = all_reduce(self._sums_and_counts.clone()).cpu().unbind(1)
        return {f"q{quarter}": mean for quarter, mean in enumerate((sums / counts).tolist())}
