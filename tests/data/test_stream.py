"""The streams of batches: the same samples for every number of ranks and workers, from every start."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from PIL import Image

from data import BadSample, Batch, TrainingStream, ValidationStream, open_images, split
from data.order import TrainingOrder

WORLDS_AND_WORKERS = [(1, 0), (2, 0), (4, 0), (1, 2), (2, 2), (4, 1)]


def folder_of_images(folder: Path, n: int, broken: Iterable[int] = ()) -> Path:
    """Image i has the grey value 3 * i, slightly sloped so that its mirror image differs."""
    folder.mkdir()
    for i in range(n):
        path = folder / f"{i:03d}.png"
        image = Image.new("L", (4, 4), 3 * i)
        image.putpixel((0, 0), 3 * i + 1)
        image.save(path)
        if i in broken:
            path.write_bytes(path.read_bytes()[:40])
    return folder


def global_batches(folder: Path, n: int, *, world_size: int = 1, batch_size: int = 8, **options) -> list[Batch]:
    """The first n batches of all ranks, put together again."""
    images = open_images(str(folder), image_size=4, flip=True)
    train, _ = split(len(images), 0.0, 0, 1)
    options = {"seed": 0, "on_bad_sample": "replace"} | options
    streams = [
        TrainingStream(images, train, batch_size=batch_size, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]
    return [joined(parts) for parts in itertools.islice(zip(*streams, strict=True), n)]


def joined(parts: Iterable[Batch]) -> Batch:
    parts = list(parts)
    return {
        "images": torch.cat([part["images"] for part in parts]),
        "positions": [position for part in parts for position in part["positions"]],
        "ids": [index for part in parts for index in part["ids"]],
        "bad": list(dict.fromkeys(bad for part in parts for bad in part["bad"])),
    }


def assert_same(batches: list[Batch], others: list[Batch]) -> None:
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        assert torch.equal(batch["images"], other["images"])
        assert {key: batch[key] for key in ("positions", "ids", "bad")} == {
            key: other[key] for key in ("positions", "ids", "bad")
        }


def ids(batches: Iterable[Batch]) -> list[int]:
    return [index for batch in batches for index in batch["ids"]]


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    return folder_of_images(tmp_path_factory.mktemp("sets") / "intact", 30)


BROKEN = (3, 4, 17)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> Path:
    return folder_of_images(tmp_path_factory.mktemp("sets") / "damaged", 30, BROKEN)


def test_batch_is_what_the_contract_says(intact):
    (batch,) = global_batches(intact, 1)
    assert batch["images"].shape == (8, 3, 4, 4) and batch["images"].dtype == torch.uint8
    assert batch["positions"] == list(range(8))
    assert batch["bad"] == []
    assert [int(image[0, 1, 1]) for image in batch["images"]] == [3 * index for index in batch["ids"]]


def test_rank_holds_its_contiguous_part_of_the_global_batch(intact):
    images = open_images(str(intact), image_size=4)
    train, _ = split(30, 0.0, 0, 1)
    stream = TrainingStream(images, train, batch_size=8, rank=1, world_size=4, seed=0)
    first, second = itertools.islice(stream, 2)
    order = TrainingOrder(train, 0)
    assert first["positions"] == second["positions"] == [2, 3]
    assert first["ids"] == [order(2)[1], order(3)[1]]
    assert second["ids"] == [order(10)[1], order(11)[1]]


@pytest.mark.parametrize("world_size, num_workers", WORLDS_AND_WORKERS)
def test_stream_does_not_depend_on_ranks_and_workers(intact, world_size, num_workers):
    reference = global_batches(intact, 9)
    assert_same(global_batches(intact, 9, world_size=world_size, num_workers=num_workers), reference)


def test_epochs_follow_each_other_without_a_ragged_batch(intact):
    seen = ids(global_batches(intact, 12))  # 96 samples of a set of 30
    for epoch in range(3):
        assert sorted(seen[30 * epoch : 30 * (epoch + 1)]) == list(range(30))
    assert seen[:30] != seen[30:60]


def test_batch_may_be_larger_than_the_data_set(intact):
    (batch,) = global_batches(intact, 1, batch_size=64)
    assert sorted(batch["ids"][:30]) == sorted(batch["ids"][30:60]) == list(range(30))


@pytest.mark.parametrize("done, num_workers", [(1, 0), (5, 2), (8, 0)])
def test_resumed_stream_equals_uninterrupted_stream(intact, done, num_workers):
    uninterrupted = global_batches(intact, 10)
    resumed = global_batches(intact, 10 - done, start_samples=8 * done, num_workers=num_workers)
    assert_same(uninterrupted[done:], resumed)


def test_order_of_samples_survives_another_batch_size(intact):
    before = ids(global_batches(intact, 3, batch_size=8))
    after = ids(global_batches(intact, 4, batch_size=6, start_samples=24))
    assert before + after == ids(global_batches(intact, 6, batch_size=8))


def test_start_far_in_the_future_is_immediate(intact):
    (batch,) = global_batches(intact, 1, start_samples=10**15)
    assert len(batch["ids"]) == 8


def test_stream_depends_on_the_seed(intact):
    assert ids(global_batches(intact, 3, seed=0)) != ids(global_batches(intact, 3, seed=1))


def test_augmentation_differs_between_epochs_and_not_between_runs(intact):
    first, second = global_batches(intact, 1, batch_size=60), global_batches(intact, 1, batch_size=60)
    assert_same(first, second)
    by_epoch = [dict(zip(first[0]["ids"][e : e + 30], first[0]["images"][e : e + 30], strict=True)) for e in (0, 30)]
    n_changed = sum(not torch.equal(by_epoch[0][i], by_epoch[1][i]) for i in range(30))
    assert 5 <= n_changed <= 25


def test_two_passes_over_one_stream_do_not_disturb_each_other(intact):
    images = open_images(str(intact), image_size=4)
    train, _ = split(30, 0.0, 0, 1)
    stream = TrainingStream(images, train, batch_size=4, rank=0, world_size=1, seed=0, num_workers=1)
    one, two = iter(stream), iter(stream)
    assert ids([next(one), next(one)]) == ids([next(two), next(two)])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_streams_leave_the_random_state_of_the_training_alone(intact, num_workers):
    before = torch.get_rng_state()
    global_batches(intact, 2, num_workers=num_workers)
    validation(intact, 1, num_workers=num_workers)
    assert torch.equal(torch.get_rng_state(), before)


def test_bad_file_is_replaced_by_the_next_readable_sample_of_the_epoch(intact, damaged):
    wanted = ids(global_batches(intact, 15))  # four epochs
    got = ids(global_batches(damaged, 15))
    for position, (index, loaded) in enumerate(zip(wanted, got, strict=True)):
        epoch = wanted[position // 30 * 30 :][:30]
        following = itertools.islice(itertools.cycle(epoch), position % 30, None)
        assert loaded == next(candidate for candidate in following if candidate not in BROKEN)
        assert index in BROKEN or loaded == index


@pytest.mark.parametrize("world_size, num_workers", WORLDS_AND_WORKERS)
def test_bad_files_are_met_alike_by_all_ranks_and_workers(damaged, world_size, num_workers):
    reference = global_batches(damaged, 8)
    batches = global_batches(damaged, 8, world_size=world_size, num_workers=num_workers)
    for batch, other in zip(batches, reference, strict=True):
        assert torch.equal(batch["images"], other["images"])
        assert batch["ids"] == other["ids"]
        assert set(batch["bad"]) == set(other["bad"])
    assert {bad.index for batch in batches for bad in batch["bad"]} == set(BROKEN)


def test_bad_file_is_named_once_per_batch_with_its_reason(damaged):
    images = open_images(str(damaged), image_size=4)
    train, _ = split(30, 0.0, 0, 1)
    batch = next(iter(TrainingStream(images, train, batch_size=60, rank=0, world_size=1, seed=0)))  # meets each twice
    bad = batch["bad"]
    assert sorted(sample.index for sample in bad) == list(BROKEN)
    assert all(Path(sample.path) == damaged / f"{sample.index:03d}.png" for sample in bad)
    assert all(isinstance(sample, BadSample) and sample.reason and "\n" not in sample.reason for sample in bad)


def test_vanished_file_is_a_bad_file(tmp_path):
    folder = folder_of_images(tmp_path / "set", 10)
    images = open_images(str(folder), image_size=4)
    (folder / "004.png").unlink()
    train, _ = split(10, 0.0, 0, 1)
    batch = next(iter(TrainingStream(images, train, batch_size=10, rank=0, world_size=1, seed=0)))
    assert batch["bad"] == [BadSample(4, str(folder / "004.png"), "No such file or directory")]


def error_of(folder: Path, **options) -> str:
    with pytest.raises(ValueError) as error:
        global_batches(folder, 20, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_file_stops_the_run_where_that_was_asked(damaged, num_workers):
    text = error_of(damaged, on_bad_sample="error", num_workers=num_workers)
    assert text.startswith(tuple(str(damaged / f"{i:03d}.png: ") for i in BROKEN))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_folder_of_nothing_but_broken_images_is_one_line(tmp_path, num_workers):
    folder = folder_of_images(tmp_path / "set", 12, range(12))
    assert error_of(folder, num_workers=num_workers).startswith(f"none of 12 images could be read: {folder}")


def test_search_for_a_readable_sample_ends_after_100(tmp_path):
    folder = folder_of_images(tmp_path / "set", 0)
    for i in range(150):
        (folder / f"{i}.jpg").touch()
    assert error_of(folder).startswith("none of 100 images could be read")


def validation(folder: Path, world_size: int, n: int = 30, **options) -> list[list[Batch]]:
    """[rank][step]; n of the 30 images are the validation set."""
    images = open_images(str(folder), image_size=4, flip=True)
    _, valid = split(30, n / 31, 0, 1) if n < 30 else (None, split(30, 0.0, 0, 1)[0])
    assert len(valid) == n
    options = {"batch_size": 8} | options
    streams = [ValidationStream(images, valid, rank=r, world_size=world_size, **options) for r in range(world_size)]
    return [list(stream) for stream in streams]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("n", [8, 9, 15, 16, 17, 29, 30])
def test_validation_sees_every_sample_once_in_equally_many_steps(intact, world_size, n):
    ranks = validation(intact, world_size, n)
    batches = [batch for steps in ranks for batch in steps]
    assert sorted(position for batch in batches for position in batch["positions"]) == list(range(n))
    assert len(set(ids(batches))) == n
    assert len({len(steps) for steps in ranks}) == 1
    sizes = [len(batch["ids"]) for batch in batches]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
    assert max(sizes) <= -(-8 // world_size) + (world_size == 8)  # 9 samples on 8 ranks: one step, one rank takes two


def test_validation_is_the_same_for_every_world_and_is_not_augmented(intact):
    plain = open_images(str(intact), image_size=4)

    def by_position(world_size: int, num_workers: int) -> dict[int, tuple[int, bytes]]:
        batches = [batch for steps in validation(intact, world_size, num_workers=num_workers) for batch in steps]
        return {
            position: (index, image.numpy().tobytes())
            for batch in batches
            for position, index, image in zip(batch["positions"], batch["ids"], batch["images"], strict=True)
        }

    reference = by_position(1, 0)
    assert all(picture == plain.load(index, 0, False).numpy().tobytes() for index, picture in reference.values())
    assert by_position(2, 0) == by_position(3, 1) == reference


def test_validation_can_be_repeated_with_the_same_workers(intact):
    images = open_images(str(intact), image_size=4)
    everything, _ = split(30, 0.0, 0, 1)
    stream = ValidationStream(images, everything, batch_size=8, rank=0, world_size=1, num_workers=2)
    assert_same(list(stream), list(stream))
    next(iter(stream))  # given up after one batch
    assert len(list(stream)) == len(stream) == 4


def test_validation_replaces_bad_files_too(damaged):
    batches = [batch for steps in validation(damaged, 2) for batch in steps]
    assert sum(len(batch["ids"]) for batch in batches) == 30
    assert {bad.index for batch in batches for bad in batch["bad"]} == set(BROKEN)


def test_empty_validation_has_no_batches(intact):
    images = open_images(str(intact), image_size=4)
    _, nothing = split(30, 0.0, 0, 1)
    assert list(ValidationStream(images, nothing, batch_size=8, rank=0, world_size=2)) == []
