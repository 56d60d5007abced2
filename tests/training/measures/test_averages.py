"""Averages and code usage against closed forms; pooling over processes."""

import math

import pytest
import torch

from training.measures.averages import Averages, code_statistics, counts_of_codes


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
    averages = Averages("loss")
    averages.add(loss=torch.tensor([1.0, 3.0]))
    for _ in range(2):
        assert averages.result(lambda sums: sums.add_(1)) == {"loss": pytest.approx((4 + 1) / (2 + 1))}


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


def test_use_of_codes_pools_over_batches_and_processes():
    codes = torch.randint(0, 7, (3, 4, 5), generator=torch.Generator().manual_seed(0))
    one, other = codes[:2], codes[2:]
    counts = torch.tensor([(codes == code).sum().item() for code in range(8)])
    all_reduce = pooled(*(lambda reduce, own=own: counts_of_codes(own, 8, reduce) for own in (one, other)))
    assert torch.equal(all_reduce(None), counts)
    assert torch.equal(counts_of_codes(one, 8, all_reduce), counts)


def test_perplexity_of_uniform_use_is_the_number_of_codes_and_of_one_code_is_one():
    single = 5 * torch.eye(16, dtype=torch.int64)[3]
    for counts, used in ((torch.full((16,), 3), 16), (single, 1)):
        expected = {"codes_used": used, "codes_used_fraction": used / 16, "perplexity": used}
        assert code_statistics(counts) == pytest.approx(expected)


def test_perplexity_of_worked_example():
    # Shares 1/2, 1/4, 1/4: entropy 1.5 ln 2.
    assert code_statistics(torch.tensor([4, 2, 0, 2]))["perplexity"] == pytest.approx(2**1.5)
