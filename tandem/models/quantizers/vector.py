"""Vector quantization (VQ) with a codebook that follows moving averages: nearest entries, k-means, and draws that are
a function of seed, step and index, computed on the device without a generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.config.models.autoencoders import QuantizerConfig
from tandem.devices import sum_dtype

from .base import Quantizer, straight_through

_SMOOTHING = 1e-5  # Laplace smoothing of the counts
# Distances between vectors and entries that are computed at once: 256 MiB.
_MAX_DISTANCES = 2**26
_MIN_LENGTH = 1e-6  # of a vector in `rotation_trick`: it limits the gradient
_MASK = 0xFFFFFFFF
_MULTIPLIER = 0x45D9F3B  # odd and below 2^31: its product with 32 bits fits an int64


class VectorQuantizer(Quantizer):
    """Replaces each vector by the nearest entry of a codebook; entries follow the mean of the vectors that chose them.

    van den Oord et al. 2017, appendix A.1, over the whole batch of each update: N_k <- decay N_k + (1 - decay) n_k,
    m_k <- decay m_k + (1 - decay) (sum of the n_k vectors), and e_k = m_k / N_k with Laplace smoothing of N.
    Loss: ``commitment`` is mean (z - sg e)^2 (sg: stop-gradient). Codebook and averages are buffers and stay fp32 when
    the model is cast.

    The codebook starts from k-means of the first batch, and a dead entry becomes a vector of the batch, drawn by
    (seed, step, k): Zeghidour et al. 2021, "SoundStream", section III-C.
    With `vq_gradient` "rotation" the gradient reaches the vectors by the `rotation_trick`, not straight through.
    With `vq_cosine` the nearest entry is that of the smallest angle: vectors and entries are scaled to length 1.

    Raises:
        ValueError: vq_decay is not in [0, 1).
    """

    loss_names: ClassVar[tuple[str, ...]] = ("commitment",)
    keeps_fp32 = True
    codebook: Tensor
    code_counts: Tensor
    code_sums: Tensor
    initialized: Tensor
    revive_below = 0.01
    """An entry with a smaller N_k, in units of the mean N_k, is dead and becomes a vector of the batch."""

    def __init__(self, config: QuantizerConfig) -> None:
        if not 0 <= config.vq_decay < 1:
            raise ValueError(f"vq_decay {config.vq_decay} is not in [0, 1)")
        super().__init__(config.codebook_size, config.codebook_dim)
        self.decay, self.cosine, self.rotates = config.vq_decay, config.vq_cosine, config.vq_gradient == "rotation"
        codebook = self._project(torch.randn(self.num_codes, self.dim))
        self.register_buffer("codebook", codebook)
        self.register_buffer("code_counts", torch.ones(self.num_codes))
        self.register_buffer("code_sums", codebook.clone())
        self.register_buffer("initialized", torch.tensor(False))
        self._is_initialized = False  # on the host, so that `is_initialized` does not wait for the device again
        self._first_vectors: list[Tensor] = []
        self._vectors: list[Tensor] = []
        self._codes: list[Tensor] = []

    @property
    def is_initialized(self) -> bool:
        """Whether the codebook has entries from k-means. Until then, each call waits for the device."""
        self._is_initialized = self._is_initialized or bool(self.initialized)
        return self._is_initialized

    @property
    def needs_stats(self) -> bool:
        return self.training and not self.is_initialized

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._is_initialized = False  # the loaded codebook may not be initialised

    @torch.no_grad()
    def reduce_stats(self) -> None:
        if self._first_vectors:
            self._initialize(torch.cat(self._first_vectors))
        self._first_vectors = []

    @torch.no_grad()
    def after_step(self, step: int, seed: int, skipped: Tensor | None = None) -> None:
        if not self.training:
            return
        if not self._codes:
            raise RuntimeError("after_step() without a forward in train mode, with gradients, before it")
        vectors, codes = torch.cat(self._vectors), torch.cat(self._codes)
        self._vectors, self._codes = [], []
        counts, sums = sums_by_code(vectors, codes, self.num_codes)
        candidates = self._draw_candidates(vectors, step, seed)
        packed = self.all_reduce(torch.cat([counts[:, None], sums, candidates], dim=1))
        counts, sums, candidates = packed.float().split([1, self.dim, self.dim], dim=1)

        new_counts = self.code_counts.lerp(counts[:, 0], 1 - self.decay)
        new_sums = self.code_sums.lerp(sums, 1 - self.decay)
        total = new_counts.sum()
        smoothed = (new_counts + _SMOOTHING) / (total + self.num_codes * _SMOOTHING) * total
        codebook = self._project(new_sums / smoothed[:, None])
        mean_count = new_counts.mean()  # the count that a revived entry starts with
        is_dead = new_counts < self.revive_below * mean_count
        codebook = torch.where(is_dead[:, None], candidates, codebook)
        new_counts = torch.where(is_dead, mean_count, new_counts)
        new_sums = torch.where(is_dead[:, None], candidates * mean_count, new_sums)
        for old, new in ((self.codebook, codebook), (self.code_counts, new_counts), (self.code_sums, new_sums)):
            old.copy_(new if skipped is None else torch.where(skipped, old, new))

    def _draw_candidates(self, vectors: Tensor, step: int, seed: int) -> Tensor:
        """A random vector of the whole batch for each entry, (K, d) fp64; zeros where another process holds it."""
        indices = random_indices(self.num_codes, len(vectors) * self.world_size, seed, step, device=vectors.device)
        local_indices = indices - self.rank * len(vectors)
        is_local = (local_indices >= 0) & (local_indices < len(vectors))
        candidates = vectors[local_indices.clamp(0, len(vectors) - 1)].to(sum_dtype(vectors.device))
        return torch.where(is_local[:, None], candidates, 0.0)

    def _accumulate_stats(self, vectors: Tensor) -> None:
        self._first_vectors.append(vectors)

    def _quantize(self, vectors: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if self.is_learning and not self.is_initialized:
            self._initialize(vectors.detach())
        codes = self._choose(vectors.detach())
        if self.is_learning:
            self._vectors.append(vectors.detach())
            self._codes.append(codes)
        entries = self._look_up(codes)
        gradient_source = rotation_trick(vectors, entries) if self.rotates else vectors
        return straight_through(entries, gradient_source), codes, {"commitment": F.mse_loss(vectors, entries)}

    def _choose(self, vectors: Tensor) -> Tensor:
        return nearest(vectors, self.codebook)

    def _look_up(self, codes: Tensor) -> Tensor:
        return self.codebook[codes]

    @torch.no_grad()
    def _initialize(self, local_vectors: Tensor) -> None:
        """Set the entries by k-means of all processes' vectors (n, d), unless a centre is not finite. Collective."""
        vectors = self.gather(local_vectors)
        centres, counts = kmeans(vectors, self.num_codes, normalize=self._project)
        # Average the centres of all processes: entries must be equal even if their k-means rounded differently.
        packed = torch.cat([centres, counts[:, None]], dim=1).to(sum_dtype(vectors.device))
        packed = self.all_reduce(packed) / self.world_size
        centres, counts = packed[:, :-1].float(), packed[:, -1].float()
        is_finite = centres.isfinite().all()
        sums = centres * counts[:, None]
        for old, new in ((self.codebook, centres), (self.code_counts, counts), (self.code_sums, sums)):
            old.copy_(torch.where(is_finite, new, old))
        self.initialized |= is_finite

    def _project(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=-1) if self.cosine else vectors


