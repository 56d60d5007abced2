"""Films in overlapping tiles, for frames that are too large to be computed whole: the memory is that of a tile."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from .causal import StreamState

Step = Callable[[Tensor, StreamState], Tensor]
"""The next part of a stream, (b, i, f, h, w) -> (b, o, f', h x scale, w x scale); changes the state."""


class TiledStream:
    """A stream whose frames are cut into square tiles, each of which is a stream of its own. Where tiles overlap, their
    results are mixed, with weights that fall linearly towards the border of a tile.

    Only layers that look as far as the overlap, or less, give what they give for whole frames; attention and norms over
    a frame do not. Results do not depend on how the stream is divided into calls.

    Args:
        step: See `Step`; of the model.
        side: Of a tile, in places of the input.
        overlap: Places that neighbouring tiles share, below `side`; more where a side of the frame is no multiple.
        scale: Sides of the output / sides of the input. Side, overlap and the frame's sides times scale are whole.
    """

    def __init__(self, step: Step, side: int, overlap: int, scale: Fraction) -> None:
        self._step, self._side, self._overlap, self._scale = step, side, overlap, scale
        self._states: dict[tuple[int, int], StreamState] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """The next part of the stream, (b, i, f, h, w) -> (b, o, f', h x scale, w x scale)."""
        height, width = x.shape[-2:]
        total: Tensor | None = None
        for top, left in itertools.product(self._starts(height), self._starts(width)):
            tile = x[..., top : top + self._side, left : left + self._side]
            result = self._step(tile, self._states.setdefault((top, left), StreamState()))
            weights = self._weights(top, height)[:, None] * self._weights(left, width)
            if total is None:
                sides = (self._scaled(height), self._scaled(width))
                total, weight_sum = result.new_zeros(*result.shape[:-2], *sides), torch.zeros(sides)
            y, x0 = self._scaled(top), self._scaled(left)
            total[..., y : y + len(weights), x0 : x0 + weights.shape[1]] += result * weights.to(result)
            weight_sum[y : y + len(weights), x0 : x0 + weights.shape[1]] += weights
        assert total is not None
        return total / weight_sum.to(total)

    def _starts(self, length: int) -> list[int]:
        """Where tiles begin along a side of the frame. The last one ends with the frame."""
        last = max(length - self._side, 0)
        return [*range(0, last, self._side - self._overlap), last]

    def _weights(self, start: int, length: int) -> Tensor:
        """The weights of a tile's results along a side, (n,) in (0, 1]."""
        size, overlap = self._scaled(min(self._side, length)), self._scaled(self._overlap)
        ramp = torch.arange(1, size + 1) / (overlap + 1)
        rising = ramp if start else torch.ones(size)
        falling = ramp.flip(0) if start + self._side < length else torch.ones(size)
        return torch.minimum(rising, falling).clamp(max=1)

    def _scaled(self, places: int) -> int:
        return int(places * self._scale)
