"""How easily continuous latents of images can be generated, judged without training a generator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.devices import fp64_device
from tandem.hashing import Draws
from tandem.transforms import Transform, possible_sizes

from .averages import AllReduce, identity

BANDS = 8  # of frequencies, of equal width, from constant to the finest stripes of the grid
NEIGHBOURS = 10  # of a latent, one of which is drawn
# Terms are rounded to multiples of this, so that float64 sums of them are exact in any order: of a million images whose
# latents have deviations up to 5.
_STEP = 2.0**-28
_DEAD = 0.01  # deviation of a channel that says nothing, as a share of the root mean square of all deviations


class LatentStatistics:
    """Statistics of the latents of images; over all processes, with the same bits on any number of them.

    Args:
        encode: Images (b, c, h, w) in [0, 1] -> latents (b, d, h', w').
        shape: (d, h', w').
    """

    def __init__(
        self, encode: Callable[[Tensor], Tensor], shape: Sequence[int], device: torch.device | str = "cpu"
    ) -> None:
        self._encode, self.shape = encode, tuple(shape)
        channels, rows, columns = self.shape
        turns = (1, 2, 3) if rows == columns else (2,)
        transforms = [*((4, turn) for turn in turns), *((size, 0) for size in possible_sizes(rows, columns)[1:])]
        self._transforms = transforms  # the `Transform.quarters` and turns of all images, of each error
        # Number of images; means and mean squares of the channels; energies of the bands of latents and of images, and
        # the relative errors of the transforms.
        n = 1 + 2 * channels + 2 * BANDS + len(transforms)
        self._sums = torch.zeros(n, dtype=torch.float64, device=fp64_device(device))
        self._sizes = (1, channels, channels, BANDS, BANDS, len(transforms))

    @torch.no_grad()
    def add(self, images: Tensor, latents: Tensor) -> None:
        """Add images (b, c, h, w) in [0, 1] and their latents (b, d, h', w')."""
        wide = latents.to(self._sums)
        shrunk = F.adaptive_avg_pool2d(images.float(), (latents.shape[-2], latents.shape[-1]))
        errors = [self._equivariance_error(images, latents, *arguments) for arguments in self._transforms]
        terms = [
            wide.new_ones(len(wide), 1), wide.mean((2, 3)), wide.square().mean((2, 3)), band_energies(wide),
            band_energies(shrunk.to(self._sums)),
            torch.stack(errors, 1).to(self._sums),
        ]  # fmt: skip
        self._sums += ((torch.cat(terms, dim=1) / _STEP).round() * _STEP).sum(0)

    def result(self, all_reduce: AllReduce = identity) -> dict[str, float | list[float]]:
        """Values by name; lists have an entry for each channel or band. Collective: one all-reduce."""
        count, *parts = (all_reduce(self._sums.clone()).cpu()).split(self._sizes)
        means, squares, bands, image_bands, errors = (part / count for part in parts)
        deviations = (squares - means.square()).clamp_min(0).sqrt()
        live = deviations > _DEAD * deviations.square().mean().sqrt()
        shares, image_shares = (energies / energies.sum().clamp_min(1e-30) for energies in (bands, image_bands))
        return {
            "equivariance_error": errors.mean().item(),
            "fine_energy": shares[BANDS // 2 :].sum().item(),
            "dead_channels": int((~live).sum()),
            "channel_means": means.tolist(),
            "channel_deviations": deviations.tolist(),
            "spectrum": shares.tolist(),
            "image_spectrum": image_shares.tolist(),
        }

    def _equivariance_error(self, images: Tensor, latents: Tensor, quarters: int, turns: int) -> Tensor:
        """|T E(x) - E(T x)|^2 / |E(T x)|^2 of each image for one transform T, (b,)."""
        transform = Transform(quarters, torch.full((len(images),), turns, device=images.device))
        changed_latents, latents_of_changed = (
            transform(latents.float()),
            self._encode(transform(images)),
        )
        error, size = (
            x.square().flatten(1).sum(1)
            for x in (changed_latents - latents_of_changed.float(), latents_of_changed.float())
        )
        return error / size.clamp_min(1e-12)


def band_energies(x: Tensor) -> Tensor:
    """Maps (b, c, h, w) -> (b, 8): the energy of their cosines (DCT-II, orthonormal) by frequency, without the constant
    one, a mean over channels and places. A cosine of k half waves along a side of n places is in band floor(8 k / n);
    of its two bands, along height and width, the higher one counts."""
    *_, height, width = x.shape
    coefficients = _cosines(height).to(x) @ x @ _cosines(width).to(x).T
    rows, columns = (torch.arange(side) * BANDS // side for side in (height, width))
    band = torch.maximum(rows[:, None], columns[None]).flatten().to(x.device)
    energies = coefficients.square().mean(1).flatten(1) / (height * width)
    energies[:, 0] = 0
    return energies @ F.one_hot(band, BANDS).to(energies)


def _cosines(n: int) -> Tensor:
    """The orthonormal DCT-II, float64 (n, n): a row for each frequency."""
    places, waves = torch.arange(n, dtype=torch.float64) + 0.5, torch.arange(n, dtype=torch.float64)[:, None]
    matrix = torch.cos(math.pi / n * waves * places) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix


def between_neighbours(latents: Tensor, rows: Sequence[int], seed: int = 0) -> Tensor:
    """For the latents of some rows, points half way to a neighbour: (len(rows), d, h, w).

    A neighbour is one of the ten latents with the least angle, other than the latent itself, drawn with probabilities
    softmax(-mean squared distance), and the point is half way to it on the sphere (slerp), as in the interpolated FID
    of Xu et al. 2026 (arXiv:2603.05630) and its authors' code. There, latents of a training set are the neighbours of
    those of a validation set; here, all are of one set.

    Args:
        latents: (n, d, h, w) of all images, n at least 2.
        rows: Indices in `latents`.
        seed: Of the draws, each of which is a function of the seed and the row.
    """
    flat = latents.flatten(1)
    units, queries = F.normalize(flat, dim=1), flat[list(rows)]
    cosines = F.normalize(queries, dim=1) @ units.T
    cosines[torch.arange(len(rows)), list(rows)] = -math.inf
    nearest = cosines.topk(min(NEIGHBOURS, len(latents) - 1), dim=1).indices.sort(1).values
    distances = (flat[nearest] - queries[:, None]).square().mean(-1)
    cumulative = distances.neg().softmax(1).cumsum(1)
    draws = torch.tensor([Draws("neighbour", seed, row).uniform() for row in rows]).to(cumulative)
    chosen = (cumulative < draws[:, None]).sum(1).clamp_max(nearest.shape[1] - 1)
    others = flat[nearest.gather(1, chosen[:, None])[:, 0]]
    cosine = F.cosine_similarity(queries, others)[:, None].clamp(-1, 1)
    share = 0.5 / ((1 + cosine) / 2).sqrt().clamp_min(1e-6)  # sin(a / 2) / sin(a) of the angle a
    return (share * (queries + others)).unflatten(1, latents.shape[1:])


class LatentMeasures:
    """The `LatentStatistics` of images, of which each process adds some, and their latents.

    Args:
        encode: Images (b, c, h, w) in [0, 1] -> latents (b, d, h', w').
        keep: Whether `all_latents` will be called.
    """

    def __init__(
        self, encode: Callable[[Tensor], Tensor], shape: Sequence[int], device: torch.device | str, *, keep: bool = True
    ) -> None:
        self.statistics, self._keep = LatentStatistics(encode, shape, device), keep
        self._latents: dict[int, Tensor] = {}  # by the index of the image, in the memory of the host

    def add(self, images: Tensor, latents: Tensor, indices: Sequence[int]) -> None:
        """Add images (b, c, h, w) in [0, 1], their latents, and their indices in the set."""
        self.statistics.add(images, latents)
        if self._keep:
            self._latents |= dict(zip(indices, latents.float().cpu(), strict=True))

    def all_latents(self, n: int, all_reduce: AllReduce = identity) -> Tensor:
        """The latents of the images of all processes, on the host, in the order of their set of `n` images; images that
        were not added are left out. Collective: two all-reduces."""
        shape = self.statistics.shape
        latents, is_present = torch.zeros(n, *shape), torch.zeros(n)
        for index, latent in self._latents.items():
            latents[index], is_present[index] = latent, 1
        return all_reduce(latents).cpu()[all_reduce(is_present).cpu() > 0]
