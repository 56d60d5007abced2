"""Errors of the Unets of a cascade over a split."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..objectives.diffusion import LossesByNoise
from .averages import AllReduce, Averages, no_reduce


class UnetErrors:
    """Mean errors of Unets over all processes, in all and by quarter of the noise.

    Args:
        quarters: Number of a Unet -> its empty means by quarter.
        device: Of the sums; `add` does not wait for it.
    """

    def __init__(self, quarters: Mapping[int, LossesByNoise], device: torch.device | str = "cpu") -> None:
        self._quarters = dict(quarters)
        self._means = Averages(*(f"unet{number}/error" for number in quarters), device=device)

    def add(self, number: int, errors: Tensor, levels: Tensor) -> None:
        """Add errors (b,) of a Unet and their noise levels (b,)."""
        self._means.add(**{f"unet{number}/error": errors})
        self._quarters[number].add(levels, errors)

    def result(self, all_reduce: AllReduce = no_reduce) -> dict[str, float]:
        """`unet1/error`, `unet1/q0` to `unet1/q3`, ..., and `loss`, the sum of the errors. Collective."""
        means = self._means.result(all_reduce)
        by_noise = {
            f"unet{number}/{name}": value
            for number, quarter in self._quarters.items() for name, value in quarter.result(all_reduce).items()
        }  # fmt: skip
        return {"loss": sum(means.values()), **means, **by_noise}
