"""A clip in chunks: one frame, then groups of frames of equal number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .causal import Context


@dataclass
class StreamState:
    """What a stream of frames or codes carries from one call to the next: tensors and numbers alone, so it can be
    pickled and continued elsewhere, and several streams can go through one model in turn.

    Its size does not depend on how many frames went through, with one exception: layers that attend to all earlier
    frames keep their keys and values.
    """

    cond: Tensor | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)
    """What each layer keeps, by its name."""
    pending: Tensor | None = None
    """(b, c, f, h, w), given but not yet used: fewer frames than a chunk has."""
    used: int = 0
    """Number of frames used."""

    def chunks(self, x: Tensor, frames: int) -> Iterator[tuple[Tensor, Context]]:
        """(b, c, f, h, w) -> every chunk that is complete: the first has one frame, all others have ``frames``.

        Raises:
            ValueError: a batch, a height or a width other than those of the frames before.
        """
        if self.pending is not None:
            if (old := _shape_of_a_frame(self.pending)) != (new := _shape_of_a_frame(x)):
                raise ValueError(f"a stream of frames {old} (b, c, h, w) cannot go on with frames {new}")
            x = torch.cat([self.pending, x], dim=2)
        while x.shape[2] >= (length := frames if self.used else 1):
            context = Context(self.cond, is_start=self.used == 0, kept=self.kept)
            self.used += length
            chunk, x = x[:, :, :length].contiguous(), x[:, :, length:]
            yield chunk, context
        self.pending = x.clone()  # not a view, which would hold the memory of all frames


def _shape_of_a_frame(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:2], *x.shape[3:])
