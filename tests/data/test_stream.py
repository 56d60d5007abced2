"""The streams of batches: the same samples for every number of ranks and workers, from every start; and the list of bad
samples."""

from __future__ import annotations

import pytest
import torch

from tandem.data.bad_samples import BadSample, BadSampleLog
from tandem.data.fields import SampleDataset
from tandem.data.sampling.stream import ValidationStream
from tandem.data.sets import open_images
from tests.data.helpers import assert_same, global_batches, ids, one_line, stream

N = 30


@pytest.fixture(scope="module")
def intact() -> SampleDataset:
    return open_images(f"demo:shapes:{N}", image_size=4, flip=True)


def test_order_of_samples_survives_another_batch_size(intact):
    """Also one that is larger than the set."""
    expected = ids(global_batches(intact, 11))
    before, after = global_batches(intact, 3), global_batches(intact, 1, batch_size=64, start=24)
    assert ids(before + after) == expected


def test_start_far_in_the_future_is_immediate(intact):
    (batch,) = global_batches(intact, 1, start=10**15)
    assert len(batch["ids"]) == 8


def test_two_passes_over_one_stream_do_not_disturb_each_other(intact):
    batches = stream(intact, 4, num_workers=1)
    one, two = iter(batches), iter(batches)
    assert ids([next(one), next(one)]) == ids([next(two), next(two)])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_streams_leave_the_random_state_of_the_training_alone(intact, num_workers):
    before = torch.get_rng_state()
    global_batches(intact, 2, num_workers=num_workers)
    list(validation(intact, 1, num_workers=num_workers)[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("n", "n_tried", "num_workers"), [(12, 12, 0), (12, 12, 2), (150, 100, 0)])
def test_search_for_a_readable_sample_ends_after_100(n, n_tried, num_workers, tmp_path):
    for i in range(n):
        (tmp_path / f"{i}.jpg").touch()
    images = open_images(str(tmp_path), image_size=4)
    text = one_line(global_batches, images, 1, num_workers=num_workers)
    assert f" {n_tried} images" in text and str(tmp_path) in text


def validation(images: SampleDataset, world_size: int, n: int = N, **options) -> list[ValidationStream]:
    """The streams of all ranks over n images."""
    sizes = {"batch_size": 8, "world_size": world_size, **options}
    return [ValidationStream(images, range(n), rank=rank, **sizes) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("n", [8, 9, 15, 16, 17, 29, 30])
def test_validation_sees_every_sample_once_in_equally_many_steps(intact, world_size, n):
    ranks = [[*steps] for steps in validation(intact, world_size, n)]
    batches = [batch for steps in ranks for batch in steps]
    assert sorted(position for batch in batches for position in batch["positions"]) == list(range(n))
    assert len(set(ids(batches))) == n
    assert len({len(steps) for steps in ranks}) == 1
    sizes = [len(batch["ids"]) for batch in batches]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
    assert max(sizes) <= -(-8 // world_size) + (world_size == 8)  # 9 samples on 8 ranks: one step, one rank takes two


def test_validation_can_be_repeated_with_the_same_workers(intact):
    [batches] = validation(intact, 1, num_workers=2)
    assert_same(list(batches), list(batches))
    next(iter(batches))  # given up after one batch
    assert len(list(batches)) == len(batches) == 4


# Samples that cannot be read.


def bad(n: int) -> list[BadSample]:
    return [BadSample(i, f"photos/{i}.jpg", "truncated") for i in range(n)]


@pytest.mark.parametrize("n_samples, tolerated", [(5, 1), (11, 2), (120, 10), (1000, 10), (10_000, 100)])
def test_too_many_is_over_one_percent_and_over_ten_files_or_a_tenth_of_a_small_set(n_samples, tolerated):
    log = BadSampleLog(n_samples)
    log.add(bad(tolerated))
    log.check()
    log.add(bad(tolerated + 1))
    assert one_line(log.check).startswith(f"{tolerated + 1} of {n_samples} samples could not be read")


def test_incomplete_samples_are_counted_once_take_a_bit_each_and_are_never_too_many():
    log, restored = BadSampleLog(100), BadSampleLog(100)
    incomplete = [BadSample(i, f"{i}.jpg", "no embedding", is_incomplete=True) for i in range(60)]
    assert log.add([*bad(2), *incomplete[10:], *incomplete[10:20]]) == [*bad(2), *incomplete[10:]]
    log.check()
    assert log.state_dict()["incomplete"].nbytes == 13
    restored.load_state_dict(log.state_dict())
    for known in (log, restored):
        assert (known.count, known.count_incomplete) == (2, 50)
        assert known.add([*bad(2), *incomplete]) == incomplete[2:10], "the first two are known to be bad"
