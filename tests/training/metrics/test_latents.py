"""What evaluate.py says about latents, against SciPy, NumPy and closed forms."""

import math

import numpy as np
import pytest
import scipy.fft
import torch
from torch.nn import functional as F

from tandem.training.metrics.latents import BANDS, LatentMeasures, LatentStatistics, band_energies, between_neighbours
from tests.processes import on_processes


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_energies_are_those_of_scipys_cosine_transform():
    x = normal(2, 3, 16, 16).double()
    expected = scipy.fft.dctn(x.numpy(), axes=(2, 3), norm="ortho") ** 2
    band = np.maximum.outer(np.arange(16), np.arange(16)) * BANDS // 16
    for sample in range(2):
        energies = [expected[sample][:, band == number].sum() / (3 * 16 * 16) for number in range(BANDS)]
        energies[0] -= expected[sample, :, 0, 0].sum() / (3 * 16 * 16)
        np.testing.assert_allclose(band_energies(x)[sample].numpy(), energies, rtol=1e-10)


def test_a_constant_has_no_energy_and_the_finest_stripes_all_of_it_in_the_last_band():
    assert band_energies(torch.ones(1, 2, 8, 8).double()).abs().max() < 1e-12
    stripes = torch.cos(math.pi / 8 * 7 * (torch.arange(8).double() + 0.5)).expand(1, 1, 8, 8)
    assert band_energies(stripes)[0].argmax() == BANDS - 1
    assert band_energies(stripes)[0, :-1].sum() < 1e-12


def pool(images: torch.Tensor) -> torch.Tensor:
    """An encoder whose latents turn and shrink with the images."""
    return F.avg_pool2d(images, 4)


def test_means_of_parts_are_equivariant_and_a_slope_that_is_added_is_not():
    images = torch.rand(5, 3, 24, 24, generator=torch.Generator().manual_seed(2))
    slope = torch.linspace(-1, 1, 6)
    errors = {}
    for name, encode in {"pool": pool, "slope": lambda x: pool(x) + slope[: x.shape[-1] // 4]}.items():
        statistics = LatentStatistics(encode, (3, 6, 6))
        statistics.add(images, encode(images))
        errors[name] = statistics.result()["equivariance_error"]
    assert errors["pool"] < 1e-12 < 0.01 < errors["slope"]


def test_channels_have_their_mean_and_deviation_and_a_constant_one_is_dead():
    images, latents = (
        torch.rand(9, 3, 32, 32),
        normal(9, 4, 8, 8) * torch.tensor([2.0, 1.0, 0.0, 0.5]).view(4, 1, 1) + 3,
    )
    statistics = LatentStatistics(lambda images: normal(len(images), 4, *[images.shape[-1] // 4] * 2), (4, 8, 8))
    statistics.add(images, latents)
    found = statistics.result()
    assert found["channel_means"] == pytest.approx(latents.mean((0, 2, 3)).tolist(), abs=1e-5)
    assert found["channel_deviations"] == pytest.approx(latents.std((0, 2, 3), correction=0).tolist(), abs=1e-5)
    assert found["dead_channels"] == 1 and sum(found["spectrum"]) == pytest.approx(1) == sum(found["image_spectrum"])
    # White noise has in a band as much energy as that has frequencies: 48 of the 63 are in the finer half.
    assert found["fine_energy"] == pytest.approx(48 / 63, abs=0.05)


def test_any_number_of_processes_has_the_bits_and_the_latents_of_one():
    images = torch.rand(10, 3, 32, 32, generator=torch.Generator().manual_seed(3))

    def encode(images):
        return 20 * pool(images)

    def measure(process):
        measures = LatentMeasures(encode, (3, 8, 8), "cpu")
        for first in range(0, 10, 2)[process.rank :: process.world_size]:
            measures.add(images[first : first + 2], encode(images[first : first + 2]), [first, first + 1])
        return measures.statistics.result(process.sum), measures.all_latents(12, process.sum)

    ((expected, latents),) = on_processes(1, measure)
    assert torch.equal(latents, encode(images))
    for found, gathered in on_processes(3, measure):
        assert found == expected and torch.equal(gathered, latents)


def test_of_two_latents_each_has_the_other_as_its_neighbour_and_the_point_is_half_way_on_the_sphere():
    pair = torch.tensor([[3.0, 0.0], [0.0, 5.0]]).view(2, 2, 1, 1)
    points = between_neighbours(pair, [0, 1])
    # slerp at 1/2 of a right angle: sin(45) / sin(90) of either.
    expected = math.sqrt(0.5) * torch.tensor([3.0, 5.0]).view(2, 1, 1)
    torch.testing.assert_close(points, expected.expand(2, 2, 1, 1))
    line = torch.tensor([[1.0, 1.0], [2.0, 2.0]]).view(2, 2, 1, 1)  # no angle: half way on the line
    torch.testing.assert_close(between_neighbours(line, [0]), torch.full((1, 2, 1, 1), 1.5))


def test_a_neighbour_is_one_of_the_ten_of_least_angle_and_a_near_one_more_often():
    latents = normal(60, 3, 2, 2)
    flat = latents.flatten(1).double().numpy()
    units = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    near = 0
    for row in range(60):
        order = [other for other in np.argsort(-units @ units[row]) if other != row][:10]
        angles = [math.acos(units[row] @ units[other]) for other in order]
        halves = [
            (flat[row] + flat[other]) * math.sin(a / 2) / math.sin(a) for other, a in zip(order, angles, strict=True)
        ]
        found = between_neighbours(latents, [row])[0].flatten().double().numpy()
        distances = [np.abs(found - half).max() for half in halves]
        assert min(distances) < 1e-5
        chosen = np.mean((flat[order[int(np.argmin(distances))]] - flat[row]) ** 2)
        near += chosen < np.median([np.mean((flat[other] - flat[row]) ** 2) for other in order])
    assert near > 33  # of 60; with equal probabilities 30


def test_a_point_does_not_depend_on_which_rows_are_asked_for_together():
    latents = normal(30, 3, 2, 2)
    whole = between_neighbours(latents, range(30))
    torch.testing.assert_close(between_neighbours(latents, [4, 20]), whole[[4, 20]])