def rotation_trick(vectors: Tensor, entries: Tensor) -> Tensor:
    """Vectors e (n, d) turned and scaled onto their entries q (n, d), with the gradient of a constant turn:
    Fifty et al. 2024, "Restructuring Vector Quantization with the Rotation Trick", section 4.2. The angle between a
    gradient and an entry becomes the angle between the vector's gradient and the vector.

        |q| / |e| (I - 2 r r^T + 2 q1 e1^T) e    with e1 = e / |e|, q1 = q / |q|, r = (e1 + q1) / |e1 + q1|
    """
    with torch.no_grad():
        norms, entry_norms = (x.norm(dim=1, keepdim=True) for x in (vectors, entries))
        e1, q1 = F.normalize(vectors, dim=1), F.normalize(entries, dim=1)
        r, scale = F.normalize(e1 + q1, dim=1), entry_norms / norms.clamp_min(_MIN_LENGTH)
    along_r, along_e1 = ((vectors * axis).sum(1, keepdim=True) for axis in (r, e1))
    return scale * (vectors - 2 * along_r * r + 2 * along_e1 * q1)


def nearest(vectors: Tensor, entries: Tensor) -> Tensor:
    """Vectors (n, d) and entries (K, d) -> codes (n,) int64: the entry with the smallest Euclidean distance."""
    half_squares = entries.square().sum(1) / 2
    chunk_size = max(_MAX_DISTANCES // len(entries), 1)
    # |v - e|^2 / 2 = |e|^2 / 2 - <v, e> + a term without e
    return torch.cat([(half_squares - chunk @ entries.T).argmin(1) for chunk in vectors.split(chunk_size)])


def kmeans(
    vectors: Tensor, num_clusters: int, normalize: Callable[[Tensor], Tensor], iterations: int = 10
) -> tuple[Tensor, Tensor]:
    """k-means: Lloyd's iterations from randomly chosen vectors. The seed of the choice is the same in every call.

    Args:
        vectors: (n, d) fp32. With fewer vectors than clusters, some centres start equal; a vector counts for
            the first of equal centres.
        normalize: Applied to the means: scaling to length 1 for spherical k-means, else the identity.

    Returns:
        Centres (num_clusters, d) fp32, and how many vectors are nearest to each (num_clusters,) fp32. A centre without
        vectors stays where it is.
    """
    generator = torch.Generator().manual_seed(0)
    start_indices = torch.randperm(len(vectors), generator=generator).to(vectors.device)
    centres = vectors[start_indices[torch.arange(num_clusters, device=vectors.device) % len(vectors)]]
    for _ in range(iterations):
        counts, sums = sums_by_code(vectors, nearest(vectors, centres), num_clusters)
        means = normalize((sums / counts.clamp_min(1)[:, None]).float())
        centres = torch.where(counts[:, None] > 0, means, centres)
    counts, _ = sums_by_code(vectors, nearest(vectors, centres), num_clusters)
    return centres, counts.float()


def sums_by_code(vectors: Tensor, codes: Tensor, num_codes: int) -> tuple[Tensor, Tensor]:
    """Vectors (n, d) and their codes (n,) -> the number of vectors with each code (K,) and their sums (K, d), fp64.

    Vectors are sorted by code, then those of each code are added in order: `index_add_` on a GPU adds in any order.
    The host does not wait for the device.
    """
    order = codes.argsort(stable=True)
    counts = torch.zeros(num_codes, dtype=torch.int64, device=codes.device)
    counts.scatter_add_(0, codes, torch.ones_like(codes))
    starts = counts.cumsum(0) - counts
    dtype = sum_dtype(vectors.device)
    return counts.to(dtype), F.embedding_bag(order, vectors.to(dtype), starts, mode="sum")


def _mix(x: Any) -> Any:
    """A one-to-one scrambling of 32-bit integers, by xor-shifts and multiplications."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * _MULTIPLIER & _MASK
    return (x >> 16) ^ x


def random_indices(count: int, bound: int, seed: int, step: int, device: torch.device) -> Tensor:
    """int64 (count,) in [0, bound), bound < 2^32; the k-th depends on (seed, step, k) only."""
    key = _mix(_mix(seed & _MASK) ^ (step & _MASK))
    return _mix(_mix(torch.arange(count, device=device)) ^ key) % bound
