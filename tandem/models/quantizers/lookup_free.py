"""Lookup-free quantization (LFQ) and binary spherical quantization (BSQ)."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.config.models.autoencoders import QuantizerConfig

from .base import Quantizer, straight_through
from .entropy import SignEntropy, code_signs


class LookupFreeQuantizer(Quantizer):
    """Maps each channel to its sign: the codebook is the 2^d corners of a cube (MAGVIT-v2: Yu et al. 2024, section
    3.1).

    Losses: ``commitment`` is mean (z - sg q)^2 (sg: stop-gradient); ``entropy`` is H_sample - diversity_gamma H_batch
    in nats, with p(c | z) = softmax_c 2 inv_temperature <z, c>, a product over the bits of
    sigmoid(4 inv_temperature z_b c_b).

    H_batch is exact for up to 2^18 codes, and an upper bound for more; see `SignEntropy`.

    With the quantizer "bsq" it is that of Zhao et al. 2024, "Image and video tokenization with binary spherical
    quantization": z is replaced by its direction v = z / |z|, through which the gradient reaches z, and the corners are
    on the unit sphere: q = sign(v) / sqrt(d). The paper has no ``commitment``.

    Raises:
        ValueError: a codebook size that is no power of two, or an inv_temperature that is not positive.
    """

    loss_names: ClassVar[tuple[str, ...]] = ("commitment", "entropy")

    def __init__(self, config: QuantizerConfig) -> None:
        bits, is_spherical = exact_log2(config.codebook_size), config.quantizer == "bsq"
        magnitude = 1 / math.sqrt(bits) if is_spherical else 1.0  # of each channel of an entry
        entropy = SignEntropy(bits, 4 * config.inv_temperature * magnitude, config.diversity_gamma)
        super().__init__(config.codebook_size, bits, entropy.mean)
        self._magnitude, self._entropy, self._is_spherical = magnitude, entropy, is_spherical

    def _accumulate_stats(self, vectors: Tensor) -> None:
        self._entropy.accumulate_stats(vectors)

    def _quantize(self, vectors: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        codes = self._choose(vectors)
        entries = self._look_up(codes)
        # Keep this order: the gradients of vectors are added in it, so another order would round differently.
        commitment, entropy = F.mse_loss(vectors, entries), self._entropy(vectors, self._forward_all_reduce)
        return straight_through(entries, vectors), codes, {"commitment": commitment, "entropy": entropy}

    def _choose(self, vectors: Tensor) -> Tensor:
        # 0 counts as negative. The first channel is the most significant bit, as in the public implementations; in Yu
        # et al. 2024 it is the least significant.
        shifts = torch.arange(self.dim - 1, -1, -1, device=vectors.device)
        return ((vectors > 0).long() << shifts).sum(-1)

    def _look_up(self, codes: Tensor) -> Tensor:
        return code_signs(codes, self.dim) * self._magnitude

    def _project(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=1) if self._is_spherical else vectors


def exact_log2(codebook_size: int) -> int:
    """The exponent d of a codebook of 2^d codes.

    Raises:
        ValueError: the size is no power of two, or less than 2.
    """
    if codebook_size < 2 or codebook_size & (codebook_size - 1):
        smaller = 1 << max(codebook_size, 2).bit_length() - 1
        problem = f"codebook_size {codebook_size} is no power of two, and d signs make 2^d codes"
        raise ValueError(f"{problem}; use {smaller} or {2 * smaller}")
    return codebook_size.bit_length() - 1
