"""Quality of generated images beside real ones, from sums and features that pool exactly over batches and processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .averages import AllReduce, Averages, no_reduce
from .fid import FrechetStatistics, frechet_distance

Gather = Callable[[Tensor], Tensor]
Pairs = tuple[Tensor, Tensor]

# Measures by the network that they need, and the flag that names the network's weights.
_NEEDS = {
    "inception": ("FID, KID and inception score", "--fid_weights"),
    "lpips": ("LPIPS", "--lpips_weights"),
    "clip": ("CLIP score", "--clip"),
}


class Features(Protocol):
    """A network that describes images, such as `training.measures.fid.Inception`."""

    @property
    def dim(self) -> int:
        """Length of a feature vector."""

    @property
    def classes(self) -> int:
        """Length of `logits`; 0 for a network without a layer of classes."""

    def __call__(self, images: Tensor) -> Tensor:
        """Images (b, 3, h, w) in [0, 1] -> feature vectors (b, dim)."""

    def logits(self, features: Tensor) -> Tensor:
        """Feature vectors (b, dim) -> logits of classes (b, classes)."""


def no_gather(tensor: Tensor) -> Tensor:
    """The gather of a single process: returns its tensor unchanged."""
    return tensor


def left_out(networks: Mapping[str, object | None]) -> str | None:
    """One line on the measures that are missing because their network is; None if all are there.

    Args:
        networks: "inception", "lpips" and "clip", or some of them, by name; None or absent if there are no weights.
    """
    missing = [f"{what} ({flag})" for name, (what, flag) in _NEEDS.items() if networks.get(name) is None]
    return f"not measured without the weights that they need: {', '.join(missing)}" if missing else None


def squared_mmd(x: Tensor, y: Tensor) -> Tensor:
    """Unbiased estimate of the squared maximum mean discrepancy of two sets of vectors (n, d) and (m, d), n, m >= 2,
    under the kernel (x . y / d + 1)^3; 0-d float64. Around 0 for two sets of one distribution, so it may be negative.

    Gretton et al. 2012, equation 3; with this kernel of Inception features, the KID of Binkowski et al. 2018.
    """
    n, m, d = len(x), len(y), x.shape[1]

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast(a.device.type, enabled=False):
            return (a @ b.T / d + 1).double() ** 3

    of_x, of_y = kernel(x, x), kernel(y, y)
    within_x = (of_x.sum() - of_x.diagonal().sum()) / (n * (n - 1))
    within_y = (of_y.sum() - of_y.diagonal().sum()) / (m * (m - 1))
    return within_x + within_y - 2 * kernel(x, y).mean()


class KernelDistance:
    """Kernel inception distance (Binkowski et al. 2018): the mean of `squared_mmd` over random subsets.

    Unlike FID it is not biased for few images. Every process holds the features of all, fp32: 16 KB for a pair of
    images with Inception's 2048 numbers each.

    Args:
        dim: Length d of a vector.
        subsets, subset_size: Published values have 100 of 1000 vectors each, drawn without replacement. If there are no
            more vectors than that, all of them are compared once.
    """

    def __init__(
        self, dim: int, device: torch.device | str = "cpu", *, subsets: int = 100, subset_size: int = 1000
    ) -> None:
        assert subsets >= 1 and subset_size >= 2
        self._subsets, self._subset_size = subsets, subset_size
        self._features = [torch.empty(0, 2 * dim, device=device)]
        self._positions = [torch.empty(0, dtype=torch.int64, device=device)]

    def add(self, real: Tensor, generated: Tensor, positions: Sequence[int]) -> None:
        """Add vectors (b, d) of real and of generated images. Positions in the whole set, each once, make the subsets
        independent of how the set is spread over processes."""
        (features, *_), (numbers, *_) = self._features, self._positions
        self._features.append(torch.cat([real, generated], dim=1).detach().to(features))
        self._positions.append(torch.as_tensor(positions).to(numbers))

    def result(self, gather: Gather = no_gather) -> dict[str, float]:
        """`kid`, and `kid_std`, the standard deviation over the subsets, if there are several. Collective: the features
        are gathered once.

        Raises:
            ValueError: fewer than 2 pairs in all.
        """
        features, positions = gather(torch.cat(self._features)), gather(torch.cat(self._positions))
        n, size = len(features), min(self._subset_size, len(features))
        if n < 2:
            raise ValueError(f"a kernel distance of {n} images: give at least 2, better thousands")
        real, generated = features[positions.argsort()].chunk(2, dim=1)
        random = torch.Generator().manual_seed(0)  # on the CPU, so that every device draws the same subsets
        distances = []
        for _ in range(self._subsets if size < n else 1):
            rows, others = (torch.randperm(n, generator=random)[:size].to(features.device) for _ in range(2))
            distances.append(squared_mmd(real[rows], generated[others]))
        found = torch.stack(distances)
        spread = {"kid_std": found.std(correction=0).item()} if len(found) > 1 else {}
        return {"kid": found.mean().item(), **spread}


class InceptionScore:
    """Inception score (Salimans et al. 2016): the exponential of the mean divergence, in nats, of the classes p(y | x)
    of an image from those of all images. From 1, if all images are judged alike, to the number of classes.

    Over all images at once. Values that are published as a mean over ten parts of the images are a little lower.

    Args:
        classes: Number of classes.
        device: Device of the sums, float64.
    """

    def __init__(self, classes: int, device: torch.device | str = "cpu") -> None:
        # Of the probabilities of each class, of p log p over all classes, and of the images.
        self._sums = torch.zeros(classes + 2, dtype=torch.float64, device=device)

    def add(self, logits: Tensor) -> None:
        """Add logits (b, classes) of generated images."""
        log_p = logits.detach().double().log_softmax(1)
        p = log_p.exp()
        of_batch = torch.cat([p.sum(0), (p * log_p).sum()[None], p.new_tensor([len(p)])])
        self._sums += of_batch.to(self._sums)

    def result(self, all_reduce: AllReduce = no_reduce) -> float:
        """The score over all processes; NaN without images. Collective: one all-reduce."""
        sums = all_reduce(self._sums.clone())
        mean, negative_entropy = sums[:-2] / sums[-1], sums[-2] / sums[-1]
        return math.exp((negative_entropy - torch.special.xlogy(mean, mean).sum()).item())


class GenerationQuality:
    """Measures of generated images beside the real images of the same conditions, over all processes; each only if its
    network is given.

    - `fid`, `kid` (and `kid_std`): distances of the distributions of features; see `frechet_distance` and
      `KernelDistance`.
    - `inception_score`: of the generated images; see `InceptionScore`.
    - `lpips`: mean perceptual distance of a generated image from the real one of its condition.
    - mean cosines of embeddings, under names of the caller, such as `clip_score` of images and captions (Hessel et al.
      2021, without its factor of 2.5 and without cutting off negative values).

    Args:
        device: Device of sums and features.
        inception: Network of FID, KID and inception score.
        lpips: Generated and real images (b, c, h, w) in [0, 1] -> distances (b,), such as `PerceptualLoss.distances`.
        cosines: Names of the mean cosines; the same on every process.
        kid_subsets, kid_subset_size: See `KernelDistance`.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        inception: Features | None = None,
        lpips: Callable[[Tensor, Tensor], Tensor] | None = None,
        cosines: Sequence[str] = (),
        kid_subsets: int = 100,
        kid_subset_size: int = 1000,
    ) -> None:
        self._inception, self._lpips = inception, lpips
        self._averages = Averages(*(["lpips"] if lpips else []), *cosines, device=device)
        self._names = [*(["lpips"] if lpips else []), *cosines]
        if inception is not None:
            self._real, self._generated = (FrechetStatistics(inception.dim, device) for _ in range(2))
            self._kid = KernelDistance(inception.dim, device, subsets=kid_subsets, subset_size=kid_subset_size)
            self._score = InceptionScore(inception.classes, device) if inception.classes else None

    @torch.no_grad()
    def add(self, real: Tensor, generated: Tensor, positions: Sequence[int], **cosines: Pairs) -> None:
        """Add real images and generated ones (b, c, h, w), clamped to [0, 1], of the same b conditions.

        Args:
            positions: Places of the b conditions in the whole set, each once over all processes.
            cosines: Two embeddings (b, d) of any length by name, of which the mean cosine is taken.
        """
        real, generated = real.clamp(0, 1), generated.clamp(0, 1)
        if self._inception is not None:
            of_real, of_generated = self._inception(real), self._inception(generated)
            self._real.add(of_real)
            self._generated.add(of_generated)
            self._kid.add(of_real, of_generated, positions)
            if self._score is not None:
                self._score.add(self._inception.logits(of_generated))
        if self._lpips is not None:
            self._averages.add(lpips=self._lpips(generated, real))
        for name, (one, other) in cosines.items():
            self._averages.add(**{name: functional.cosine_similarity(one.float(), other.float())})

    @torch.no_grad()
    def result(self, all_reduce: AllReduce = no_reduce, gather: Gather = no_gather) -> dict[str, float]:
        """Values by name over all processes, some of which may have added nothing. Collective.

        Args:
            all_reduce: Sum of a tensor over the processes.
            gather: Rows of all processes' tensors, whose numbers may differ.

        Raises:
            ValueError: fewer than 2 images in all, for measures of distributions.
        """
        values: dict[str, float] = {}
        if self._inception is not None:
            values["fid"] = frechet_distance(self._real.result(all_reduce), self._generated.result(all_reduce))
            values |= self._kid.result(gather)
            if self._score is not None:
                values["inception_score"] = self._score.result(all_reduce)
        return {**values, **(self._averages.result(all_reduce) if self._names else {})}
