"""Quality of generated images: FID, KID, inception score, LPIPS and cosines, over all batches and processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from .averages import AllReduce, Averages, identity
from .fid import FrechetStatistics, Gaussian, frechet_distance

if TYPE_CHECKING:
    from .fid import Inception

Gather = Callable[[Tensor], Tensor]
EmbeddingPair = tuple[Tensor, Tensor]

_SUBSETS, _SUBSET_SIZE = 100, 1000  # of KID, as published
_CHUNK_SIZE = 4096  # features that are converted to float64 at a time

# By network: the metrics that need it, and the flag that names its weights.
_METRICS_BY_NETWORK = {
    "inception": ("FID, KID and inception score", "--fid_weights"),
    "lpips": ("LPIPS", "--lpips_weights"),
    "clip": ("CLIP score", "--clip"),
}


def missing_metrics_text(networks: Mapping[str, object | None]) -> str | None:
    """One line that names the metrics whose network is missing; None if there are none.

    Args:
        networks: "inception", "lpips" and "clip", or some of them, by name; None or absent if there are no weights.
    """
    needs = _METRICS_BY_NETWORK.items()
    missing = [f"{metrics} ({flag})" for name, (metrics, flag) in needs if networks.get(name) is None]
    return f"not measured, because their weights are not given: {', '.join(missing)}" if missing else None


class Distributions:
    """Distances between the features of real and of generated images. `result` gives every process the features of all
    images, in fp32: 16 KB for a pair of images with Inception's 2048 features each. KID and inception score are
    computed by torch-fidelity, as published values are.

    - `fid`: see `frechet_distance`.
    - `kid` (Binkowski et al. 2018) and `kid_std`: mean and standard deviation over 100 pairs of random subsets, of 1000
      images each; of fewer images, all are compared once, and there is no `kid_std`. Unlike FID, it is not biased for
      few images.
    - `inception_score` of the generated images (Salimans et al. 2016), over all of them at once. The mean over ten
      parts of the images, which is often published, is a little lower.
    """

    def __init__(self, network: Inception, device: torch.device | str = "cpu") -> None:
        self._network = network
        self._features = [torch.empty(0, 2 * network.dim, device=device)]
        self._positions = [torch.empty(0, dtype=torch.int64, device=device)]

    def add(self, real: Tensor, generated: Tensor, positions: Sequence[int]) -> None:
        """Add real and generated images (b, 3, h, w) in [0, 1]. Positions in the whole set, each once, make the values
        independent of how the set is spread over processes."""
        features = torch.cat([self._network(real), self._network(generated)], dim=1)
        self._features.append(features.to(self._features[0]))
        self._positions.append(torch.as_tensor(positions).to(self._positions[0]))

    def result(self, gather: Gather = identity) -> dict[str, float]:
        """Values by name. Collective: the features are gathered once.

        Raises:
            ValueError: fewer than 2 pairs in all.
        """
        from torch_fidelity.metric_isc import isc_features_to_metric
        from torch_fidelity.metric_kid import kid_features_to_metric

        features, positions = gather(torch.cat(self._features)), gather(torch.cat(self._positions))
        real, generated = features[positions.argsort()].chunk(2, dim=1)
        size = min(_SUBSET_SIZE, len(real))
        fid = frechet_distance(*(_gaussian(images) for images in (real, generated)))
        options = {"kid_subsets": _SUBSETS if size < len(real) else 1, "kid_subset_size": size, "verbose": False}
        kid = kid_features_to_metric(real.cpu(), generated.cpu(), **options)
        score = isc_features_to_metric(self._network.logits(generated).cpu(), splits=1, shuffle=False)
        return {
            "fid": fid,
            "kid": float(kid["kernel_inception_distance_mean"]),
            **({"kid_std": float(kid["kernel_inception_distance_std"])} if size < len(real) else {}),
            "inception_score": score["inception_score_mean"],
        }


def _gaussian(features: Tensor) -> Gaussian:
    statistics = FrechetStatistics(features.shape[1], features.device)
    for chunk in features.split(_CHUNK_SIZE):
        statistics.add(chunk)
    return statistics.result()


class GenerationQuality:
    """Metrics of generated images beside the real images of the same conditions, over all processes. A metric whose
    network is not given is left out.

    - `fid`, `kid`, `kid_std`, `inception_score`: see `Distributions`.
    - `lpips`: mean perceptual distance of a generated image from the real one of its condition.
    - mean cosines of embeddings, under names of the caller, such as `clip_score` of images and captions (Hessel et al.
      2021, without its factor of 2.5 and without cutting off negative values).

    Args:
        device: Device of sums and features.
        inception: Network of FID, KID and inception score.
        lpips: Generated and real images (b, c, h, w) in [0, 1] -> distances (b,), such as `PerceptualLoss.distances`.
        cosines: Names of the mean cosines; the same on every process.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        inception: Inception | None = None,
        lpips: Callable[[Tensor, Tensor], Tensor] | None = None,
        cosines: Sequence[str] = (),
    ) -> None:
        self._distributions = Distributions(inception, device) if inception else None
        self._lpips = lpips
        self._names = [*(["lpips"] if lpips else []), *cosines]
        self._averages = Averages(*self._names, device=device)

    @torch.no_grad()
    def add(self, real: Tensor, generated: Tensor, positions: Sequence[int], **cosines: EmbeddingPair) -> None:
        """Add real images and generated ones (b, c, h, w), clamped to [0, 1], of the same b conditions.

        Args:
            positions: Places of the b conditions in the whole set, each once over all processes.
            cosines: Two embeddings (b, d) of any norm by name, whose mean cosine is measured.
        """
        real, generated = real.clamp(0, 1), generated.clamp(0, 1)
        if self._distributions:
            self._distributions.add(real, generated, positions)
        if self._lpips is not None:
            self._averages.add(lpips=self._lpips(generated, real))
        for name, (first, second) in cosines.items():
            self._averages.add(**{name: functional.cosine_similarity(first.float(), second.float())})

    @torch.no_grad()
    def result(self, all_reduce: AllReduce = identity, gather: Gather = identity) -> dict[str, float]:
        """Values by name over all processes, some of which may have added nothing. Collective.

        Args:
            all_reduce: Sum of a tensor over the processes.
            gather: Rows of all processes' tensors, whose numbers may differ.

        Raises:
            ValueError: fewer than 2 images in all, for measures of distributions.
        """
        values = self._distributions.result(gather) if self._distributions else {}
        return {**values, **(self._averages.result(all_reduce) if self._names else {})}
