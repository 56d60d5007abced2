"""Profiles of averages: their lengths, their inner products against sums over updates, and averages made of others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tandem.training.power_function import LONGEST, Profile, coefficients, exponent_of, inner_products, length_of


def shares(updates: int, exponent: float, last: int | None = None) -> np.ndarray:
    """How much each update counts in an average, from its recurrence: (last,), 0 after `updates`."""
    of_update = np.zeros(last or updates)
    for n in range(1, updates + 1):
        kept = (1 - 1 / n) ** (exponent + 1)
        of_update[: n - 1] *= kept
        of_update[n - 1] = 1 - kept
    return of_update


def test_the_exponents_of_lengths_are_the_published_ones() -> None:
    """Karras et al. 2024, section 3.1: 0.05 and 0.10 are 16.97 and 6.94."""
    assert exponent_of(0.05) == pytest.approx(16.97, abs=5e-3) and exponent_of(0.10) == pytest.approx(6.94, abs=5e-3)
    for length in (1e-4, 0.05, 0.2, LONGEST):
        assert length_of(exponent_of(length)) == pytest.approx(length, rel=1e-12)
    assert exponent_of(LONGEST) == pytest.approx(0, abs=1e-6)
    for length in (0.0, -0.1, 0.2888, float("nan")):
        with pytest.raises(ValueError, match=r"at most 0\.2887"):
            exponent_of(length)


@pytest.mark.parametrize("length", [0.05, 0.1, 0.25])
def test_the_length_is_the_standard_deviation_of_when_the_averaged_weights_were_made(length: float) -> None:
    times, of_update = (np.arange(20_000) + 0.5) / 20_000, shares(20_000, exponent_of(length))
    mean = (of_update * times).sum()
    # The shares are the density's integrals over intervals of 1 / 20 000.
    assert np.sqrt((of_update * (times - mean) ** 2).sum()) == pytest.approx(length, rel=1e-6)


def test_inner_products_are_those_of_the_densities() -> None:
    ones = [Profile(30, 16.97), Profile(100, 6.94), Profile(100, 0.5)]
    others = [Profile(100, 16.97), Profile(77, 2.0)]
    found = inner_products(ones, others)
    t = (np.arange(200_000) + 0.5) / 2000  # middle of small intervals up to 100

    def density(of: Profile) -> np.ndarray:
        return np.where(t < of.updates, (of.exponent + 1) / of.updates * (t / of.updates) ** of.exponent, 0)

    expected = [[(density(one) * density(other)).sum() / 2000 for other in others] for one in ones]
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # the densities jump inside of an interval of 1 / 2000
    assert torch.equal(found, inner_products(others, ones).T)
    # A million updates to the power of a thousand are far more than float64 holds.
    assert inner_products([Profile(1e6, 1000)], [Profile(1e6, 1000)]).item() == pytest.approx(1001**2 / 2001 / 1e6)


def stored(*updates: int) -> list[Profile]:
    return [Profile(end, exponent_of(length)) for end in updates for length in (0.05, 0.10)]


def test_a_profile_that_is_stored_is_taken_alone() -> None:
    for end in range(50, 1001, 50):
        found, distance = coefficients(stored(*range(50, 1001, 50)), Profile(end, exponent_of(0.10)))
        expected = torch.zeros(40, dtype=torch.float64)
        expected[2 * (end // 50) - 1] = 1
        assert torch.equal(found, expected) and distance < 1e-6


@pytest.mark.parametrize("length", [0.03, 0.07, 0.12, 0.2])
def test_what_is_made_counts_each_update_as_an_average_of_that_length_does(length: float) -> None:
    """As far as it says, which is less the more there is to choose from."""
    wanted = shares(1000, exponent_of(length))
    distances = []
    for every in (100, 50, 20):
        ends = range(every, 1001, every)
        found, distance = coefficients(stored(*ends), Profile(1000, exponent_of(length)))
        assert found.sum().item() == pytest.approx(1, abs=1e-12)
        made = sum(
            share * shares(int(of.updates), of.exponent, last=1000)
            for share, of in zip(found.numpy(), stored(*ends), strict=True)
        )
        off = np.linalg.norm(made - wanted) / np.linalg.norm(wanted)
        # `coefficients` compares densities. An update's share is a density's mean over an interval of length 1, a 20th
        # of what lies between two stored averages.
        assert off == pytest.approx(distance, rel=0.05)
        distances.append(distance)
    assert distances[0] > 2 * distances[1] > 4 * distances[2] and distances[2] < 0.005
