"""Images with captions and embeddings: in tars, with files of rows beside them, in folders; and the feed of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.data.bad_samples import SampleIncomplete
from tandem.data.embeddings import IMAGE, TEXT
from tandem.data.fields import SampleDataset
from tandem.data.sets import open_conditioned, widths_of
from tests.data.conditions import (
    TEXT_WIDTH,
    TOKENS,
    WIDTH,
    embedding,
    encodings,
    members,
    padded,
    picture,
    write_rows,
    write_tars,
)
from tests.data.helpers import ids, one_line, write_tar
from tests.data.source_table import CONDITIONED, in_folder, npy, training
from tests.scripts import DECODER


def opened(spec: Path | str, text: bool = True, image: bool = True, **options: Any) -> SampleDataset:
    kinds = [kind for kind, is_taken in ((IMAGE, image), (TEXT, text)) if is_taken]
    return open_conditioned(str(spec), image_size=8, kinds=kinds, **options)


def by_row(folder: Path) -> dict[str, Any]:
    files = {IMAGE: str(folder / "img_emb_*.npy")}
    if [*folder.glob("text_emb_*")]:
        files[TEXT] = str(folder / "text_emb_{}.npy")
    return {"rows": files}


def assert_images_are(found: SampleDataset, numbers: range, with_text: bool = True) -> None:
    """Every sample is the image of its number, with its caption and embeddings."""
    assert len(found) == len(numbers)
    for index, number in enumerate(numbers):
        sample = found.load(index)
        assert sample["captions"] == f"image {number}"
        assert sample["images"].shape == (3, 8, 8) and sample["images"][0, 0, 0] == number
        np.testing.assert_array_equal(sample["image_embed"], embedding(number).astype(np.float32))
        assert sample["image_embed"].dtype == torch.float32
        if with_text:
            np.testing.assert_array_equal(sample["text_encodings"], padded(encodings(number)))


WIDTHS = {"image_embed": WIDTH, "text_encodings": (TOKENS, TEXT_WIDTH)}


@pytest.mark.parametrize("kinds", [("img_emb.npy", "text_emb.npy"), ("npy", "text.npy", "depth.npy", "mask.png")])
def test_embeddings_beside_the_images_are_read_from_tars_and_folders(tmp_path, kinds):
    tars = write_tars(tmp_path / "tars", "txt", "json", *kinds)
    beside = [kind for kind in kinds if kind != "mask.png"]  # in a folder, a mask is an image of its own
    in_folder(tmp_path / "loose", {number: members(number, "txt", *beside) for number in range(12)})
    for spec in (tars, tars / "*.tar", tmp_path / "loose"):
        found = opened(spec)
        assert widths_of(found) == WIDTHS
        assert_images_are(found, range(12))
    assert opened(tars).describe(5) == f"{tars}/00001.tar/000010001.png"


def test_embeddings_in_files_of_rows_are_found_by_the_number_of_the_tar_and_the_end_of_the_key(tmp_path):
    tars, rows = write_tars(tmp_path / "tars", "txt", "npy"), write_rows(tmp_path / "emb")
    write_rows(rows, prefix="text_emb_")
    found = opened(tars, **by_row(rows))
    assert widths_of(found) == WIDTHS
    assert_images_are(found, range(12))
    for path in rows.glob("img*"):
        np.save(path, np.load(path)[::-1])
    ranges = {"rows": {IMAGE: str(rows / "img_emb_{0000..0002}.npy")}}
    for files in (by_row(rows), ranges):
        found = opened(tars, text=TEXT in files["rows"], **files)
        np.testing.assert_array_equal(found.load(4)["image_embed"], embedding(7).astype(np.float32))


def claiming(content: bytes, n: int) -> bytes:
    """A .npy whose header says that it has n numbers."""
    shape = f"({n},), }}".encode()
    return content.replace(b"(6,), }" + b" " * (len(shape) - 7), shape)


def test_an_embedding_of_zeros_or_none_is_missing_and_one_that_does_not_fit_is_damaged(tmp_path):
    nan = embedding(5)
    nan[2] = np.nan
    odd = {
        1: np.zeros(WIDTH, np.float32), 2: embedding(2)[:-1], 3: np.ones((2, WIDTH), np.float32), 4: nan,
        5: np.ones(WIDTH, np.int64), 6: np.asfortranarray(np.ones((2, WIDTH), np.float32)),
    }  # fmt: skip
    contents = {number: npy(array) for number, array in odd.items()}
    contents |= {7: b"no array", 8: npy(embedding(8))[:-1], 9: npy(embedding(9)[None])}
    contents[10] = claiming(npy(embedding(10)), 10**13)
    contents[11] = npy(embedding(11)) * 2
    but = {number: {**members(number), "npy": content} for number, content in contents.items()} | {0: members(0)}
    found = opened(write_tars(tmp_path / "tars", "npy", but=but), text=False)
    for index in (0, 1):
        with pytest.raises(SampleIncomplete):
            found.load(index)
    for index, said in {
        2: "(5,)", 3: "(2, 6)", 4: "finite", 5: "int64", 6: "Fortran order", 7: "no numpy array",
        8: "takes 12 bytes", 10: "(10000000000000,) takes 20000000000000 bytes", 11: "more follows its array of shape",
    }.items():  # fmt: skip
        assert said in one_line(found.load, index)
    assert found.load(9)["image_embed"].shape == (WIDTH,), "of an array (1, 6)"


def test_a_start_takes_the_widths_of_the_first_embedding_that_can_be_read(tmp_path):
    records = {n: members(n, "txt", "img_emb.npy", "text_emb.npy") for n in range(4)}
    records[0] |= {"img_emb.npy": b"x" * len(records[0]["img_emb.npy"]), "text_emb.npy": b"x" * 10_000}
    assert widths_of(opened(in_folder(tmp_path / "folder", records))).keys() == WIDTHS.keys()
    rows = [{"path": f"{n}.png", **({"image_embed": [1, 2, n]} if n else {})} for n in range(3)]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert widths_of(opened(tmp_path / "set.jsonl", text=False))["image_embed"] == 3
    rows[1:] = [{**row, "image_embed": [[n]]} for n, row in enumerate(rows[1:])]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert "0.png': it is empty" in one_line(opened, tmp_path / "set.jsonl", text=False)


def test_a_text_that_is_longer_than_the_largest_file_says_is_refused(tmp_path):
    """Seven tokens in fp16 take less than five in fp32."""
    but = {2: {**members(2), "text.npy": npy(np.ones((7, TEXT_WIDTH), np.float16))}}
    found = opened(write_tars(tmp_path / "tars", "text.npy", but=but), image=False)
    assert one_line(found.load, 2) == "its text encoding: shape (7, 4), where others have (5, 4)"


def test_a_row_beyond_the_file_is_named(tmp_path):
    tars, rows = write_tars(tmp_path / "tars", "txt"), write_rows(tmp_path / "emb")
    np.save(rows / "img_emb_0001.npy", np.load(rows / "img_emb_0001.npy")[:2])
    found = opened(tars, text=False, **by_row(rows))
    assert one_line(found.load, 6) == f"it is row 2 of {rows}/img_emb_0001.npy, which has only 2"
    assert found.load(5)["captions"] == "image 5"


# What spoils the tars or the rows, and what is said then.
MISTAKES: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "rows of text for images": (
        lambda tars, rows: np.save(rows / "img_emb_0000.npy", np.ones((4, 2, 7), np.float32)), "has the shape (2, 7)"
    ),
    "rows of another width": (
        lambda tars, rows: np.save(rows / "img_emb_0001.npy", np.ones((4, 7), np.float32)), "have the shape (7,) in"
    ),
    "a tar without rows": (
        lambda tars, rows: (rows / "img_emb_0001.npy").unlink(), "has no file for 1 of 3 tars, the first is"
    ),
    "rows without a number": (
        lambda tars, rows: (rows / "img_emb_0001.npy").rename(rows / "img_emb_b.npy"), "does not end with the number"
    ),
    "more rows than the file holds": (
        lambda tars, rows: (rows / "img_emb_0001.npy").write_bytes(claiming(npy(embedding(0)), 10**13)), "img_emb_0001"
    ),
    "keys without a row": (lambda tars, rows: write_tar(tars / "00001.tar", {"cat": members(1)}), "the key 'cat' in"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_files_of_rows_that_do_not_fit_are_named(tmp_path, mistake):
    tars, rows = write_tars(tmp_path / "tars", "txt"), write_rows(tmp_path / "emb")
    spoil, expected = MISTAKES[mistake]
    spoil(tars, rows)
    assert expected in one_line(opened, tars, text=False, **by_row(rows))


def test_flags_that_contradict_one_another_are_refused(tmp_path):
    tars, rows = write_tars(tmp_path / "tars", "txt", "npy", "text.npy"), write_rows(tmp_path / "emb")
    assert "--max_text_len 4" in one_line(opened, tars, longest_text=4)
    assert widths_of(opened(tars, longest_text=5)) == WIDTHS
    assert "has no shards" in one_line(opened, "demo:shapes", start_shard=2)
    (tmp_path / "loose").mkdir()
    (tmp_path / "loose" / "a.png").write_bytes(picture(0))
    assert "--image_embeddings is for tars" in one_line(opened, tmp_path / "loose", text=False, **by_row(rows))


def test_images_are_mirrored_only_where_nothing_says_left_or_right(tmp_path):
    for kinds, taken in ((("txt",), False), (("npy",), True)):
        tars = write_tars(tmp_path / "-".join(kinds), *kinds)
        assert "--random_flip" in one_line(opened, tars, text=False, image=taken, flip=True)
    plain = opened(write_tars(tmp_path / "plain", "npy"), text=False, image=False, flip=True)
    assert plain.load(0).keys() == {"images", "captions"}


# The feed.


def flags(folder: Path | str, **more: Any) -> dict[str, Any]:
    return {
        "image_folder": folder, "crop": None, "crop_area": None, "batch_size": 4, "valid_fraction": 0.15,
        "test_fraction": 0.1, **more,
    }  # fmt: skip


@pytest.mark.parametrize("split_by, sizes", [("sample", (60, 12, 8)), ("shard", (56, 16, 8))])
def test_every_image_is_in_one_of_three_splits(split_by, sizes, tmp_path):
    tars = write_tars(tmp_path / "tars", "txt", "img_emb.npy", shards=10, each=8)
    feed = CONDITIONED.feed(**flags(tars, split_by=split_by))
    splits = feed.train_set, feed.valid_set, feed.test_set
    assert tuple(map(len, splits)) == sizes and feed.samples_per_epoch == sizes[0]
    assert sorted(itertools.chain(*splits)) == list(range(80))
    assert {*ids(training(feed, 14))} <= {*feed.train_set}
    assert ids(feed.validation()) == list(feed.valid_set)
    if split_by == "shard":
        assert [len({index // 8 for index in split}) for split in splits] == [7, 2, 1]


def test_a_missing_embedding_is_skipped_counted_once_and_never_stops_a_run(tmp_path):
    """Half of the rows are zeros, in all splits; that is far more than damaged files may be."""
    tars, rows = write_tars(tmp_path / "tars", "txt", shards=5, each=8), write_rows(tmp_path / "emb", shards=5, each=8)
    for path in rows.glob("*.npy"):
        array = np.load(path)
        array[::2] = 0
        np.save(path, array)
    feed = CONDITIONED.feed(**flags(tars, image_embeddings=rows, on_bad_sample="error", test_fraction=0))
    said: list[str] = []
    met = training(feed, 21)
    feed.report_bad_samples(said.append)
    met += [*feed.validation(), *(feed.next() for _ in range(20))]
    feed.report_bad_samples(said.append)
    assert all(index % 2 == 1 for index in ids(met)), "those with zeros are left out"
    assert (feed.bad_samples.count, feed.bad_samples.count_incomplete) == (0, 20)
    assert 1 <= len(said) <= 5 and len({line.split(",")[0] for line in said}) == len(said), "not for each of them"


@pytest.mark.parametrize("said, idle", [
    (["--clip_weights", "w"], "--clip_weights"), (["--index_width", "3"], "--index_width"),
    (["--text_embeddings", "e"], "--text_embeddings"),
    (["--image_embeddings", "e", "--clip", "c", "--clip_weights", "w"], "--image_embeddings"),
    (["--image_folder", "a.tar", "--shard_width", "3"], "--shard_width"),
])  # fmt: skip
def test_flags_without_effect_are_refused(said, idle, tmp_path):
    assert f"error: {idle} " in DECODER.refused(tmp_path, *said)
