"""Films in overlapping tiles, for frames that are too large to be computed whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from .causal import StreamState

Step = Callable[[Tensor, StreamState], Tensor]
"""The next part of a stream, (b, i, f, h, w) -> (b, o, f', h x scale, w x scale); changes the state."""


def apply_in_tiles(
    step: Step, x: Tensor, states: dict[tuple[int, int], StreamState], *, side: int, overlap: int, scale: Fraction
) -> Tensor:
    """The next part of a stream, (b, i, f, h, w) -> (b, o, f', h x scale, w x scale), computed in square tiles, each of
    which is a stream of its own. Where tiles overlap, their outputs are blended, with weights that fall linearly
    towards the border of a tile.

    Only layers that look as far as the overlap, or less, give what they give for whole frames; attention and norms over
    a frame do not. The result does not depend on how a stream is divided into calls.

    The device of `x` holds what one tile needs. What the layers of all tiles keep for the next call lies in the memory
    of the CPU.

    Args:
        step: A method of the model that encodes or decodes a stream.
        states: The state of each tile, by its top and left; at first empty. The call changes it.
        side: Of a tile, in places of the input.
        overlap: Places that neighbouring tiles share, below `side`; the last tile of a row or column may share more.
        scale: Sides of the output / sides of the input. `side`, `overlap`, h and w times scale are whole numbers.
    """
    height, width = x.shape[-2:]
    out: Tensor | None = None
    weight_sum = torch.zeros(int(height * scale), int(width * scale))
    for top, left in itertools.product(_starts(height, side, overlap), _starts(width, side, overlap)):
        state = states.setdefault((top, left), StreamState())
        state.move_to(x.device)
        tile = step(x[..., top : top + side, left : left + side], state)
        state.move_to(torch.device("cpu"))
        rows, columns = (_weights(*ends, side, overlap, scale) for ends in ((top, height), (left, width)))
        weights = rows[:, None] * columns
        if out is None:
            out = tile.new_zeros(*tile.shape[:-2], *weight_sum.shape)
        out_top, out_left = int(top * scale), int(left * scale)
        region = (..., slice(out_top, out_top + len(rows)), slice(out_left, out_left + len(columns)))
        out[region] += tile * weights.to(tile)
        weight_sum[region] += weights
    assert out is not None
    return out / weight_sum.to(out)


def _starts(length: int, side: int, overlap: int) -> list[int]:
    """Where tiles begin along a side of the frame. The last one ends with the frame."""
    last = max(length - side, 0)
    return [*range(0, last, side - overlap), last]


def _weights(start: int, length: int, side: int, overlap: int, scale: Fraction) -> Tensor:
    """The weights of a tile's output along a side of the frame, (n,) in (0, 1]: 1 where no neighbour overlaps."""
    size = int(min(side, length) * scale)
    ramp = torch.arange(1, size + 1) / (int(overlap * scale) + 1)
    rising = ramp if start else torch.ones(size)
    falling = ramp.flip(0) if start + side < length else torch.ones(size)
    return torch.minimum(rising, falling).clamp(max=1)
