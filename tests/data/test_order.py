"""The order of samples: shuffles, the split, epochs."""

from __future__ import annotations

import collections
import itertools

import pytest

from tandem.data.sampling.order import (
    AlternatingOrder,
    Permutation,
    ShardOrder,
    TrainingOrder,
    split_samples,
    split_shards,
)
from tandem.hashing import Draws
from tests.data.helpers import one_line


def test_draws_are_uniform_and_depend_on_every_part_of_the_key():
    draws = Draws("a", 1)
    numbers = [draws.uniform(2, 4) for _ in range(4000)]
    assert min(numbers) >= 2 and max(numbers) < 4
    assert sum(numbers) / len(numbers) == pytest.approx(3, abs=0.04)  # 4 standard errors of a uniform of width 2
    assert len({Draws(*parts).bits() for parts in [("a", 1), ("a", 2), ("b", 1), ("a", 1, 0), ("a", "1")]}) == 5


@pytest.mark.parametrize("n", [1, 2, 5, 63, 64, 65, 1000])
def test_permutation_visits_every_item_once(n):
    assert sorted(map(Permutation(n, "test"), range(n))) == list(range(n))


def test_every_shuffle_of_four_items_is_equally_likely():
    counts = collections.Counter(tuple(map(Permutation(4, key), range(4))) for key in range(2400))
    chi_square = sum((counts[p] - 100) ** 2 / 100 for p in itertools.permutations(range(4)))
    assert chi_square < 49.7  # the 99.9% point for 23 degrees of freedom


def test_odd_and_even_shuffles_are_equally_likely():
    shuffles = [[*map(Permutation(5, key), range(5))] for key in range(2400)]
    n_even = sum(sum(a > b for a, b in itertools.combinations(shuffle, 2)) % 2 == 0 for shuffle in shuffles)
    assert n_even / 2400 == pytest.approx(0.5, abs=0.04)  # 4 standard errors


def test_permutation_of_a_trillion_items_takes_no_memory():
    permutation = Permutation(10**12, "large")
    items = {permutation(i) for i in range(100)} | {permutation(10**12 - 1)}
    assert len(items) == 101
    assert max(items) < 10**12 and max(items) - min(items) > 10**11


@pytest.mark.parametrize("n, valid, test, batch_size, sizes", [
    (120, 0.05, 0, 8, (112, 8, 0)), (1000, 0.05, 0, 8, (950, 50, 0)), (10, 0, 0, 8, (10, 0, 0)),
    (100, 0.07, 0.07, 1, (86, 7, 7)), (100, 0.15, 0.1, 4, (75, 15, 10)), (100, 0, 0.5, 4, (50, 0, 50)),
    (100, 0.01, 0, 4, (96, 4, 0)), (100, 0.5, 0.4, 4, (10, 50, 40)),
])  # fmt: skip
def test_splits_are_disjoint_complete_of_the_sizes_asked_for_and_by_the_seed_alone(n, valid, test, batch_size, sizes):
    parts, again, other = (split_samples(n, valid, test, seed, batch_size) for seed in (3, 3, 4))
    assert tuple(map(len, parts)) == sizes
    assert sorted(itertools.chain(*parts)) == list(range(n))
    assert [[*part] for part in again] == [[*part] for part in parts] != [[*part] for part in other]


@pytest.mark.parametrize("n, fraction, n_valid", [(15, 0.05, 8), (7, 0.0, 0), (100, 0.95, 95)])
def test_splits_that_leave_less_than_a_batch_show_the_arithmetic(n, fraction, n_valid):
    text = one_line(split_samples, n, fraction, 0, 0, batch_size=8)
    assert f"takes {n_valid} " in text and f"leaves {n - n_valid} to train on" in text

    text = one_line(split_samples, 20, 0.2, 0.1, 0, batch_size=8)
    assert "--valid_fraction 0.2 takes 8" in text and "--test_fraction 0.1 8" in text and "leaves 4" in text
    assert "leaves 0 to train on" in one_line(split_samples, 20, 0.7, 0.3, 0, 1)


def shards_of(n: int, each: int = 7) -> list[range]:
    """n shards with as many samples as the number says, and an empty one between."""
    shards = [range(i * each, (i + 1) * each) for i in range(n)]
    return [*shards[:1], range(each, each), *shards[1:]]


