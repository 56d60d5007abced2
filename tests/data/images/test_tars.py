"""Images in webdataset tars, as img2dataset writes them: the same as in a folder."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data import image_feed, open_images, video_feed
from tests.data.helpers import one_line, write_tar
from tests.data.test_feed import arguments as image_arguments
from tests.data.videos.test_feed import arguments as video_arguments
from tests.processes import Process

ENDINGS = ("jpg", "png", "webp")


def picture(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (20, 24, 3), np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, {"jpg": "jpeg"}.get(ENDINGS[number % 3], ENDINGS[number % 3]))
    return content.getvalue()


def write(folder: Path, n: int = 12, per_tar: int = 4) -> tuple[Path, Path]:
    """The same images in tars, 00000.tar, 00001.tar, ..., and loose."""
    tars, loose = folder / "tars", folder / "loose"
    loose.mkdir(parents=True)
    for shard in range(n // per_tar):
        samples = {}
        for place in range(per_tar):
            number, key = shard * per_tar + place, f"{shard:05d}{place:04d}"
            ending = ENDINGS[number % 3]
            samples[key] = {
                ending: picture(number), "json": json.dumps({"key": key}).encode(), "txt": f"image {number}".encode()
            }  # fmt: skip
            (loose / f"{key}.{ending}").write_bytes(samples[key][ending])
        write_tar(tars / f"{shard:05d}.tar", samples)
        (tars / f"{shard:05d}.parquet").touch()
        (tars / f"{shard:05d}_stats.json").touch()
    return tars, loose


def opened(spec: Path | str, **options):
    return open_images(str(spec), **{"image_size": 16, **options})


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_images_in_tars_are_those_of_a_folder_in_its_order(tmp_path):
    tars, loose = write(tmp_path)
    in_tars, files = opened(tars, flip=True, seed=5), opened(loose, flip=True, seed=5)
    assert len(in_tars) == len(files) == 12
    assert [in_tars.name(i) for i in range(12)] == [files.name(i) for i in range(12)]
    assert in_tars.describe(5) == f"{tars}/00001.tar/000010001.webp"
    for i in range(12):
        for epoch, augment in ((0, False), (0, True), (1, True)):
            assert torch.equal(in_tars.load(i, epoch, augment), files.load(i, epoch, augment))
    kept = {path.name for path in tars.glob(".*")}
    assert kept == {f".{shard:05d}.tar.images.index.npz" for shard in range(3)}, "an index of sounds has another name"
    assert in_tars.load(0).shape == (3, 16, 16) and opened(tars, channels=4).load(0).shape == (4, 16, 16)


def test_tars_are_named_by_a_folder_a_pattern_a_range_or_one_by_one(tmp_path):
    tars, _ = write(tmp_path)
    names = [opened(tars).name(i) for i in range(12)]
    for spec, expected in {
        tars / "*.tar": names, tars / "{00000..00002}.tar": names, tars / "{00001..00002}.tar": names[4:],
        tars / "00002.tar": names[8:], tars / "0000[02].tar": names[:4] + names[8:],
    }.items():  # fmt: skip
        images = opened(spec)
        assert [images.name(i) for i in range(len(images))] == expected, spec


@pytest.mark.parametrize(
    "name, expected",
    [("none*.tar", "none*.tar"), ("{00001..00004}.tar", "00003.tar"), ("texts.tar", "no image (.jpg"),
     ("a.tar.gz", "decompress"), ("a.csv", "give a folder of images, or tars"), ("mixed", "the one or the other"),
     ("empty", ".pbm .tar are read")],
)  # fmt: skip
def test_what_is_no_set_of_tars_is_named(tmp_path, name, expected):
    tars, _ = write(tmp_path)
    write_tar(tars / "texts.tar", {"0": {"txt": b"text", "json": b"{}"}})
    write_tar(tars / "mixed" / "a.tar", {"0": {"png": picture(1)}})
    (tars / "empty").mkdir()
    for touched in ("a.tar.gz", "a.csv", "mixed/b.png"):
        (tars / touched).touch()
    assert expected in one_line(opened, tars / name)


def test_an_address_is_refused_because_tars_are_read_at_random():
    for address in ("https://example.org/{000..003}.tar", "s3://bucket/000.tar", "pipe:cat 000.tar"):
        assert "copy them to a disk" in one_line(opened, address)


def test_a_damaged_member_is_named_counted_and_replaced(tmp_path):
    tars, _ = write(tmp_path, 40, 20)
    broken = {f"00002{i:04d}": {"png": b"no picture" if i == 3 else picture(i)} for i in range(20)}
    write_tar(tars / "00002.tar", broken)
    feed, said = image_feed(image_arguments(image_folder=str(tars), valid_fraction=0.0), Process()), []
    batches = [feed.start(0), *(feed.next() for _ in range(7))]
    feed.report_bad_samples(said.append)
    assert said == [f"cannot read {tars}/00002.tar/000020003.png: the content is none of JPEG, PNG, WEBP, BMP, "
                    "TIFF, PPM; the next image takes its place"]  # fmt: skip
    assert 43 not in {index for batch in batches for index in batch["ids"]}


def test_a_disk_that_fails_is_not_taken_for_the_end_of_an_image(tmp_path, monkeypatch):
    tars, _ = write(tmp_path)
    images = opened(tars)

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(OSError, match="Input/output error"):
        images.load(0)


def test_videos_are_trained_with_images_from_tars(tmp_path):
    tars, loose = write(tmp_path)
    from_tars, from_files = (video_feed(video_arguments(image_folder=str(f)), Process()) for f in (tars, loose))
    expected = [feed.start(16) for feed in (from_tars, from_files)]
    assert expected[0]["ids"] == expected[1]["ids"] and min(expected[0]["ids"]) >= 40
    assert torch.equal(expected[0]["videos"], expected[1]["videos"])


def test_index_that_was_kept_when_fewer_endings_were_read_is_made_again(tmp_path, monkeypatch):
    content = io.BytesIO()
    Image.new("RGB", (20, 20)).save(content, "tiff")
    write_tar(tmp_path / "tars" / "0.tar", {"0": {"png": picture(1)}, "1": {"tiff": content.getvalue()}})
    with monkeypatch.context() as before:
        before.setattr("data.images.sets.ENDINGS", (".png",))
        assert len(opened(tmp_path / "tars")) == 1
    assert len(opened(tmp_path / "tars")) == 2
