"""The feed of conditioned images: its batches, splits and missing embeddings, for any number of processes."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train_decoder
from data import decoder_feed
from data.feed import Feed
from data.images.scenes import is_held_out, triples_of
from tests.data.helpers import assert_same, ids, joined, one_line
from tests.data.images.conditions import (
    WIDTH,
    arguments,
    embedding,
    encodings,
    padded,
    write_rows,
    write_tars,
)
from tests.processes import Process, on_processes
from training.flags.idle import refuse_idle_flags
from training.flags.parser import ArgumentParser
from training.flags.shared import add_conditioned_image_arguments

SHARDS, EACH = 10, 8


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tars(tmp_path) -> Path:
    return write_tars(tmp_path / "tars", "txt", "img_emb.npy", "text_emb.npy", shards=SHARDS, each=EACH)


def feed_of(spec: Path | str, process: Process | None = None, text: bool = True, **changed: Any) -> Feed:
    args = arguments(image_folder=str(spec), **changed)
    return decoder_feed(args, process or Process(), image_size=8, takes_text=text)


def taken(spec: Path | str, world_size: int = 1, n: int = 4, start: int = 0, **changed: Any) -> dict[str, list[dict]]:
    """The first batches of training from sample `start`, and all of validation and test, those of all processes put
    together by their positions."""

    def take(process: Process) -> dict[str, list[dict]]:
        feed = feed_of(spec, process, **changed)
        batches = [feed.start(start), *(feed.next() for _ in range(n - 1))]
        passes = {"train": batches, "valid": list(feed.validation()), "test": list(feed.test())}
        return {name: [{**batch, "bad": []} for batch in found] for name, found in passes.items()}

    of_ranks = on_processes(world_size, take)
    passes = {name: [joined(parts) for parts in zip(*(o[name] for o in of_ranks), strict=True)] for name in of_ranks[0]}
    return {**passes, **{name: [in_order(joined(passes[name]))] for name in ("valid", "test")}}


def in_order(batch: dict) -> dict:
    order = np.argsort(batch["positions"])
    return {k: v[order] if isinstance(v, torch.Tensor) else [v[i] for i in order if v] for k, v in batch.items()}


def test_a_batch_holds_images_captions_embeddings_and_encodings(tars):
    feed = feed_of(tars)
    batch = feed.start(0)
    assert batch.keys() == {"images", "captions", "image_embed", "text_encodings", "positions", "ids"}
    assert feed.samples.widths == {"image_embed": WIDTH, "text_encodings": (5, 4)}
    for row, number in enumerate(batch["ids"]):
        assert batch["images"][row, 0, 0, 0] == number and batch["captions"][row] == f"image {number}"
        np.testing.assert_array_equal(batch["image_embed"][row], embedding(number).astype(np.float32))
        np.testing.assert_array_equal(batch["text_encodings"][row], padded(encodings(number)))
    shapes = {key: (tuple(t.shape), t.dtype) for key, t in batch.items() if isinstance(t, torch.Tensor)}
    assert shapes == {
        "images": ((4, 3, 8, 8), torch.uint8), "image_embed": ((4, WIDTH), torch.float32),
        "text_encodings": ((4, 5, 4), torch.float32),
    }  # fmt: skip


@pytest.mark.parametrize("split_by", ["sample", "shard"])
@pytest.mark.parametrize("world_size, workers", [(2, 0), (4, 0), (1, 2)])
def test_splits_and_batches_are_the_same_for_any_number_of_processes_and_workers(tars, split_by, world_size, workers):
    expected = taken(tars, split_by=split_by)
    found = taken(tars, world_size, split_by=split_by, num_workers=workers)
    for name, batches in expected.items():
        assert_same(batches, found[name])
    assert_same(expected["train"][2:], taken(tars, world_size, 2, start=8, split_by=split_by)["train"])


@pytest.mark.parametrize("split_by", ["sample", "shard"])
def test_every_image_is_in_one_of_three_splits(tars, split_by):
    whole = taken(tars, n=14, split_by=split_by)
    homes = {name: ids(batches) for name, batches in whole.items()}
    n = {"sample": (60, 12, 8), "shard": (56, 16, 8)}[split_by]
    assert tuple(len(set(home)) for home in homes.values())[1:] == n[1:]
    feed = feed_of(tars, split_by=split_by)
    assert (len(feed.train_set), len(feed.valid_set), len(feed.test_set)) == n and feed.samples_per_epoch == n[0]
    assert sorted([*feed.train_set, *feed.valid_set, *feed.test_set]) == list(range(SHARDS * EACH))
    assert set(homes["train"]) <= set(feed.train_set)
    assert [homes["valid"], homes["test"]] == [list(feed.valid_set), list(feed.test_set)]
    if split_by == "shard":
        shards = [{index // EACH for index in part} for part in (feed.train_set, feed.valid_set, feed.test_set)]
        assert [len(of_split) for of_split in shards] == [7, 2, 1]


def test_a_feed_without_a_test_split_tests_nothing(tars):
    feed = feed_of(tars, test_fraction=0.0)
    feed.start(0)
    assert list(feed.test()) == [] and len(feed.train_set) == 68


def test_splits_that_cannot_be_are_refused(tars):
    assert "at least 3 are needed" in one_line(feed_of, tars / "{00000..00001}.tar", split_by="shard")
    assert "--split_by shard splits by tars" in one_line(feed_of, "demo:shapes:40", split_by="shard", text=False)


def test_a_missing_embedding_is_skipped_counted_once_and_never_stops_a_run(tmp_path):
    """Half of the rows are zeros, in all splits; that is far more than damaged files may be."""
    tars, rows = write_tars(tmp_path / "tars", "txt", shards=5, each=8), write_rows(tmp_path / "emb", shards=5, each=8)
    for path in rows.glob("*.npy"):
        array = np.load(path)
        array[::2] = 0
        np.save(path, array)
    feed = feed_of(tars, image_embeddings=str(rows), on_bad_sample="error", text=False)
    said: list[str] = []
    met = [feed.start(0)]
    feed.report_bad_samples(said.append)
    met += [feed.next() for _ in range(20)]
    feed.report_bad_samples(said.append)
    met += [*feed.validation(), *feed.test(), *(feed.next() for _ in range(20))]
    feed.report_bad_samples(said.append)
    assert all(index % 2 == 1 for index in ids(met)), "those with zeros are left out"
    assert (feed.bad_samples.count, feed.bad_samples.count_incomplete) == (0, 20)
    assert all("its image embedding: zeros only" in line and line.startswith("left out ") for line in said)
    assert 1 <= len(said) <= 5 and len({line.split(",")[0] for line in said}) == len(said), "not for each of them"


def test_the_demonstration_has_embeddings_encodings_and_captions():
    batch = feed_of("demo:shapes:64").start(0)
    assert batch["image_embed"].shape == (4, 30) and batch["text_encodings"].shape == (4, 9, 32)
    assert all(len(caption.split()) >= 5 for caption in batch["captions"])
    unseen = feed_of("demo:shapes:64", text=False).samples.held_out(9)
    assert len(unseen) == 9 and unseen.load(8).keys() == {"images", "captions", "image_embed"}
    assert all(is_held_out(t) for t in triples_of(torch.stack([unseen.load(i)["image_embed"] for i in range(9)])))
    assert feed_of("demo:shapes:64", text=False).samples.widths == {"image_embed": 30, "text_encodings": None}


def test_flags_have_their_public_names():
    parser = train_decoder.build_parser()
    flags = {
        "webdataset_base_url": "a/{}.tar", "img_embeddings_url": "b", "text_embeddings_url": "c", "start_shard": 3,
        "end_shard": 9, "shard_width": 5, "index_width": 3, "split_by": "SHARD", "n_sample_images": 2,
    }  # fmt: skip
    args = parser.parse_args([str(word) for flag, value in flags.items() for word in (f"--{flag}", value)])
    assert (args.image_folder, args.image_embeddings, args.text_embeddings) == ("a/{}.tar", "b", "c")
    assert (args.start_shard, args.end_shard, args.shard_width, args.index_width) == (3, 9, 5, 3)
    assert (args.split_by, args.num_images_save) == ("shard", 2)


@pytest.mark.parametrize("words, expected", [
    (["--clip_weights", "w"], "--clip_weights has no effect with --clip None"),
    (["--index_width", "3"], "--index_width has no effect with --image_embeddings None"),
    (["--image_folder", "a.tar", "--shard_width", "3"], "--shard_width has no effect with --image_folder a.tar"),
    (["--clip", "ViT-B-32"], "--clip ViT-B-32 needs the file of its weights"),
])  # fmt: skip
def test_flags_without_effect_are_refused(words, expected):
    parser = ArgumentParser("test", "", is_root=lambda: True)
    add_conditioned_image_arguments(parser)
    with redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit):
        refuse_idle_flags(parser, parser.parse(words), "conditioned images")
    assert expected in said.getvalue()
    fine = ["--image_folder", "{}.tar", "--shard_width", "3", "--text_embeddings", "x", "--index_width", "2"]
    refuse_idle_flags(parser, parser.parse([*fine, "--clip", "a", "--clip_weights", "b"]), "conditioned images")
