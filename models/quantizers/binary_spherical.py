"""Binary spherical quantization (BSQ)."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F

from .lookup_free import LookupFreeQuantizer


class BinarySphericalQuantizer(LookupFreeQuantizer):
    """LFQ of a vector's direction v = z / |z|, with corners on the unit sphere: q = sign(v) / sqrt(d).

    Zhao et al. 2024; p(c | v) = softmax_c 2 inv_temperature <v, c>, which is a product over the bits of
    sigmoid(4 inv_temperature v_b c_b), c_b = +-1 / sqrt(d). Losses: ``commitment`` is mean (v - sg q)^2; ``entropy`` is
    H_sample - diversity_gamma H_batch, in nats. The gradient reaches z through v.

    Args, errors: see `LookupFreeQuantizer`.
    """

    @staticmethod
    def _channel_size(bits: int) -> float:
        return 1 / math.sqrt(bits)

    def _project(self, rows: Tensor) -> Tensor:
        return F.normalize(rows, dim=1)
