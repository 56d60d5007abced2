"""Averages and code usage against closed forms; pooling over processes."""

import math

import pytest
import torch

from tandem.training.metrics.averages import Averages, code_statistics, count_codes
from tests.processes import on_processes


def test_averages_over_ragged_batches_and_processes_equal_the_mean_of_all_items():
    values = torch.rand(11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def work(here):
        averages = Averages("loss", "psnr")
        for first, last in ([(0, 4), (4, 5)], [(5, 11)], [])[here.rank]:
            averages.add(loss=values[first:last])
        if here.is_root:
            averages.add(psnr=values[:4] * 10)
        return averages.result(here.sum)

    expected = {"loss": values.mean().item(), "psnr": 10 * values[:4].mean().item()}
    assert on_processes(3, work) == [pytest.approx(expected, rel=1e-12)] * 3


def test_sums_survive_an_all_reduce_in_place():
    averages = Averages("loss")
    averages.add(loss=torch.tensor([1.0, 3.0]))
    for _ in range(2):
        assert averages.result(lambda sums: sums.add_(1)) == {"loss": pytest.approx((4 + 1) / (2 + 1))}


def test_average_of_nothing_is_nan_and_of_an_unknown_name_an_error():
    assert math.isnan(Averages("loss").result()["loss"])
    with pytest.raises(KeyError):
        Averages("loss").add(accuracy=torch.ones(2))


def test_averages_do_not_lose_small_values_behind_a_large_sum():
    averages = Averages("x")
    averages.add(x=torch.tensor([2.0**24]))
    for _ in range(10):
        averages.add(x=torch.tensor([1.0]))
    assert averages.result()["x"] == (2**24 + 10) / 11


def test_use_of_codes_pools_over_batches_and_processes():
    codes = torch.randint(0, 7, (3, 4, 5), generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([(codes == code).sum().item() for code in range(8)])
    shares = [codes[:2], codes[2:]]
    for found in on_processes(2, lambda here: count_codes(shares[here.rank], 8, here.sum)):
        assert torch.equal(found, counts)


def test_perplexity_of_worked_example():
    # Shares 1/2, 1/4, 1/4: entropy 1.5 ln 2.
    assert code_statistics(torch.tensor([4, 2, 0, 2]))["perplexity"] == pytest.approx(2**1.5)
