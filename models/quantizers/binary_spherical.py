"""Binary spherical quantization (BSQ)."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from .base import Quantizer
from .corners import Corners
from .entropy import BITS_PER_GROUP
from .signs import exact_log2, sign_codes


class BinarySphericalQuantizer(Quantizer):
    """A vector's direction v = z / |z| to the nearest of the 2^d corners of a cube inside the unit sphere.

    Zhao et al. 2024: q = sign(v) / sqrt(d), and p(c | v) = softmax_c 2 inv_temperature <v, c>, which is a product over
    the bits of sigmoid(4 inv_temperature v_b c_b), c_b = +-1 / sqrt(d). Losses: ``commitment`` is mean (v - sg q)^2;
    ``entropy`` is H_sample - diversity_gamma H_batch, in nats. The gradient reaches z through v.

    Args:
        codebook_size: 2^d.
        inv_temperature: Of the soft assignment.
        diversity_gamma: Weight of H_batch.
        bits_per_group: H_batch is computed for groups of at most so many bits; exact where d is no larger.

    Raises:
        ValueError: a codebook size that is no power of two, or another value out of range.
    """

    loss_names: ClassVar[tuple[str, ...]] = Corners.loss_names

    def __init__(
        self,
        codebook_size: int,
        *,
        inv_temperature: float = 100.0,
        diversity_gamma: float = 1.0,
        bits_per_group: int = BITS_PER_GROUP,
    ) -> None:
        dim = exact_log2(codebook_size)
        corners = Corners(
            dim,
            1 / math.sqrt(dim),
            inv_temperature=inv_temperature,
            diversity_gamma=diversity_gamma,
            bits_per_group=bits_per_group,
        )
        super().__init__(codebook_size, dim, corners.entropy.mean)
        self._corners = corners

    def _project(self, rows: Tensor) -> Tensor:
        return F.normalize(rows, dim=1)

    def _observe(self, rows: Tensor) -> None:
        self._corners.entropy.observe(rows)

    def _quantize(self, rows: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return self._corners.quantize(rows, self._all_reduce_of_forward)

    def _choose(self, rows: Tensor) -> Tensor:
        return sign_codes(rows)

    def _look_up(self, codes: Tensor) -> Tensor:
        return self._corners.look_up(codes)
