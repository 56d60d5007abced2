"""Averages and code usage against closed forms; pooling over processes."""

import math

import pytest
import torch

from training.measures.averages import Averages, CodeUsage, code_statistics


def pooled(*readers):
    """The sum that each of several processes would get; a reader takes an all-reduce."""
    tensors = []

    def record(tensor):
        tensors.append(tensor)
        return tensor

    for read in readers:
        read(record)
    return lambda _: sum(tensors)


def test_averages_over_ragged_batches_and_processes_equal_the_mean_of_all_items():
    values = torch.rand(11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ranks = [Averages("loss", "psnr") for _ in range(3)]
    ranks[0].add(loss=values[:4], psnr=values[:4] * 10)
    ranks[0].add(loss=values[4:5])
    ranks[1].add(loss=values[5:])
    result = ranks[2].result(pooled(*(rank.result for rank in ranks)))
    assert result == pytest.approx({"loss": values.mean().item(), "psnr": 10 * values[:4].mean().item()}, rel=1e-12)


def test_sums_survive_an_all_reduce_in_place():
    averages, usage = Averages("loss"), CodeUsage(2)
    averages.add(loss=torch.tensor([1.0, 3.0]))
    usage.add(torch.tensor([0, 1, 1]))
    for _ in range(2):
        assert averages.result(lambda sums: sums.add_(1)) == {"loss": pytest.approx((4 + 1) / (2 + 1))}
        assert usage.counts(lambda counts: counts.mul_(4)).tolist() == [4, 8]


def test_averages_take_scalars_and_can_be_read_twice():
    averages = Averages("loss")
    averages.add(loss=torch.tensor(2.0, requires_grad=True))
    averages.add(loss=torch.tensor(4.0))
    assert averages.result() == averages.result() == {"loss": 3.0}


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


def test_code_counts_pool_over_batches_and_processes():
    codes = torch.randint(0, 7, (3, 4, 5), generator=torch.Generator().manual_seed(0))
    one, other = CodeUsage(8), CodeUsage(8)
    one.add(codes[0])
    one.add(codes[1])
    other.add(codes[2])
    counts = one.counts(pooled(one.counts, other.counts))
    assert counts.tolist() == [(codes == code).sum().item() for code in range(8)]


def test_perplexity_of_uniform_use_is_the_number_of_codes_and_of_one_code_is_one():
    assert code_statistics(torch.full((16,), 3)) == pytest.approx(
        {"codes_used": 16, "codes_used_fraction": 1, "perplexity": 16}
    )
    single = torch.zeros(16, dtype=torch.int64)
    single[3] = 5
    assert code_statistics(single) == pytest.approx({"codes_used": 1, "codes_used_fraction": 1 / 16, "perplexity": 1})


def test_perplexity_of_worked_example():
    # Shares 1/2, 1/4, 1/4: entropy 1.5 ln 2.
    assert code_statistics(torch.tensor([4, 2, 0, 2]))["perplexity"] == pytest.approx(2**1.5)
