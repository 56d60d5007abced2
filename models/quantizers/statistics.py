"""Statistics of the whole batch of an update, whose parts are spread over micro-batches and processes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

AllReduce = Callable[[Tensor], Tensor]


class GlobalMean:
    """Mean of a vector statistic over every item of an update.

    Sums are in fp64, so that the mean, rounded to fp32, hardly ever depends on how items are spread over processes.
    """

    def __init__(self) -> None:
        self._observed: Tensor | None = None
        self._pooled: Tensor | None = None

    def observe(self, total: Tensor, count: int) -> None:
        """Add the sum (k,) over `count` items."""
        part = _pack(total, count)
        self._observed = part if self._observed is None else self._observed + part

    def pool(self, all_reduce: AllReduce) -> None:
        """Fix the mean over what all processes observed, until `clear`. Collective."""
        if self._observed is None:
            raise RuntimeError("pool() before observe(): nothing was observed, so there is nothing to pool")
        self._pooled, self._observed = all_reduce(self._observed), None

    def clear(self) -> None:
        """Forget the statistics of the update."""
        self._observed = self._pooled = None

    def __call__(self, total: Tensor, count: int, all_reduce: AllReduce | None) -> Tensor:
        """Mean (k,) in fp64.

        Args:
            total: Sum (k,) over the `count` local items.
            all_reduce: If given, the result is the pooled mean or, if nothing was pooled, the mean over all
                processes (collective); if None, the mean of the local items.
        """
        if all_reduce is None:
            return total.detach().double() / count
        packed = self._pooled if self._pooled is not None else all_reduce(_pack(total, count))
        return packed[:-1] / packed[-1]


def _pack(total: Tensor, count: int) -> Tensor:
    return torch.cat([total.detach().double(), total.new_full((1,), count, dtype=torch.float64)])


def sums_by_code(vectors: Tensor, codes: Tensor, num_codes: int) -> tuple[Tensor, Tensor]:
    """Vectors (n, d) and their codes (n,) -> the number of vectors with each code (K,) and their sums (K, d), fp64.

    Vectors are sorted by code, then those of each code are added in order: `index_add_` on a GPU adds in any order.
    The host does not wait for the device.
    """
    order = codes.argsort(stable=True)
    counts = torch.zeros(num_codes, dtype=torch.int64, device=codes.device)
    counts.scatter_add_(0, codes, torch.ones_like(codes))
    starts = counts.cumsum(0) - counts
    return counts.double(), F.embedding_bag(order, vectors.double(), starts, mode="sum")
