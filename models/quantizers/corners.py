"""The codebook of lookup-free and binary spherical quantization: the corners of a cube."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from .base import straight_through
from .entropy import SignEntropy
from .signs import code_signs, sign_codes
from .statistics import AllReduce


class Corners:
    """The 2^d entries (+-s, ..., +-s), and the losses of being near them.

    ``commitment`` is mean (x - sg q)^2; ``entropy`` is H_sample - diversity_gamma H_batch in nats, with
    p(c | x) = softmax_c 2 inv_temperature <x, c>, a product over the bits of sigmoid(4 inv_temperature x_b c_b).

    Args:
        bits: d.
        scale: s.
        inv_temperature, diversity_gamma, bits_per_group: As the quantizers have them.

    Raises:
        ValueError: a value out of range.
    """

    loss_names = ("commitment", "entropy")

    def __init__(
        self, bits: int, scale: float, *, inv_temperature: float, diversity_gamma: float, bits_per_group: int
    ) -> None:
        self._bits, self._scale = bits, scale
        self.entropy = SignEntropy(bits, 4 * inv_temperature * scale, diversity_gamma, bits_per_group)

    def quantize(self, rows: Tensor, all_reduce: AllReduce | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Vectors (n, d) fp32 -> straight-through entries (n, d), codes (n,), losses."""
        codes = sign_codes(rows)
        entries = self.look_up(codes)
        losses = {"commitment": F.mse_loss(rows, entries), "entropy": self.entropy(rows, all_reduce)}
        return straight_through(entries, rows), codes, losses

    def look_up(self, codes: Tensor) -> Tensor:
        """Codes (...) -> entries (..., d) fp32."""
        return code_signs(codes, self._bits) * self._scale
