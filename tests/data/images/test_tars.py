"""Images in webdataset tars, as img2dataset writes them: the same as in a folder."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data import open_images
from tests.data.helpers import one_line, write_tar

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


def test_index_that_was_kept_when_fewer_endings_were_read_is_made_again(tmp_path, monkeypatch):
    content = io.BytesIO()
    Image.new("RGB", (20, 20)).save(content, "tiff")
    write_tar(tmp_path / "tars" / "0.tar", {"0": {"png": picture(1)}, "1": {"tiff": content.getvalue()}})
    with monkeypatch.context() as before:
        before.setattr("data.images.sets.ENDINGS", (".png",))
        assert len(opened(tmp_path / "tars")) == 1
    assert len(opened(tmp_path / "tars")) == 2
