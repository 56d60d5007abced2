"""Sums over features: the same bits in any order, and the values of torch-fidelity."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch_fidelity.metric_isc import isc_features_to_metric

from tandem.training.metrics.feature_statistics import FeatureStatistics
from tandem.training.metrics.fid import FrechetStatistics

DIM = 6
HEAD = torch.randn(DIM, 1008, generator=torch.Generator().manual_seed(1))


class Network:
    """Samples are their own features; a sample's logits do not depend on the others, as a product of all might."""

    def __call__(self, samples: Tensor) -> Tensor:
        return samples

    def logits(self, features: Tensor) -> Tensor:
        return torch.stack([row @ HEAD for row in features])


def samples() -> Tensor:
    return torch.randn(50, DIM, generator=torch.Generator().manual_seed(0)).exp()


def sums(*parts: Tensor) -> FeatureStatistics:
    features = FeatureStatistics(Network(), DIM)
    for part in parts:
        features.add(part)
    return features


def test_no_order_and_no_number_of_processes_changes_a_bit() -> None:
    whole, score = sums(*samples().split(7)).result()
    mixed = samples()[torch.randperm(50, generator=torch.Generator().manual_seed(2))]
    two = [sums(*mixed[:19].split(1)), sums(mixed[19:])]
    parts = iter([two[1]._statistics._moments, two[1]._sums])
    again, same_score = two[0].result(lambda own: next(parts) + own)
    assert torch.equal(whole.mean, again.mean) and torch.equal(whole.covariance, again.covariance)
    assert score == same_score


def test_values_are_those_without_the_grid() -> None:
    found, score = sums(*samples().split(7)).result()
    plain = FrechetStatistics(DIM)
    plain.add(samples())
    torch.testing.assert_close(found.mean, plain.result().mean, rtol=0, atol=2**-17)
    torch.testing.assert_close(found.covariance, plain.result().covariance, rtol=0, atol=2**-15)
    expected = isc_features_to_metric(Network().logits(samples()), splits=1, shuffle=False)["inception_score_mean"]
    assert score["inception_score"] == pytest.approx(expected, rel=1e-5)


def test_a_network_without_classes_gives_no_score() -> None:
    features = FeatureStatistics(lambda samples: samples, DIM)
    features.add(samples())
    assert features.result()[1] == {}
    with pytest.raises(ValueError, match="at least 2"):
        sums().result()


def test_the_score_of_equal_samples_is_one() -> None:
    assert sums(samples()[:1].expand(5, -1)).result()[1]["inception_score"] == pytest.approx(1, abs=1e-6)
    assert math.isfinite(sums(100 * samples()).result()[1]["inception_score"])
