"""Lookup-free quantization (LFQ) and binary spherical quantization (BSQ)."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from .base import Quantizer, straight_through
from .entropy import BITS_PER_GROUP, SignEntropy
from .signs import code_signs, exact_log2, sign_codes


class LookupFreeQuantizer(Quantizer):
    """Maps each channel to its sign: the codebook is the 2^d corners of a cube (Yu et al. 2024, MAGVIT-2, section 3.1).

    Losses: ``commitment`` is mean (z - sg q)^2 (sg: stop-gradient); ``entropy`` is H_sample - diversity_gamma H_batch
    in nats, with p(c | z) = softmax_c 2 inv_temperature <z, c>, a product over the bits of
    sigmoid(4 inv_temperature z_b c_b).

    Args:
        codebook_size: 2^d.
        inv_temperature: Inverse temperature of the soft assignment; None for `usual_inv_temperature`.
        diversity_gamma: Weight of H_batch.
        bits_per_group: H_batch is computed for groups of at most this many bits; exact if d is no larger.

    Raises:
        ValueError: a codebook size that is no power of two, or another value out of range.
    """

    loss_names: ClassVar[tuple[str, ...]] = ("commitment", "entropy")
    # The public implementations have 100: bits beyond +-0.01 then get no gradient of the entropies, and one that starts
    # there stays as it is. 10 gave better images on photos, of more codes (docs/vqgan.md).
    usual_inv_temperature: ClassVar[float] = 10.0

    def __init__(
        self, codebook_size: int, *,
        inv_temperature: float | None = None, diversity_gamma: float = 1.0, bits_per_group: int = BITS_PER_GROUP,
    ) -> None:  # fmt: skip
        bits = exact_log2(codebook_size)
        size = self._channel_size(bits)
        inv_temperature = self.usual_inv_temperature if inv_temperature is None else inv_temperature
        entropy = SignEntropy(bits, 4 * inv_temperature * size, diversity_gamma, bits_per_group)
        super().__init__(codebook_size, bits, entropy.mean)
        self._size, self._entropy = size, entropy

    @staticmethod
    def _channel_size(bits: int) -> float:
        """Absolute value of each channel of an entry."""
        return 1.0

    def _observe(self, rows: Tensor) -> None:
        self._entropy.observe(rows)

    def _quantize(self, rows: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        codes = sign_codes(rows)
        entries = self._look_up(codes)
        # Keep this order: the gradients of rows are added in it, so another order would round differently.
        commitment, entropy = F.mse_loss(rows, entries), self._entropy(rows, self._all_reduce_of_forward)
        return straight_through(entries, rows), codes, {"commitment": commitment, "entropy": entropy}

    def _choose(self, rows: Tensor) -> Tensor:
        return sign_codes(rows)

    def _look_up(self, codes: Tensor) -> Tensor:
        return code_signs(codes, self.dim) * self._size


class BinarySphericalQuantizer(LookupFreeQuantizer):
    """LFQ of a vector's direction v = z / |z|, with corners on the unit sphere: q = sign(v) / sqrt(d).

    Zhao et al. 2024; p(c | v) = softmax_c 2 inv_temperature <v, c>, which is a product over the bits of
    sigmoid(4 inv_temperature v_b c_b), c_b = +-1 / sqrt(d). Losses: ``commitment`` is mean (v - sg q)^2; ``entropy`` is
    H_sample - diversity_gamma H_batch, in nats. The gradient reaches z through v. The authors leave `commitment` out.
    """

    usual_inv_temperature: ClassVar[float] = 1.0  # the authors'

    @staticmethod
    def _channel_size(bits: int) -> float:
        return 1 / math.sqrt(bits)

    def _project(self, rows: Tensor) -> Tensor:
        return F.normalize(rows, dim=1)