@pytest.mark.parametrize("n, sizes", [(3, (1, 1, 1)), (4, (2, 1, 1)), (10, (7, 2, 1)), (100, (75, 15, 10))])
def test_a_split_by_shards_takes_whole_shards_by_seed(n, sizes):
    parts = split_shards(shards_of(n), 0.15, 0.1, seed=0, batch_size=7)
    assert tuple(len(part) // 7 for part in parts) == sizes
    assert sorted(itertools.chain(*parts)) == list(range(7 * n))
    homes = [{index // 7 for index in part} for part in parts]
    assert [len(home) for home in homes] == list(sizes), "no shard is cut"
    assert n < 10 or [*split_shards(shards_of(n), 0.15, 0.1, 1, 7).valid] != [*parts.valid]


def test_too_few_or_too_small_shards_are_refused_with_what_is_taken():
    for n, fractions, taken in ((2, (0.15, 0.1), (1, 1)), (1, (0.15, 0.0), (1, 0)), (10, (0.45, 0.45), (5, 5))):
        valid, test = (f"_fraction {fraction:g}" for fraction in fractions)
        text = one_line(split_shards, shards_of(n), *fractions, 0, 1)
        assert f"{valid} takes {taken[0]}" in text and (f"{test} {taken[1]}," in text) is (fractions[1] > 0)
    assert len(split_shards(shards_of(11), 0.45, 0.45, 0, 1).train) == 7
    text = one_line(split_shards, shards_of(10), 0.15, 0.1, 0, batch_size=8)
    assert "1 of 10 shards" in text and "7 samples" in text and "batch of 8" in text
    assert len(split_shards(shards_of(1), 0.0, 0.0, 0, 1).train) == 7


def test_every_epoch_and_seed_has_another_permutation_of_the_subset():
    train = range(7, 47)
    orders = TrainingOrder(train, seed=0), TrainingOrder(train, seed=1)
    epochs = [[order(epoch * 40 + i) for i in range(40)] for order in orders for epoch in range(3)]
    for number, epoch in enumerate(epochs):
        assert {e for e, _ in epoch} == {number % 3}
        assert sorted(index for _, index in epoch) == sorted(train)
    assert len({tuple(index for _, index in epoch) for epoch in epochs}) == 6


def test_skipping_goes_round_the_same_epoch():
    order = TrainingOrder(range(10), seed=0)
    second_epoch = [order(10 + i) for i in range(10)]
    assert [order(17, skip) for skip in range(10)] == second_epoch[7:] + second_epoch[:7]


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_two_orders_take_turns_by_whole_updates_and_each_goes_on_where_it_was(every):
    first, second = TrainingOrder(range(10), seed=0), TrainingOrder(range(7), seed=1)
    both = AlternatingOrder(first, second, every=every, batch_size=4, offset=10)
    places = {True: 0, False: 0}
    for update in range(30):
        from_second = (update + 1) % every == 0
        for place in range(4):
            epoch, index = (second if from_second else first)(places[from_second])
            assert both(4 * update + place) == (epoch, index + 10 * from_second)
            places[from_second] += 1
    assert places[False] == 4 * (30 - 30 // every)
    (epoch, skipped), order = both(4 * every - 1, skip=1), second
    assert (epoch, skipped - 10) == order(3, skip=1), "a substitute comes from the same order"


def shards_of_sizes(*sizes: int) -> list[range]:
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


@pytest.mark.parametrize("sizes", [(7,), (5, 1, 9), (3, 0, 4, 2, 8), (6,) * 11])
def test_an_order_by_shards_has_each_sample_once_in_an_epoch_and_four_shards_at_a_time(sizes):
    shards, n = shards_of_sizes(*sizes), sum(sizes)
    order = ShardOrder(shards, seed=0)
    epochs = [[order(epoch * n + i) for i in range(n)] for epoch in range(3)]
    for number, epoch in enumerate(epochs):
        assert {e for e, _ in epoch} == {number}
        assert sorted(index for _, index in epoch) == list(range(n))
        homes = [next(k for k, shard in enumerate(shards) if index in shard) for _, index in epoch]
        open_at = [{home for home in set(homes) if home in homes[:i] and home in homes[i:]} for i in range(n)]
        assert max(map(len, open_at)) <= 4, "a shard is not read again after others were begun"
    assert len(order) == n and (n < 8 or len({tuple(i for _, i in epoch) for epoch in epochs}) == 3)


def test_an_order_by_shards_is_by_the_seed_alone_and_begins_anywhere():
    shards = shards_of_sizes(*[5] * 9)
    expected = [ShardOrder(shards, seed=0)(i) for i in range(90)]
    assert [ShardOrder(shards, seed=0)(i) for i in reversed(range(90))] == expected[::-1]
    order = ShardOrder(shards, seed=0)
    assert [order(i) for i in (44, 45, 44, 89, 0, 45)] == [expected[i] for i in (44, 45, 44, 89, 0, 45)]
    assert [ShardOrder(shards, seed=1)(i) for i in range(90)] != expected


def test_samples_of_shards_that_are_read_together_are_mixed_and_substitutes_are_among_them():
    shards = shards_of_sizes(*[100] * 12)
    order = ShardOrder(shards, seed=0)
    window = [order(i)[1] for i in range(400)]
    counts = collections.Counter(index // 100 for index in window[:100])
    assert len(counts) == 4 and min(counts.values()) > 10, "expected 25 of each, with a standard deviation of 3.8"
    assert [order(399, skip)[1] for skip in range(400)] == window[399:] + window[:399]
    together = [{order(epoch * 1200 + i)[1] // 100 for i in range(400)} for epoch in range(4)]
    assert together[0] not in together[1:], "each epoch reads other shards together"


def test_the_shards_that_come_next_are_told_when_others_are_begun():
    shards, told = shards_of_sizes(*[5] * 8), []
    order = ShardOrder(shards, seed=0, fetch=told.append)
    read = [order(i)[1] for i in range(80)]
    later = [{index // 5 for index in read[begin : begin + 20]} for begin in (20, 40, 60)]
    assert [{shard.start // 5 for shard in shards} for shards in told[:3]] == later
    assert len(told) == 4
