"""--on_bad_sample accept: by Pillow's own switch, what can be read of an image that is cut off is the sample."""

from __future__ import annotations

import io
import itertools
import os

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from torch import Tensor

from data.decoding.images import decode_image_file
from data.sets import open_images
from tests.data.helpers import one_line, write_tar

SIDE = 48
# Those of which Pillow reads a part. The table of contents of a compressed TIFF is at its end, WebP is read as a whole.
CUT_SHORT = {"JPEG": {}, "PNG": {}, "BMP": {}, "GIF": {}, "TIFF": {}, "PPM": {}}


def encoded(kind: str, number: int = 0) -> bytes:
    content = io.BytesIO()
    noise = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    Image.fromarray(noise).save(content, kind)
    return content.getvalue()


def cut(content: bytes, share: float = 0.6) -> bytes:
    return content[: int(len(content) * share)]


def as_pillow_reads_it(content: bytes, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        pixels = np.array(Image.open(io.BytesIO(content)).convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)


@pytest.mark.parametrize("kind", CUT_SHORT)
def test_an_image_that_is_cut_off_is_what_pillow_reads_of_it(kind, monkeypatch):
    whole, short = encoded(kind), cut(encoded(kind))
    assert "truncated" in one_line(decode_image_file, io.BytesIO(short), SIDE, 3), "nobody asked for it here"
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    found = decode_image_file(io.BytesIO(short), SIDE, 3)
    assert torch.equal(found, as_pillow_reads_it(short, monkeypatch))
    is_there = (found == as_pillow_reads_it(whole, monkeypatch)).all(0)
    assert 0.2 < is_there.float().mean() < 0.7, "the rows that lie in front of the cut, wherever the format puts them"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "the file is empty"), (b"no picture", "none of JPEG"), (cut(encoded("WEBP")), "decoder"),
        (encoded("JPEG")[:40], "Truncated"), (encoded("PNG")[:20], "Truncated"),
    ],
    ids=["empty", "text", "webp", "header of a jpeg", "header of a png"],
)  # fmt: skip
def test_what_holds_no_part_of_an_image_stays_a_bad_sample(content, expected, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    assert expected in one_line(decode_image_file, io.BytesIO(content), SIDE, 3)


def test_a_disk_that_fails_is_not_taken_for_a_file_that_is_cut_off(tmp_path, monkeypatch):
    write_tar(tmp_path / "0.tar", {"a": {"jpg": encoded("JPEG")}})
    images = open_images(str(tmp_path / "0.tar"), image_size=SIDE)
    read, calls = os.pread, itertools.count()

    def fail_late(*request: int) -> bytes:
        if next(calls) > 0:
            raise OSError(5, "Input/output error")
        return read(request[0], 512, request[2])

    monkeypatch.setattr(os, "pread", fail_late)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(OSError, match="Input/output error"):
        images.load(0)
