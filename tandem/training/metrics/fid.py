"""Fréchet inception distance (Heusel et al. 2017), from sums that pool exactly over batches and processes.

torchmetrics has the same sums, and the same distance to 1e-10. It computes the eigenvalues of a matrix that is not
symmetric: 1.1 to 1.3 times the processor time for 2048 features, and negative distances (-2e-4 between 100 images and
themselves). Its import takes 3.1 s and 263 MiB of each process, and an adapter to our processes would be as long as
this file.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.devices import double, fp64_device, full_precision
from tandem.io.installed import how_to_install
from tandem.io.published import INCEPTION, load_published_weights

from .averages import AllReduce, identity

INCEPTION_DIM = 2048


class Gaussian(NamedTuple):
    """A normal distribution, float64."""

    mean: Tensor  # (d,)
    covariance: Tensor  # (d, d)


class FrechetStatistics:
    """Mean and covariance of feature vectors.

    Args:
        dim: Length d of a vector.
        device: Of the vectors. The sums are on its `fp64_device`, (d + 1, d + 1): 34 MB for d = 2048, as Inception has
            it.
    """

    def __init__(self, dim: int, device: torch.device | str = "cpu") -> None:
        # Sum of (1, x)^T (1, x): the count, the sum, and the sum of outer products in one matrix.
        self._moments = torch.zeros(dim + 1, dim + 1, dtype=torch.float64, device=fp64_device(device))

    def add(self, features: Tensor) -> None:
        """Add vectors (n, d)."""
        x = double(features.detach()).to(self._moments.device)
        x = torch.cat([x.new_ones(len(x), 1), x], dim=1)
        self._moments.addmm_(x.T, x)

    def result(self, all_reduce: AllReduce = identity) -> Gaussian:
        """Mean and unbiased covariance over all processes. Collective: one all-reduce.

        Raises:
            ValueError: fewer than 2 vectors in all.
        """
        moments = all_reduce(self._moments.clone())
        count, total, outer = moments[0, 0], moments[0, 1:], moments[1:, 1:]
        if count < 2:
            raise ValueError(f"a Fréchet distance of {int(count)} images: give at least 2, better thousands")
        mean = total / count
        return Gaussian(mean, (outer - count * torch.outer(mean, mean)) / (count - 1))


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
    """|mean_a - mean_b|^2 + tr(A + B - 2 (A^1/2 B A^1/2)^1/2) of the covariances A and B (Dowson & Landau 1982).

    The outer root is of a symmetric matrix, so it is real even if the covariances, of fewer than d vectors, are
    singular. For d = 2048 it takes about a second on a GPU, up to a minute on a small CPU. NaN if a mean is not finite.
    """
    if not (a.mean + b.mean).isfinite().all():  # such as of the features of reconstructions that overflow
        return math.nan
    values, vectors = torch.linalg.eigh(a.covariance)
    root_of_a = (vectors * values.clamp_min(0).sqrt()) @ vectors.T  # rounding makes zeros slightly negative
    product = root_of_a @ b.covariance @ root_of_a
    root_trace = torch.linalg.eigvalsh((product + product.T) / 2).clamp_min(0).sqrt().sum()
    distance = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace() - 2 * root_trace
    return max(distance.item(), 0.0)


class ReconstructionFID:
    """rFID, the Fréchet inception distance between reconstructions and originals; with I3D's features of videos, rFVD.

    Args:
        features: Images (b, 3, h, w) or videos in [0, 1] -> vectors (b, dim), such as `Inception`.
    """

    def __init__(
        self, features: Callable[[Tensor], Tensor], dim: int = INCEPTION_DIM, device: torch.device | str = "cpu"
    ) -> None:
        self._features = features
        self._real, self._fake = FrechetStatistics(dim, device), FrechetStatistics(dim, device)

    @torch.no_grad()
    def add(self, images: Tensor, reconstructions: Tensor) -> None:
        """Add images and their reconstructions, both as `features` takes them."""
        self._real.add(self._features(images))
        self._fake.add(self._features(reconstructions))

    def result(self, all_reduce: AllReduce = identity) -> float:
        """The distance over all processes. Collective."""
        return frechet_distance(self._real.result(all_reduce), self._fake.result(all_reduce))


class Inception:
    """The network of the original FID, in fp32, under autocast too.

    Images are rounded to 8 bits and resized as TensorFlow 1 did, so that values are comparable with published ones.
    `weights`: the tensors by name of pt_inception-2015-12-05-6726825d.pth, which torch-fidelity and pytorch-fid
    publish.

    Raises:
        ValueError: one line, if torch-fidelity is not installed or the weights are those of another network.
    """

    dim = INCEPTION_DIM

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        try:
            from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
        except ImportError as error:
            raise ValueError(f"FID needs torch-fidelity: {how_to_install('fid')} ({error})") from None
        except RuntimeError as error:  # of a torchvision that was built for another PyTorch
            reason = " ".join(str(error).split())[:200]
            hint = "torchvision and PyTorch may not belong together: pip install --upgrade torch torchvision"
            raise ValueError(f"FID: torch-fidelity cannot be imported ({reason}); {hint}") from None
        # torch-fidelity unpickles a file, which can run code: pass a file that is made here and holds only tensors.
        file = io.BytesIO()
        torch.save(dict(weights), file)
        file.seek(0)
        try:
            network = FeatureExtractorInceptionV3("inception", ["2048"], feature_extractor_weights_path=file)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"these weights are not those of FID's Inception: {reason}") from None
        self._network = network.to(device)

    def __call__(self, images: Tensor) -> Tensor:
        """Images (b, 3, h, w), clamped to [0, 1] -> vectors (b, 2048)."""
        with full_precision(images.device.type):
            (vectors,) = self._network((images.float().clamp(0, 1) * 255).round().byte())
        return vectors

    def logits(self, features: Tensor) -> Tensor:
        """Vectors (b, 2048) -> logits of classes (b, 1008), without the layer's bias: the published inception scores
        are computed without it."""
        with torch.autocast(features.device.type, enabled=False):
            return features @ self._network.fc.weight.T


def load_inception(weights: str | None, device: torch.device, heartbeat: Callable[[], None]) -> Inception | None:
    """The network with the weights of --fid_weights, a file or "published"; None without any. `heartbeat` is called
    while they are fetched. Raises ValueError, in one line."""
    return Inception(load_published_weights(INCEPTION, weights, heartbeat), device) if weights else None
