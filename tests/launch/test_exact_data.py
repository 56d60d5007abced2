"""A run that is interrupted, and continued by any number of processes and loader workers, trains on the same samples in
the same order as a run that is never interrupted."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
from forks import fork
from PIL import Image

from tests.scripts import VAE, words

N_IMAGES, BAD = 53, {5, 24, 25}
BATCH, UPDATES, SAVE_EVERY = 8, 26, 6  # 53 is prime: three epochs end, each inside a batch
FLAGS = [*words(VAE.tiny), "--batch_size", str(BATCH), "--valid_fraction", "0", "--epochs", "100",
         "--max_steps", str(UPDATES), "--save_every_n_steps", str(SAVE_EVERY)]  # fmt: skip
ASKED_TO_STOP = 75
EXIT_CODES = {"SIGKILL": -signal.SIGKILL, "SIGTERM": ASKED_TO_STOP, "SIGUSR1": ASKED_TO_STOP, "": 0}

SampleDataset = dict[int, list[int]]  # ids by update


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of image files, some of which do not contain an image."""
    folder = tmp_path_factory.mktemp("images")
    for index in range(N_IMAGES):
        path = folder / f"{index:02d}.png"
        Image.new("RGB", (16, 16), (4 * index, 0, 0)).save(path)
        if index in BAD:
            path.write_bytes(b"not an image")
    return folder


@pytest.fixture(scope="module")
def uninterrupted(images: Path, tmp_path_factory: pytest.TempPathFactory) -> SampleDataset:
    """The samples of a single process that is never interrupted."""
    return taken(1, images, tmp_path_factory.mktemp("uninterrupted"), 0, "")


def taken(processes: int, images: Path, folder: Path, num_workers: int, interruption: str) -> SampleDataset:
    """The samples of one start of the run in this folder."""
    ids = folder / "ids.jsonl"
    ids.unlink(missing_ok=True)
    flags = ["--ids", str(ids), "--interrupt", interruption, "--image_folder", str(images)]
    flags += ["--output_dir", str(folder / "run"), "--num_workers", str(num_workers), *FLAGS]
    if interruption.startswith("SIGUSR1"):  # only one process gets the signal, and tells the others
        flags.append("--last_alone")
    ranks = fork("interrupted_worker", flags, folder / "log", processes)
    expected = EXIT_CODES[interruption.partition("@")[0]]
    assert [rank.returncode for rank in ranks] == [expected] * processes, ranks[0].output
    lines = [json.loads(line) for line in ids.read_text().splitlines()]
    samples = {line["update"]: line["ids"] for line in lines}
    assert list(samples) == list(range(min(samples), max(samples) + 1))
    return samples


def draw_interruptions(seed: str) -> list[str]:
    """The signals in random order, each once, at random updates between two saves."""
    draws = random.Random(seed)
    updates = [SAVE_EVERY * (i + 1) + draws.randint(1, SAVE_EVERY - 2) for i in range(3)]
    return [f"{name}@{update}" for name, update in zip(draws.sample(list(EXIT_CODES)[:3], 3), updates, strict=True)]


def assert_exact(starts: list[tuple[int, int]], images: Path, folder: Path, seed: str, expected: SampleDataset) -> None:
    """Make four starts, each with its own number of processes and of loader workers. The first three are interrupted,
    and each start must continue from the last save of the start before it."""
    trained: SampleDataset = {}
    goes_on_at = 1
    for (processes, num_workers), interruption in zip(starts, [*draw_interruptions(seed), f"@{UPDATES}"], strict=True):
        samples = taken(processes, images, folder, num_workers, interruption)
        assert samples == {update: expected[update] for update in samples}, interruption
        assert min(samples) == goes_on_at, interruption
        trained |= samples
        name, _, update = interruption.partition("@")
        at, last = int(update), max(samples)
        if EXIT_CODES[name] == ASKED_TO_STOP:
            assert at <= last <= at + 2, interruption  # all processes stop together, up to two updates later
            goes_on_at = last + 1
        else:
            assert last == at, interruption
            goes_on_at = at // SAVE_EVERY * SAVE_EVERY + 1
    assert trained == expected


def test_an_uninterrupted_run_takes_every_good_sample_in_each_epoch(uninterrupted: SampleDataset) -> None:
    assert list(uninterrupted) == list(range(1, UPDATES + 1))
    order = [index for samples in uninterrupted.values() for index in samples]
    epochs = [order[start : start + N_IMAGES] for start in range(0, UPDATES * BATCH - N_IMAGES + 1, N_IMAGES)]
    for epoch in epochs:  # a bad image is replaced by the next one, which then occurs twice
        assert set(epoch) == set(range(N_IMAGES)) - BAD
    assert len(epochs) == 3 and epochs[0] != epochs[1] != epochs[2]


def test_another_number_of_processes_and_workers_goes_on_in_the_same_order(
    images: Path, uninterrupted: SampleDataset, tmp_path: Path
) -> None:
    assert_exact([(1, 0), (2, 4), (4, 1), (1, 4)], images, tmp_path, "1 2 4 1", uninterrupted)
