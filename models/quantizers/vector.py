"""Vector quantization (VQ) with a codebook that follows moving averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import Quantizer, straight_through
from .clustering import kmeans, nearest
from .hashing import random_indices
from .statistics import sums_by_code

_SMOOTHING = 1e-5  # Laplace smoothing of the counts

Self = TypeVar("Self", bound="VectorQuantizer")


class VectorQuantizer(Quantizer):
    """Replaces each vector by the nearest entry of a codebook; entries follow the mean of the vectors that chose them.

    van den Oord et al. 2017, appendix A.1, over the whole batch of each update: N_k <- decay N_k + (1 - decay) n_k,
    m_k <- decay m_k + (1 - decay) (sum of the n_k vectors), and e_k = m_k / N_k with Laplace smoothing of N.
    Loss: ``commitment`` is mean (z - sg e)^2 (sg: stop-gradient). Codebook and averages are buffers and stay fp32 when
    the model is cast.

    Args:
        codebook_size, dim: K and d.
        decay: Decay of the moving averages, in [0, 1).
        cosine: Choose the nearest entry by angle: vectors and entries are scaled to length 1.
        kmeans_init: Start from k-means of the first batch instead of random entries.
        revive_below: An entry with a smaller N_k is dead and becomes a vector of the batch, drawn by (seed, step, k).
            In units of the mean N_k, so it is in [0, 1]; 0 for never.

    Raises:
        ValueError: a value outside these ranges.
    """

    loss_names: ClassVar[tuple[str, ...]] = ("commitment",)
    codebook: Tensor
    code_counts: Tensor
    code_sums: Tensor
    initialized: Tensor

    def __init__(
        self, codebook_size: int, dim: int, *,
        decay: float = 0.8, cosine: bool = False, kmeans_init: bool = True, revive_below: float = 0.01,
    ) -> None:  # fmt: skip
        if codebook_size < 2 or dim < 1:
            raise ValueError(f"codebook_size {codebook_size} and dim {dim}: at least 2 entries of 1 channel")
        if not (0 <= decay < 1 and 0 <= revive_below <= 1):
            raise ValueError(f"decay {decay} and revive_below {revive_below}: decay is in [0, 1), the other in [0, 1]")
        super().__init__(codebook_size, dim)
        self.decay, self.cosine, self.revive_below = decay, cosine, revive_below
        codebook = self._project(torch.randn(codebook_size, dim))
        self.register_buffer("codebook", codebook)
        self.register_buffer("code_counts", torch.ones(codebook_size))
        self.register_buffer("code_sums", codebook.clone())
        self.register_buffer("initialized", torch.tensor(not kmeans_init))
        self._known_initialized = False
        self._observed: list[Tensor] = []
        self._vectors: list[Tensor] = []
        self._codes: list[Tensor] = []

    @property
    def is_initialized(self) -> bool:
        """Whether the codebook has its first entries. Until then, each call waits for the device."""
        self._known_initialized = self._known_initialized or bool(self.initialized)
        return self._known_initialized

    @property
    def needs_observation(self) -> bool:
        return self.training and not self.is_initialized

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`.bfloat16()` and `.half()`, which DeepSpeed calls on a whole model, leave the averages in fp32."""

        def in_full_precision(buffer: Tensor) -> Tensor:
            moved = fn(buffer)
            return buffer.to(moved.device) if moved.dtype in (torch.float16, torch.bfloat16) else moved

        return super()._apply(in_full_precision, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._known_initialized = False  # the loaded codebook may have no entries yet

    @torch.no_grad()
    def pool(self) -> None:
        if self._observed:
            self._initialize(torch.cat(self._observed))
        self._observed = []

    @torch.no_grad()
    def after_update(self, step: int, seed: int, skipped: Tensor | None = None) -> None:
        if not self.training:
            return
        if not self._codes:
            raise RuntimeError("after_update() without a forward in train mode, with gradients, before it")
        vectors, codes = torch.cat(self._vectors), torch.cat(self._codes)
        self._vectors, self._codes = [], []
        counts, sums = sums_by_code(vectors, codes, self.num_codes)
        candidates = self._candidates(vectors, step, seed)
        packed = self.all_reduce(torch.cat([counts[:, None], sums, candidates], dim=1))
        counts, sums, candidates = packed.float().split([1, self.dim, candidates.shape[1]], dim=1)

        counts = self.code_counts.lerp(counts[:, 0], 1 - self.decay)
        sums = self.code_sums.lerp(sums, 1 - self.decay)
        total = counts.sum()
        smoothed = (counts + _SMOOTHING) / (total + self.num_codes * _SMOOTHING) * total
        codebook = self._project(sums / smoothed[:, None])
        if self.revive_below:  # dead entries are replaced by candidates, with the mean count
            usual = counts.mean()
            is_dead = counts < self.revive_below * usual
            codebook = torch.where(is_dead[:, None], candidates, codebook)
            counts = torch.where(is_dead, usual, counts)
            sums = torch.where(is_dead[:, None], candidates * usual, sums)
        for old, new in ((self.codebook, codebook), (self.code_counts, counts), (self.code_sums, sums)):
            old.copy_(new if skipped is None else torch.where(skipped, old, new))

    def _candidates(self, vectors: Tensor, step: int, seed: int) -> Tensor:
        """For each entry a vector drawn from the whole batch, (K, d) fp64; zeros where another process holds it."""
        if self.revive_below == 0:
            return vectors.new_zeros(self.num_codes, 0, dtype=torch.float64)
        drawn = random_indices(self.num_codes, len(vectors) * self.world_size, seed, step, device=vectors.device)
        local = drawn - self.rank * len(vectors)
        is_here = (local >= 0) & (local < len(vectors))
        return torch.where(is_here[:, None], vectors[local.clamp(0, len(vectors) - 1)].double(), 0.0)

    def _observe(self, rows: Tensor) -> None:
        self._observed.append(rows)

    def _quantize(self, rows: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if self.is_learning and not self.is_initialized:
            self._initialize(rows.detach())
        codes = self._choose(rows.detach())
        if self.is_learning:
            self._vectors.append(rows.detach())
            self._codes.append(codes)
        entries = self._look_up(codes)
        return straight_through(entries, rows), codes, {"commitment": F.mse_loss(rows, entries)}

    def _choose(self, rows: Tensor) -> Tensor:
        return nearest(rows, self.codebook)

    def _look_up(self, codes: Tensor) -> Tensor:
        return self.codebook[codes]

    @torch.no_grad()
    def _initialize(self, rows: Tensor) -> None:
        """Entries from k-means of the vectors (n, d) of all processes, unless a centre is not finite. Collective."""
        vectors = self.gather(rows)
        centres, counts = kmeans(vectors, self.num_codes, normalize=self._project)
        # Average the centres of all processes: entries must be equal even if their k-means rounded differently.
        packed = self.all_reduce(torch.cat([centres, counts[:, None]], dim=1).double()) / self.world_size
        centres, counts = packed[:, :-1].float(), packed[:, -1].float()
        is_finite = centres.isfinite().all()
        sums = centres * counts[:, None]
        for old, new in ((self.codebook, centres), (self.code_counts, counts), (self.code_sums, sums)):
            old.copy_(torch.where(is_finite, new, old))
        self.initialized |= is_finite

    def _project(self, rows: Tensor) -> Tensor:
        return F.normalize(rows, dim=-1) if self.cosine else rows
