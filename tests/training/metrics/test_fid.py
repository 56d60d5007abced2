"""The Fréchet distance against SciPy and a closed form, pooling over processes, and FID's own network."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

from benchmarks.inception import random_inception
from tandem.training.metrics.fid import FrechetStatistics, Inception, frechet_distance
from tests.processes import on_processes


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def statistics(*parts: Tensor) -> FrechetStatistics:
    of_parts = FrechetStatistics(parts[0].shape[1])
    for part in parts:
        of_parts.add(part)
    return of_parts


@pytest.mark.parametrize(("scale", "offset"), [(3, 100), (1, 10_000)])
def test_mean_and_covariance_are_those_of_numpy(scale: float, offset: float) -> None:
    x = some(1000, 6) * scale + offset  # in fp32, the square of 10 000 is off by 8
    found = statistics(x[:200], x[200:]).result()
    np.testing.assert_allclose(found.mean, x.mean(0), rtol=1e-7)
    np.testing.assert_allclose(found.covariance, np.cov(x.numpy(), rowvar=False), rtol=1e-4, atol=1e-5)


def test_two_processes_with_unequal_shares_give_the_statistics_of_one() -> None:
    x = some(30, 5)
    one, shares = statistics(x).result(), [[x[:11]], [x[11:17], x[17:]]]
    for found in on_processes(2, lambda here: statistics(*shares[here.rank]).result(here.sum)):
        torch.testing.assert_close(found.mean, one.mean, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found.covariance, one.covariance, rtol=1e-12, atol=1e-14)


def test_distance_equals_scipys_matrix_square_root() -> None:
    a, b = statistics(some(200, 12) @ some(12, 12, seed=1)).result(), statistics(some(90, 12, seed=2) + 0.3).result()
    root = scipy.linalg.sqrtm((a.covariance @ b.covariance).numpy()).real
    expected = (a.mean - b.mean).square().sum() + (a.covariance + b.covariance).trace() - 2 * np.trace(root)
    assert frechet_distance(a, b) == pytest.approx(expected.item(), rel=1e-9)


def test_distance_of_a_distribution_from_itself_is_zero_and_never_negative_and_nan_where_it_is_not_finite() -> None:
    for vectors in (some(100, 20), some(7, 20)):  # 7 vectors have a covariance of rank 6
        one = statistics(vectors * 10).result()
        assert 0 <= frechet_distance(one, one) < 1e-4
    for pair in ((one, statistics(vectors / 0).result()), (statistics(vectors * math.nan).result(), one)):
        assert math.isnan(frechet_distance(*pair))


def test_distance_exists_where_both_covariances_are_singular() -> None:
    x, y = some(5, 20), some(6, 20, seed=1)
    found = frechet_distance(statistics(x).result(), statistics(y).result())
    # Of A^1/2 B A^1/2 only the singular values of X Y^T are not 0, with centred X and Y of 5 and 6 rows.
    x, y = (v - v.mean(0) for v in (x, y))
    root_trace = torch.linalg.svdvals(x @ y.T / math.sqrt(4 * 5)).sum()
    means = (some(5, 20).mean(0) - some(6, 20, seed=1).mean(0)).square().sum()
    expected = means + x.square().sum() / 4 + y.square().sum() / 5 - 2 * root_trace
    assert found == pytest.approx(expected.item(), rel=1e-6)


@pytest.fixture(scope="module")
def inception_weights() -> dict[str, Tensor]:
    return random_inception()


def test_inception_gives_2048_numbers_of_each_image_in_8_bits(inception_weights: dict[str, Tensor]) -> None:
    network = Inception(inception_weights)
    images = torch.rand(2, 3, 40, 32)
    images[:, 0, 0, 0] = torch.tensor([-0.5, 1.5])
    vectors = network(images)
    assert vectors.shape == (2, 2048) and vectors.dtype == torch.float32 and not vectors.requires_grad
    assert (vectors[0] - vectors[1]).abs().max() > 1e-3
    as_in_a_file = (images.clamp(0, 1) * 255).round() / 255
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(network(as_in_a_file), vectors)


def test_inception_scores_classes_as_torch_fidelity_does(inception_weights: dict[str, Tensor], tmp_path: Path) -> None:
    weights = {**inception_weights, "fc.bias": torch.arange(1008).half()}
    network = Inception(weights)
    torch.save(weights, tmp_path / "inception.pth")
    layers = ["2048", "logits_unbiased"]
    reference = FeatureExtractorInceptionV3("a", layers, feature_extractor_weights_path=str(tmp_path / "inception.pth"))
    vectors, expected = reference((torch.rand(2, 3, 32, 32) * 255).byte())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = network.logits(vectors)
    assert vectors.shape[1] == network.dim and logits.shape == (2, 1008)
    torch.testing.assert_close(logits, expected)


def test_without_torch_fidelity_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_fidelity.feature_extractor_inceptionv3", None)
    with pytest.raises(ValueError, match=r'FID needs torch-fidelity: pip install .*\[fid\]"'):
        Inception({})
