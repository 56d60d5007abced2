"""Every place of samples of every kind behaves alike: each test is a behaviour, its parameters are the places."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.distributed.errors import TrainingStopped
from tests.data.helpers import assert_same, ids, one_line
from tests.data.source_table import (
    BATCH,
    CONDITIONED,
    IMAGES,
    SOUNDS,
    SOURCES,
    VIDEOS,
    Kind,
    N,
    Record,
    Source,
    by_position,
    captions,
    passes,
    training,
)
from tests.processes import Process, on_processes

N_VALID, N_BATCHES = 8, 9  # two epochs of 32 samples, and a batch
ON_DISK = [name for name, source in SOURCES.items() if source.write]
NAMES = {IMAGES: "images", CONDITIONED: "conditioned", SOUNDS: "sounds", VIDEOS: "videos"}
Passes = dict[str, list[dict]]


@pytest.fixture(scope="module")
def flags_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Source], dict[str, Any]]:
    """Where the whole samples of a place are."""
    return cache(lambda source: source.written(tmp_path_factory.mktemp("sources") / "set"))


@pytest.fixture(scope="module")
def whole(flags_of: Callable[[Source], dict[str, Any]]) -> Callable[[Source], Passes]:
    """What one process sees of a place."""
    return cache(lambda source: passes(source.kind, flags_of(source), N_BATCHES))


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> Source:
    return SOURCES[request.param]


@pytest.fixture(params=ON_DISK)
def on_disk(request: pytest.FixtureRequest) -> Source:
    return SOURCES[request.param]


@pytest.fixture(params=NAMES, ids=list(NAMES.values()))
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


def test_each_epoch_is_another_shuffle_of_what_is_not_validated_and_each_place_of_a_batch_is_taken(
    source: Source, flags_of: Any, whole: Any
) -> None:
    feed, seen = source.kind.feed(**flags_of(source)), whole(source)
    assert len(feed.valid_set) == N_VALID and sorted([*feed.train_set, *feed.valid_set]) == list(range(N))
    assert [batch["positions"] for batch in seen["train"]] == [list(range(BATCH))] * N_BATCHES
    taken = [index for index in ids(seen["train"]) if index < N]  # the others are of the second set
    n = len(feed.train_set)
    assert sorted(taken[:n]) == sorted(feed.train_set) and taken[:n] != sorted(taken[:n])
    if len(taken) >= 2 * n:
        assert sorted(taken[n : 2 * n]) == sorted(feed.train_set) and taken[:n] != taken[n : 2 * n]
    assert ids(seen["valid"]) == list(feed.valid_set) and ids(seen["preview"]) == list(feed.valid_set)[:5]
    assert {len(entry) for batch in seen["train"] for entry in batch.values()} == {BATCH}


# Each place and each kind once.
HAVE_WORKERS = [
    "images of tars", "images of arrow", "images of parquet", "images of own", "conditioned of folder",
    "sounds of manifest", "videos of folder", "videos and images",
]  # fmt: skip


@pytest.mark.parametrize("name, world_size, workers, done", [
    *((name, 4, 0, 2) for name in SOURCES), *((name, 1, 2, 6) for name in HAVE_WORKERS)
])  # fmt: skip
def test_batches_depend_neither_on_processes_and_workers_nor_on_where_a_run_goes_on(
    name: str, world_size: int, workers: int, done: int, flags_of: Any, whole: Any
) -> None:
    source = SOURCES[name]
    flags = {**flags_of(source), "num_workers": workers}
    found = passes(source.kind, flags, N_BATCHES - done, world_size, done * BATCH)
    for name, batches in whole(source).items():
        assert_same(batches[done:] if name == "train" else batches, found[name])


def test_what_is_loaded_is_drawn_by_seed_epoch_and_index_in_training_and_the_same_in_every_validation(
    source: Source, flags_of: Any, whole: Any
) -> None:
    loaded, seen = source.kind.loaded, whole(source)
    first: dict[int, Any] = {}
    changed = []
    for batch in seen["train"]:
        for index, sample in zip(batch["ids"], batch[loaded], strict=True):
            known = first.setdefault(index, sample)
            changed += [not torch.equal(known, sample)] if known is not sample else []
    is_drawn = source.write is not None or source.kind is not CONDITIONED
    assert any(changed) == is_drawn, "nothing is cut out of a demonstration of pictures"
    feed = source.kind.feed(**flags_of(source))
    feed.start(5 * BATCH)
    assert_same([by_position(next(iter(feed.validation())))], seen["valid"])
    other = training(source.kind.feed(**flags_of(source), seed=5), 1)[0]
    assert other["ids"] != seen["train"][0]["ids"]


# FFmpeg, which resizes the frames of files, weights neighbours otherwise than what resizes those of an own dataset.
@pytest.mark.parametrize("name", [n for n in ON_DISK if not n.endswith("folder") and n != "videos of own"])
def test_the_samples_of_any_place_are_those_of_the_files_of_a_folder(name: str, whole: Any) -> None:
    place, folder = SOURCES[name], SOURCES[f"{name.partition(' of ')[0]} of folder"]
    for part, batches in whole(place).items():
        assert_same(batches, whole(folder)[part])


def test_a_sound_has_its_captions_of_which_each_epoch_draws_another(whole: Any) -> None:
    drawn, told = [0, 0, 0], defaultdict(set)
    for batch in whole(SOURCES["sounds of folder"])["train"]:
        assert batch["all_captions"] == [captions(index) for index in batch["ids"]]
        for caption, index in zip(batch["captions"], batch["ids"], strict=True):
            drawn[captions(index).index(caption)] += 1
            told[index].add(caption)
    assert min(drawn) > 10 and max(map(len, told.values())) == 2
    (valid,) = whole(SOURCES["sounds of folder"])["valid"]
    assert valid["captions"] == [captions(index)[0] for index in valid["ids"]]


def write(kind: Kind, folder: Path, numbers: range, **changed: Record) -> dict[str, Any]:
    """The flags of a folder with the records of these numbers."""
    return SOURCES[f"{NAMES[kind]} of folder"].written(folder, numbers, **changed)


def damaged(kind: Kind, number: int, content: Callable[[bytes], bytes]) -> dict[str, Record]:
    record = kind.record(number)
    first, *_ = record
    return {f"n{number}": {**record, first: content(record[first])}}


def with_the_next(order: list[int], bad: set[int]) -> list[int]:
    """What two epochs of an order become if the next good sample of the epoch takes the place of each bad one."""
    epochs = order[:N], order[N:]
    return [next(i for i in (*epoch[place:], *epoch) if i not in bad) for epoch in epochs for place in range(N)]


# Two processes are threads here, and loader workers are not forked from several threads at once.
ON_TWO = [(name, 2, 0) for name in ON_DISK]
WITH_WORKERS = [(name, 1, 2) for name in ON_DISK if name.endswith("folder")]


@pytest.mark.parametrize("name, world_size, workers", [*ON_TWO, *WITH_WORKERS])
def test_a_bad_sample_is_named_once_on_every_process_and_the_next_of_the_order_takes_its_place(
    name: str, world_size: int, workers: int, flags_of: Any, tmp_path: Path
) -> None:
    on_disk = SOURCES[name]
    spoilt = {**damaged(on_disk.kind, 7, lambda _: b"none"), **damaged(on_disk.kind, 12, lambda _: b"")}
    flags = {**on_disk.written(tmp_path / "set", **spoilt), "num_workers": workers, "valid_fraction": 0}

    def train(process: Process) -> tuple[list[dict], list[str], int]:
        feed, said = on_disk.kind.feed(process, **flags), []
        batches = training(feed, 10)
        for _ in range(2):
            feed.report_bad_samples(said.append)
        return batches, said, feed.bad_samples.count

    found = on_processes(world_size, train)
    taken = [index for parts in zip(*(batches for batches, *_ in found), strict=True) for index in ids(parts)]
    intact = on_disk.kind.feed(**{**flags_of(on_disk), "valid_fraction": 0})
    assert taken == with_the_next(ids(training(intact, 10)), {7, 12})
    samples = on_disk.kind.feed(**flags).samples
    for _, said, count in found:
        assert count == 2 and len(said) == 2
        for index in (7, 12):
            assert sum(samples.describe(index) in line for line in said) == 1
        assert all(line.endswith(f"; the next {on_disk.kind.noun} takes its place") for line in said)


def test_a_bad_sample_ends_a_run_that_is_to_end_there_in_one_line(kind: Kind, tmp_path: Path) -> None:
    flags = write(kind, tmp_path / "set", range(N), **damaged(kind, 7, lambda _: b"none"))
    feed = kind.feed(**flags, valid_fraction=0, on_bad_sample="error")
    with pytest.raises((ValueError, TrainingStopped), match=f"{re.escape(feed.samples.describe(7))}: [^\n]*$"):
        training(feed, 5)


def test_an_image_that_is_cut_off_is_trained_on_where_it_is_accepted(tmp_path: Path) -> None:
    flags = write(
        IMAGES, tmp_path / "set", range(N), **damaged(IMAGES, 7, lambda content: content[: len(content) * 2 // 3])
    )
    for choice, taken in (("accept", set(range(N))), ("replace", set(range(N)) - {7})):
        for workers in (0, 2):
            feed = IMAGES.feed(**flags, valid_fraction=0, on_bad_sample=choice, num_workers=workers)
            assert {*ids(training(feed, 10))} == taken


def test_the_fingerprint_is_that_of_a_copy_and_of_no_other_samples(on_disk: Source, tmp_path: Path) -> None:
    """Rows of tables have no names: fewer of them are others."""
    others, prints = range(3) if on_disk.place in ("arrow", "parquet") else range(1, 5), []
    for place, numbers in enumerate((range(4), range(4), others)):
        flags = on_disk.written(tmp_path / str(place) / "set", numbers)
        prints.append(on_disk.kind.feed(**flags, batch_size=2, valid_fraction=0).samples.fingerprint)
    assert prints[0] == prints[1] != prints[2]


def test_a_process_that_sees_other_samples_is_named_on_all(kind: Kind, tmp_path: Path) -> None:
    numbers = range(12), range(12), range(1, 13), range(3)
    seen = [write(kind, tmp_path / str(rank), some) for rank, some in enumerate(numbers)]

    def opened(process: Process) -> int:
        return len(kind.feed(process, **seen[process.rank], batch_size=process.world_size).train_set)

    errors = on_processes(4, opened, catches=ValueError)
    assert len({*map(str, errors)}) == 1 and str(errors[0]).startswith("rank 2 (on ")
    assert on_processes(2, opened) == [9, 9]


# A second folder as the validation split.


@pytest.mark.parametrize("name", [
    "images of folder", "images of own", "images of parquet", "conditioned of tars", "sounds of manifest",
    "videos of folder",
])  # fmt: skip
def test_all_of_the_first_set_is_trained_on_and_all_of_the_second_is_validated(
    name: str, flags_of: Any, tmp_path: Path
) -> None:
    on_disk, n_valid = SOURCES[name], 11
    (valid,) = write(on_disk.kind, tmp_path / "valid", range(n_valid)).values()
    flags = {**flags_of(on_disk), "valid_folder": valid}
    seen = passes(on_disk.kind, flags, 2 * N // BATCH, 2)
    feed = on_disk.kind.feed(**flags)
    assert sorted(ids(seen["train"])) == sorted([*range(N), *range(N)]) and feed.samples_per_epoch == N
    assert ids(seen["valid"]) == list(feed.valid_set) != sorted(feed.valid_set), "pictures are not the first ones"
    assert sorted(feed.valid_set) == list(range(N, N + n_valid)) and ids(seen["preview"]) == list(feed.valid_set)[:5]
    assert feed.samples.describe(N).startswith(str(Path(valid).parent))
    assert f"{N} {feed.noun}s to train on, {n_valid} {feed.noun}s to validate in {valid}" in feed.summary()


def test_a_second_folder_is_checked_as_the_first_is(kind: Kind, tmp_path: Path) -> None:
    numbers = {"valid": range(11), "other": range(1, 12), "few": range(BATCH - 1)}
    valid, other, few = (next(iter(write(kind, tmp_path / name, some).values())) for name, some in numbers.items())
    flags = {**write(kind, tmp_path / "train", range(16)), "valid_samples": 0}

    def errors(*folders: Path) -> list[str]:
        def opened(process: Process) -> Any:
            return kind.feed(process, **flags, valid_folder=folders[process.rank])

        return [*map(str, on_processes(len(folders), opened, catches=ValueError))]

    assert all("rank 1 (on " in error and str(valid) in error for error in errors(valid, other))
    for n in (1, 2):
        assert all("--valid_folder holds 7 samples" in error for error in errors(*[few] * n))
    next(valid.glob("003.[!tn]*")).write_bytes(b"none")
    (valid / "notes.pdf").write_bytes(b"")
    feed, said = kind.feed(**flags, valid_folder=valid), []
    assert "pdf" in feed.skipped and str(valid) in feed.skipped
    feed.start(0)
    assert len([*feed.validation()]) == 2
    feed.report_bad_samples(said.append)
    assert feed.bad_samples.count == 1 and len(said) == 1 and f"{valid}/003." in said[0]


def test_the_split_depends_on_the_split_seed_and_without_it_on_the_seed(kind: Kind) -> None:
    """Sounds and videos have a split seed of their own, 42."""

    def split(**flags: Any) -> list[int]:
        return list(kind.feed(**flags).valid_set)

    default = split(seed=42)
    assert default == split(split_seed=42, seed=1) != split(split_seed=0, seed=42)
    assert (split(seed=1) == default) == (kind in (SOUNDS, VIDEOS))
    assert split(split_seed=0, seed=1) == split(split_seed=0, seed=2) != split(split_seed=1, seed=1)


@pytest.mark.parametrize("name, package, extra", [
    ("sounds of folder", "soundfile", "audio"), ("sounds of tars", "soxr", "audio"),
    ("videos of folder", "av", "video"), ("images of arrow", "pyarrow", "datasets"),
])  # fmt: skip
def test_missing_package_says_how_to_install_it_and_the_demonstration_needs_none(
    name: str, package: str, extra: str, flags_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = flags_of(SOURCES[name])
    monkeypatch.setitem(sys.modules, package, None)
    assert f'pip install -e ".[{extra}]"' in one_line(SOURCES[name].kind.feed, **flags)
    assert len(SOURCES[name].kind.feed().start(0)["ids"]) == BATCH


@pytest.mark.parametrize(
    "name", [f"{kind} of {place}" for kind in ("images", "videos") for place in ("folder", "own", "demonstration")]
)
def test_half_of_the_pictures_are_mirrored_as_a_whole_by_seed_epoch_and_index(name: str, flags_of: Any) -> None:
    source = SOURCES[name]
    flags = {**flags_of(source), "crop": None, "crop_area": None, "num_frames": 8 if source.kind is VIDEOS else None}

    def coins(epoch: int, **more: Any) -> list[bool]:
        samples = source.kind.feed(**{**flags, **more}).samples
        loaded = source.kind.loaded
        pairs = [(samples.load(index, epoch, True)[loaded], samples.load(index)[loaded]) for index in range(24)]
        is_mirrored = [torch.equal(drawn, plain.flip(-1)) for drawn, plain in pairs]
        assert all(coin or torch.equal(*pair) for coin, pair in zip(is_mirrored, pairs, strict=True))
        return is_mirrored

    assert 6 <= sum(coins(0)) <= 18
    assert coins(0) == coins(0) != coins(1) and coins(0) != coins(0, seed=4)
    assert not any(coins(0, random_flip=None))
