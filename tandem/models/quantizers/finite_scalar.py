"""Finite scalar quantization (FSQ)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tandem.config.models.autoencoders import QuantizerConfig

from .base import Quantizer, straight_through

# Mentzer et al. 2023, table 1: codebook size -> levels.
_LEVELS = {
    2**8: (8, 6, 5), 2**10: (8, 5, 5, 5), 2**12: (7, 5, 5, 5, 5), 2**14: (8, 8, 8, 6, 5), 2**16: (8, 8, 8, 5, 5, 5)
}  # fmt: skip

# Widens the range a little, so that the outermost levels are reached before tanh saturates.
_MARGIN = 1e-3


class FiniteScalarQuantizer(Quantizer):
    """Rounds each channel, bounded by a tanh, to one of L levels in [-1, 1], multiples of 1 / (L // 2); for an even L
    the largest is 1 - 2 / L (Mentzer et al. 2023, section 3).

    The code has the first channel as its least significant digit, as in the paper's appendix A.1. There are no losses
    and no statistics. The input of the tanh is shifted by an artanh, where the paper's listing has a tan, so that
    z = 0 is level L // 2 for even L too.

    `fsq_levels` are the numbers of levels of the channels; None: those that are published for `codebook_size`.

    Raises:
        ValueError: no channels, a channel with less than 3 levels, or a codebook_size without published levels.
    """

    _levels: Tensor
    _place_values: Tensor

    def __init__(self, config: QuantizerConfig) -> None:
        levels = _published_levels(config.codebook_size) if config.fsq_levels is None else config.fsq_levels
        if not levels or min(levels) < 3:
            raise ValueError(
                f"fsq_levels {list(levels)}: give 3 or more for each channel (Mentzer et al. 2023 advise 5)"
            )
        super().__init__(math.prod(levels), len(levels))
        place_values = [math.prod(levels[:channel]) for channel in range(len(levels))]
        self.register_buffer("_levels", torch.tensor(levels), persistent=False)
        self.register_buffer("_place_values", torch.tensor(place_values), persistent=False)

    def summary(self) -> str:
        return f"{super().summary()}, levels {','.join(map(str, self._levels.tolist()))}"

    def _quantize(self, vectors: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        bounded = self._bound(vectors)
        digits = self._to_digits(bounded.detach())
        return straight_through(self._to_entries(digits), bounded / (self._levels // 2)), self._to_codes(digits), {}

    def _choose(self, vectors: Tensor) -> Tensor:
        return self._to_codes(self._to_digits(self._bound(vectors)))

    def _look_up(self, codes: Tensor) -> Tensor:
        return self._to_entries(codes[..., None] // self._place_values % self._levels)

    def _bound(self, vectors: Tensor) -> Tensor:
        """Bounded channels, in units of the distance of two levels: 0 is level L // 2."""
        half_range = (self._levels - 1) * (1 + _MARGIN) / 2
        offset = (self._levels % 2 == 0) / 2  # an even number of levels has no middle one
        return torch.tanh(vectors + torch.atanh(offset / half_range)) * half_range - offset

    def _to_digits(self, bounded: Tensor) -> Tensor:
        # nan_to_num, because NaN would become an index out of bounds.
        return (bounded.nan_to_num().round().long() + self._levels // 2).clamp(min=0).minimum(self._levels - 1)

    def _to_codes(self, digits: Tensor) -> Tensor:
        return (digits * self._place_values).sum(-1)

    def _to_entries(self, digits: Tensor) -> Tensor:
        half_width = self._levels // 2
        return (digits - half_width).float() / half_width


def _published_levels(codebook_size: int) -> tuple[int, ...]:
    """The published levels for a codebook_size of `_LEVELS`; their product is near that size. Raises ValueError, in one
    line, for other sizes."""
    if codebook_size not in _LEVELS:
        problem = f"codebook_size {codebook_size}: levels are published for {', '.join(map(str, _LEVELS))}"
        raise ValueError(f"{problem}; use one of these, or give the levels themselves, such as 8,5,5,5")
    return _LEVELS[codebook_size]
