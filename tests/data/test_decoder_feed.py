"""The feed of conditioned images: its batches, splits by shards and missing embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conditions import write_rows, write_tars
from tests.data.helpers import assert_same, ids
from tests.data.sources import CONDITIONED, passes, training
from tests.scripts import DECODER

SHARDS, EACH = 10, 8


def flags(folder: Path | str, **more: Any) -> dict[str, Any]:
    return {
        "image_folder": folder, "crop": None, "crop_area": None, "batch_size": 4, "valid_fraction": 0.15,
        "test_fraction": 0.1, **more,
    }  # fmt: skip


@pytest.fixture
def tars(tmp_path) -> Path:
    return write_tars(tmp_path / "tars", "txt", "img_emb.npy", "text_emb.npy", shards=SHARDS, each=EACH)


@pytest.mark.parametrize("split_by", ["sample", "shard"])
def test_every_image_is_in_one_of_three_splits_the_same_for_any_number_of_processes(tars, split_by):
    n = {"sample": (60, 12, 8), "shard": (56, 16, 8)}[split_by]
    feed = CONDITIONED.feed(**flags(tars, split_by=split_by))
    splits = feed.train_set, feed.valid_set, feed.test_set
    assert tuple(map(len, splits)) == n and feed.samples_per_epoch == n[0]
    assert sorted([*feed.train_set, *feed.valid_set, *feed.test_set]) == list(range(SHARDS * EACH))
    alone, together = (passes(CONDITIONED, flags(tars, split_by=split_by), 14, world_size) for world_size in (1, 4))
    for name, batches in alone.items():
        assert_same(batches, together[name])
    assert set(ids(alone["train"])) <= set(feed.train_set) and ids(alone["valid"]) == list(feed.valid_set)
    feed.start(0)
    assert ids(feed.test()) == list(feed.test_set)
    if split_by == "shard":
        assert [len({index // EACH for index in split}) for split in splits] == [7, 2, 1]


def test_a_missing_embedding_is_skipped_counted_once_and_never_stops_a_run(tmp_path):
    """Half of the rows are zeros, in all splits; that is far more than damaged files may be."""
    tars, rows = write_tars(tmp_path / "tars", "txt", shards=5, each=8), write_rows(tmp_path / "emb", shards=5, each=8)
    for path in rows.glob("*.npy"):
        array = np.load(path)
        array[::2] = 0
        np.save(path, array)
    feed = CONDITIONED.feed(**flags(tars, image_embeddings=rows, on_bad_sample="error"))
    said: list[str] = []
    met = training(feed, 21)
    feed.report_bad_samples(said.append)
    met += [*feed.validation(), *feed.test(), *(feed.next() for _ in range(20))]
    feed.report_bad_samples(said.append)
    assert all(index % 2 == 1 for index in ids(met)), "those with zeros are left out"
    assert (feed.bad_samples.count, feed.bad_samples.count_incomplete) == (0, 20)
    assert 1 <= len(said) <= 5 and len({line.split(",")[0] for line in said}) == len(said), "not for each of them"


@pytest.mark.parametrize("said, idle", [
    (["--clip_weights", "w"], "--clip_weights"), (["--index_width", "3"], "--index_width"),
    (["--image_folder", "a.tar", "--shard_width", "3"], "--shard_width"), (["--clip", "ViT-B-32"], "--clip ViT-B-32"),
])  # fmt: skip
def test_flags_without_effect_are_refused(said, idle, tmp_path):
    assert f"error: {idle} " in DECODER.refused(tmp_path, *said)
