"""Validation errors of the Unets of a cascade, by noise level."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.devices import double, fp64_device

from .averages import AllReduce, identity


class UnetErrors:
    """Mean errors of Unets over all processes: overall, and by quarter of the noise levels, from q0, the least noise,
    to q3.

    Args:
        edges: Number of a Unet -> int64 levels (3,), at which q1, q2 and q3 begin (`DiffusionDraws.quarters`).
        device: Of the errors; their sums are on its `fp64_device`.
    """

    def __init__(self, edges: Mapping[int, Tensor], device: torch.device | str = "cpu") -> None:
        self._edges = {number: levels.to(device) for number, levels in edges.items()}
        self._sums_and_counts = torch.zeros(len(edges), 4, 2, dtype=torch.float64, device=fp64_device(device))

    def add(self, number: int, errors: Tensor, levels: Tensor) -> None:
        """Add errors (b,) of a Unet and their noise levels (b,), int64."""
        quarters = torch.bucketize(levels, self._edges[number], right=True)
        is_in_quarter = double(quarters == torch.arange(4, device=levels.device)[:, None])
        unet_sums = self._sums_and_counts[list(self._edges).index(number)]
        unet_sums += is_in_quarter @ torch.stack([double(errors.detach()), double(torch.ones_like(errors))], 1)

    def result(self, all_reduce: AllReduce = identity) -> dict[str, float]:
        """`unet1/error`, `unet1/q0` to `unet1/q3`, ..., and `loss`, the sum of the errors; NaN for a quarter without
        pictures. Collective: one all-reduce."""
        sums, counts = all_reduce(self._sums_and_counts.clone()).cpu().unbind(2)
        means = {
            f"unet{n}/error": mean for n, mean in zip(self._edges, (sums.sum(1) / counts.sum(1)).tolist(), strict=True)
        }
        by_noise = {
            f"unet{n}/q{quarter}": mean
            for n, quarter_means in zip(self._edges, (sums / counts).tolist(), strict=True)
            for quarter, mean in enumerate(quarter_means)
        }
        return {"loss": sum(means.values()), **means, **by_noise}
