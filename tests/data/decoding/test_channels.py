"""Pictures with another number of channels than three keep what their files hold; other pictures are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from tandem.data.decoding.channels import decode_channels
from tandem.data.sets import open_images
from tandem.data.sources.record import FileRef

ROWS, COLUMNS = 12, 20
LEVELS = np.random.default_rng(0).integers(0, 1 << 16, (5, ROWS, COLUMNS)).astype(np.uint16)


def written(path: Path, array: np.ndarray, **options: Any) -> FileRef:
    if path.suffix == ".npy":
        np.save(path, array)
    elif path.suffix == ".tif":
        tifffile.imwrite(path, array, **options)
    else:
        Image.fromarray(array).save(path, **options)
    return FileRef(str(path))


UNIT = LEVELS.astype(np.float64) / 65535
FILES = {
    "first.npy": (LEVELS, {}), "last.npy": (LEVELS.transpose(1, 2, 0), {}), "floats.npy": (UNIT.astype(np.float32), {}),
    "pages.tif": (LEVELS, {"photometric": "minisblack"}),
    "last.tif": (LEVELS.transpose(1, 2, 0), {"photometric": "minisblack", "planarconfig": "contig"}),
    "planes.tif": (LEVELS, {"photometric": "minisblack", "planarconfig": "separate"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_five_channels_keep_their_depth_and_their_order(name: str, tmp_path: Path) -> None:
    array, options = FILES[name]
    found = decode_channels(written(tmp_path / name, array, **options), (ROWS, COLUMNS), 5)
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy(), UNIT.astype(np.float32))


@pytest.mark.parametrize("name", ["grey.png", "grey.npy", "grey.tif", "grey.pgm"])
def test_sixteen_bits_of_grey_are_not_rounded_to_eight(name: str, tmp_path: Path) -> None:
    found = decode_channels(written(tmp_path / name, LEVELS[0]), (ROWS, COLUMNS), 1)
    np.testing.assert_array_equal(found.numpy()[0], UNIT[0].astype(np.float32))


@pytest.mark.parametrize(("kind", "most"), [("uint8", 255), ("int16", 32767), ("uint32", (1 << 32) - 1), ("bool", 1)])
def test_whole_numbers_are_divided_by_the_maximum_of_their_type(kind: str, most: int, tmp_path: Path) -> None:
    file = written(tmp_path / "a.npy", np.array([[0, most]], kind))
    assert decode_channels(file, (1, 2), 1).tolist() == [[[0, 1]]]


def test_alpha_is_as_stored_and_colours_are_not_multiplied_by_it(tmp_path: Path) -> None:
    pixels = np.full((ROWS, COLUMNS, 4), (200, 100, 50, 64), np.uint8)
    opaque = decode_channels(written(tmp_path / "opaque.png", pixels[..., :3].copy()), (ROWS, COLUMNS), 4)
    assert opaque[3].eq(1).all()
    for name, options in {"a.png": {}, "a.tif": {"photometric": "rgb", "extrasamples": ["unassalpha"]}}.items():
        found = decode_channels(written(tmp_path / name, pixels, **options), (ROWS, COLUMNS), 4)
        torch.testing.assert_close(found[:, 0, 0], torch.tensor([200, 100, 50, 64]) / 255, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("name", "array", "channels", "said"), [
    ("a.npy", LEVELS, 4, "it has 5 channels"), ("a.tif", LEVELS[:3], 4, "it has 3 channels"),
    ("a.jpg", LEVELS[:3].transpose(1, 2, 0).astype(np.uint8), 1, "it has 3 channels"),
    ("a.npy", UNIT[:1] * 255, 1, "floats from"), ("a.npy", -LEVELS[:1].astype(np.int32), 1, "int32 below 0"),
    ("a.npy", UNIT[0] * np.nan, 1, "from nan"), ("a.npy", UNIT[None], 5, "its shape is"),
    ("a.npy", UNIT[0].astype(complex), 1, "complex128"), ("a.npy", UNIT[0][:0], 1, "its shape is"),
    ("a.npy", np.array([[{}]]), 1, "pickle"),
])  # fmt: skip
def test_what_is_no_such_picture_is_said_in_a_line(
    name: str, array: np.ndarray, channels: int, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        decode_channels(written(tmp_path / name, array), (ROWS, COLUMNS), channels)
    assert "\n" not in str(caught.value)


def test_a_damaged_file_is_said_in_a_line(tmp_path: Path) -> None:
    for name in ("a.npy", "a.tif", "a.png"):
        file = written(tmp_path / name, LEVELS[0])
        Path(file.path).write_bytes(Path(file.path).read_bytes()[:150])
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            decode_channels(file, 8, 1)


def test_arrays_are_cropped_and_resized_as_pictures_are(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (40, 100), np.uint8)
    for name in ("a.png", "b.npy"):
        written(tmp_path / name, pixels)
    sets = open_images(str(tmp_path), image_size=(24, 32), channels=1, seed=3)
    picture, array = (sets.load(index)["images"] for index in range(2))
    assert torch.equal(picture, array) and picture.shape == (1, 24, 32)
    colours = open_images(str(tmp_path), image_size=(24, 32)).load(0)["images"]
    assert (colours[:1] / 255 - picture).abs().max() < 1 / 255, "of the same filter, but for the rounding to 8 bits"
