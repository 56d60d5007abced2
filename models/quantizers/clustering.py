"""Nearest codebook entries, and k-means."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .statistics import sums_by_code

# Pairs of a vector and an entry that are compared at a time: 256 MiB of distances.
_PAIRS_AT_ONCE = 2**26


def nearest(vectors: Tensor, entries: Tensor) -> Tensor:
    """Vectors (n, d) and entries (K, d) -> codes (n,) int64: the entry with the smallest Euclidean distance."""
    half_squares = entries.square().sum(1) / 2
    rows = max(_PAIRS_AT_ONCE // len(entries), 1)
    # |v - e|^2 / 2 = |e|^2 / 2 - <v, e> + a term without e
    return torch.cat([(half_squares - part @ entries.T).argmin(1) for part in vectors.split(rows)])


def kmeans(
    vectors: Tensor, num_clusters: int, normalize: Callable[[Tensor], Tensor], iterations: int = 10
) -> tuple[Tensor, Tensor]:
    """k-means: Lloyd's iterations from randomly chosen vectors. The seed of the choice is the same in every call.

    Args:
        vectors: (n, d) fp32. With fewer vectors than clusters, some centres start equal; vectors go to the first.
        normalize: Applied to the means: scaling to length 1 for spherical k-means, else the identity.

    Returns:
        Centres (num_clusters, d) fp32, and how many vectors are nearest to each (num_clusters,) fp32. A centre without
        vectors stays where it is.
    """
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(vectors), generator=generator).to(vectors.device)
    centres = vectors[chosen[torch.arange(num_clusters, device=vectors.device) % len(vectors)]]
    for _ in range(iterations):
        counts, sums = sums_by_code(vectors, nearest(vectors, centres), num_clusters)
        means = normalize((sums / counts.clamp_min(1)[:, None]).float())
        centres = torch.where(counts[:, None] > 0, means, centres)
    counts, _ = sums_by_code(vectors, nearest(vectors, centres), num_clusters)
    return centres, counts.float()
