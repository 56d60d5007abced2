"""Random numbers of the losses of diffusion models: times, noise, dropped conditions, degraded pictures.

A draw is a function of (seed, name of the network, step, position in the global batch). It does not depend on
processes, micro-batches or other networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.devices import to_device
from tandem.training.noise import Noise


@dataclass(frozen=True)
class LowresDraws:
    """The degradation of low-resolution pictures in training."""

    timesteps: int = 0  # noise levels, drawn uniformly; 0 adds no noise
    blur_prob: float = 0.5  # 0: none is blurred
    blur_sigma: tuple[float, float] = (0.6, 0.6)  # least and greatest, in pixels, drawn uniformly


class DiffusionDraws:
    """Draws for the losses of one network.

    Args:
        seed: Seed of the run.
        name: Name of the network; draws of different networks are independent.
        timesteps: T, number of noise levels.
        image_drop: Probability of dropping the image embedding; None if the network has none.
        text_drop: The same for the text.
        logit_normal: Mean and standard deviation (above 0) for times t = sigmoid(mean + std n), where n is standard
            normal and t = 1 is the most noise (Esser et al. 2024, section 3.1); None: times are uniform in [0, 1).
        stratified: Times are the quantiles (pi(position) + u) / batch_size of their distribution, where the permutation
            pi of the global batch changes with the step, and u is uniform in [0, 1). So each batch has one time in each
            of batch_size strata, and the loss hardly varies through the choice of times (after Kingma et al. 2021,
            appendix I.1).
        lowres: How the low-resolution pictures are degraded; None if the network sees none.
        device: Where noise is drawn, and where all draws are put. Only the noise depends on the kind of device; the
            draws of one number per picture are the same everywhere.
    """

    def __init__(
        self,
        seed: int,
        name: str,
        timesteps: int,
        *,
        image_drop: float | None = None,
        text_drop: float | None = None,
        logit_normal: Sequence[float] | None = None,
        stratified: bool = True,
        lowres: LowresDraws | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._seed, self._name, self._timesteps = seed, name, timesteps
        self._drop_probabilities = {"keep_image": image_drop, "keep_text": text_drop}
        self._stratified, self._lowres, self._device, self._logit_normal = stratified, lowres, device, logit_normal

    def fixed(self, positions: Sequence[int], total: int, shape: Sequence[int]) -> dict[str, Tensor]:
        """Draws for validation, the same at every step: times are stratified over all `total` pictures of the split, in
        which the pictures have these positions; no condition is dropped."""
        draws = self(0, positions, total, shape, use="/valid")
        keep_masks = {name: torch.ones_like(draw) for name, draw in draws.items() if draw.dtype == torch.bool}
        return {**draws, **keep_masks}

    def __call__(
        self, step: int, positions: Sequence[int], batch_size: int, shape: Sequence[int], use: str = ""
    ) -> dict[str, Tensor]:
        """Draws of an update, by the names of the arguments of `tandem.models.diffusion.DiffusionLoss`, and
        "blur_sigma" of `models.Decoder.training_pictures`.

        Args:
            step: Completed updates.
            positions: Places of the b pictures in the global batch, in 0..batch_size - 1.
            shape: (c, h, w) of the pictures, and of the low-resolution pictures, which are as large.
            use: Draws of different uses are independent.
        """

        def noise(name: str) -> Noise:
            return Noise(self._seed, f"diffusion/{self._name}{use}/{name}")

        def uniform(name: str) -> Tensor:
            return noise(name).uniform(step, positions, ()).double()

        def uniform_between(name: str, low: float, high: float) -> Tensor:
            return low + (high - low) * uniform(name)

        quantiles = uniform("times")
        if self._stratified:
            generator = np.random.Generator(np.random.Philox(key=noise("strata").seed_of(step, 0)))
            strata = torch.from_numpy(generator.permutation(batch_size))[list(positions)]
            quantiles = (strata + quantiles) / batch_size
        draws = {"times": self._to_levels(quantiles)}
        draws |= {name: uniform(name) >= drop for name, drop in self._drop_probabilities.items() if drop is not None}
        if self._lowres:
            if self._lowres.blur_prob:
                is_blurred = uniform("blur") < self._lowres.blur_prob
                draws["blur_sigma"] = (uniform_between("blur_sigma", *self._lowres.blur_sigma) * is_blurred).float()
            if self._lowres.timesteps:
                draws["lowres_time"] = uniform_between("lowres_time", 0, self._lowres.timesteps).long()
        draws = {name: to_device(draw, self._device) for name, draw in draws.items()}
        draws["noise"] = noise("noise").normal(step, positions, shape, self._device)
        if "lowres_time" in draws:
            draws["lowres_noise"] = noise("lowres_noise").normal(step, positions, shape, self._device)
        return draws

    def _to_levels(self, quantiles: Tensor) -> Tensor:
        """Quantiles in [0, 1) of the distribution of times, fp64 -> noise levels of these times, int64 in 0..T - 1."""
        times = quantiles
        if self._logit_normal:
            mean, deviation = self._logit_normal
            times = (mean + deviation * torch.special.ndtri(quantiles)).sigmoid()
        return (times * self._timesteps).long().clamp_max(self._timesteps - 1)

    def quarters(self) -> Tensor:
        """int64 levels (3,) at which the second, third and last quarter of the noise levels begin; in training all
        quarters have the same probability."""
        return self._to_levels(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
