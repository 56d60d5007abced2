"""Residual vector quantization (RVQ) of embeddings: the discrete conditioning of MusicLM."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..files.pretrained import Pretrained, constructor_arguments
from .base import straight_through
from .hashing import mix
from .vector import VectorQuantizer

_FIT_ROWS_PER_ENTRY = 32


class ResidualQuantized(NamedTuple):
    """Results of a forward pass."""

    quantized: Tensor
    """(b, d) fp32, the sum of the chosen entries; its gradient goes straight through to the embeddings."""
    codes: Tensor
    """(b, q) int64 in [0, codebook_size), coarse to fine."""
    losses: dict[str, Tensor]
    """``commitment`` (q,) fp32, unweighted; entry k is the mean square of the residual after level k."""


class ResidualQuantizer(Pretrained):
    """Each level quantizes the residual of the levels before it: r_0 = x, c_k = the entry nearest to r_k,
    r_{k+1} = r_k - e_k(c_k) (Zeghidour et al. 2021, "SoundStream", algorithm 1). MusicLM is conditioned on the codes of
    MuLan's audio embeddings, in 12 levels of 1024 entries (Agostinelli et al. 2023, section 3.2).

    The codebooks are those of `VectorQuantizer`: k-means of the first batch, then moving averages over the batches of
    all processes, and dead entries replaced. One update is

        quantizer.train()(embeddings)                  the whole share of this process, in one forward
        quantizer.after_update(step, seed)             collective, as the forward of the first update is

    In eval mode and under `torch.no_grad` a forward learns nothing. On several processes set all_reduce, gather, rank
    and world_size of each of the `levels` first; every process must hold equally many embeddings.

    Args:
        dim: d.
        num_quantizers: q, the levels.
        codebook_size: Entries per level.
        decay: Decay of the moving averages, in [0, 1).
        revive_below: An entry used less than this, in units of the mean use of its level, is replaced by the input
            of its level for an embedding that is drawn by (seed, step, level); in [0, 1], 0 for never.

    Raises:
        ValueError: a value outside these ranges.
    """

    not_in_the_weights = frozenset(("decay", "revive_below"))

    def __init__(
        self, dim: int, num_quantizers: int = 12, codebook_size: int = 1024, *,
        decay: float = 0.9, revive_below: float = 0.01,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config = constructor_arguments(locals())
        if num_quantizers < 1:
            raise ValueError(f"num_quantizers {num_quantizers}: at least 1 level")
        self.dim, self.num_quantizers, self.codebook_size = dim, num_quantizers, codebook_size
        self.levels = nn.ModuleList(
            VectorQuantizer(codebook_size, dim, decay=decay, revive_below=revive_below) for _ in range(num_quantizers)
        )

    def forward(self, embeddings: Tensor) -> ResidualQuantized:
        """Embeddings (b, d) of any floating dtype; computed in fp32, even under autocast.

        Raises:
            ValueError: embeddings of another shape.
        """
        if embeddings.ndim != 2 or embeddings.shape[1] != self.dim:
            raise ValueError(f"embeddings have the shape {tuple(embeddings.shape)}, not (b, {self.dim})")
        residual, entries, codes, left = embeddings.float(), [], [], []
        for level in self._levels():
            out = level(residual)
            # Without detach, every level would pass on a straight-through gradient; `quantized` below passes on one.
            entries.append(out.quantized.detach())
            codes.append(out.codes)
            left.append(out.losses["commitment"])
            residual = residual - entries[-1]
        quantized = straight_through(_sum(entries), embeddings.float())
        return ResidualQuantized(quantized, torch.stack(codes, dim=1), {"commitment": torch.stack(left)})

    @torch.no_grad()
    def after_update(self, step: int, seed: int, skipped: Tensor | None = None) -> None:
        """Move the codebooks. Call it once per update, after the forward. Collective. Arguments: see `Quantizer`."""
        for number, level in enumerate(self._levels()):
            level.after_update(step, mix(mix(seed & 0xFFFFFFFF) ^ number), skipped)

    def fit(self, embeddings: Tensor, epochs: int, seed: int, mark: Callable[[], None] = lambda: None) -> list[float]:
        """Learn from a set of embeddings (n, d) in random order, on one process; ends in eval mode.

        An update takes about 32 embeddings per entry, or all embeddings if there are fewer: enough for the k-means of
        the first update and for steady averages. The same embeddings and seed give the same codebooks.

        Args:
            embeddings: Embeddings (n, d) on the device of the quantizer.
            epochs: Passes over all embeddings.
            seed: Seed of the draws that replace unused entries.
            mark: Called before each update, to show a watchdog that the process is alive.

        Returns:
            Mean square of the residual after each level, divided by that of the embeddings; 0 is a perfect fit.
        """
        batches = embeddings.tensor_split(math.ceil(len(embeddings) / (_FIT_ROWS_PER_ENTRY * self.codebook_size)))
        self.train()
        for step in range(epochs * len(batches)):
            mark()
            self(batches[step % len(batches)])
            self.after_update(step, seed)
        self.eval()
        left = torch.stack([self(batch).losses["commitment"] * len(batch) for batch in batches]).sum(0)
        return (left / len(embeddings) / embeddings.float().square().mean()).tolist()

    @torch.no_grad()
    def encode(self, embeddings: Tensor) -> Tensor:
        """Embeddings (b, d) -> codes (b, q) int64, those of `forward`. Raises what `forward` raises. Learns nothing."""
        return self(embeddings).codes

    def decode(self, codes: Tensor) -> Tensor:
        """Codes (b, k) int64 of the first k levels, 1 <= k <= q -> their sum (b, d) fp32: with all q, bit for bit the
        `quantized` of `forward`.

        Raises:
            ValueError: codes of another shape.
        """
        if codes.ndim != 2 or not 1 <= codes.shape[1] <= self.num_quantizers:
            raise ValueError(f"codes have the shape {tuple(codes.shape)}, not (b, 1 to {self.num_quantizers})")
        columns = zip(self._levels(), codes.unbind(1), strict=False)
        return _sum([level.decode_codes(column) for level, column in columns])

    def _levels(self) -> list[VectorQuantizer]:
        return [level for level in self.levels if isinstance(level, VectorQuantizer)]


def _sum(parts: list[Tensor]) -> Tensor:
    """Add in order, so that `forward` and `decode` round alike."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
