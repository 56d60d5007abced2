"""From files of every kind to the same square picture."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, ImageOps
from torch import Tensor

from tandem.data.bad_samples import collect_partial_reads
from tandem.data.decoding.images import decode_image
from tandem.data.sets import open_images
from tandem.data.sources.record import FileRef
from tests.data.helpers import one_line, write_tar
from tests.data.source_table import encoded, noise

LEFT, RIGHT = (200, 60, 20), (30, 90, 220)
GREY_LEFT, GREY_RIGHT = 200, 40


def halves(left, right, mode: str, size: tuple[int, int] = (64, 64)) -> Image.Image:
    """The left half of one colour, the right half of another."""
    image = Image.new(mode, size, left)
    image.paste(right, (size[0] // 2, 0, *size))
    return image


def photo(width: int, height: int) -> Image.Image:
    """Noise with the 1/f spectrum of natural images."""
    rng = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None, :])
    frequency[0, 0] = 1
    channels = [np.fft.ifft2(np.fft.fft2(rng.normal(size=(height, width))) / frequency).real for _ in range(3)]
    luma = channels[0]
    pixels = np.stack([luma + 0.3 * c for c in channels], -1)
    return Image.fromarray((128 + 45 * (pixels - pixels.mean()) / pixels.std()).clip(0, 255).astype(np.uint8))


def psnr(a: Tensor, b: Tensor) -> float:
    squared_error = (a.double() - b.double()).square().mean().item()
    return 10 * math.log10(255**2 / squared_error) if squared_error else math.inf


def assert_halves(picture: Tensor, left: tuple[int, ...], right: tuple[int, ...], tolerance: int) -> None:
    """Away from the edge between the halves, where JPEG and the filter mix them."""
    size = picture.shape[-1]
    for colour, half in ((left, picture[..., : size // 2 - 2]), (right, picture[..., size // 2 + 2 :])):
        expected = torch.tensor(colour).view(-1, 1, 1)
        assert (half.int() - expected).abs().max() <= tolerance, (half[:, 0, 0], colour)


def sixteen_bits() -> Image.Image:
    pixels = np.full((64, 64), GREY_LEFT * 257, np.uint16)
    pixels[:, 32:] = GREY_RIGHT * 257
    return Image.fromarray(pixels)


GREYS = ((GREY_LEFT,) * 3, (GREY_RIGHT,) * 3)
COLOUR_CASES = {
    **{f"RGB.{ending}": (halves(LEFT, RIGHT, "RGB"), (LEFT, RIGHT), 6) for ending in ("jpg", "jpeg", "webp")},
    **{f"RGB.{ending}": (halves(LEFT, RIGHT, "RGB"), (LEFT, RIGHT), 0) for ending in ("png", "bmp", "tif", "ppm")},
    "CMYK.tiff": (halves(LEFT, RIGHT, "RGB").convert("CMYK"), (LEFT, RIGHT), 2),
    "grey_16_bits.tif": (sixteen_bits(), GREYS, 0),
    "grey_16_bits.pgm": (sixteen_bits(), GREYS, 0),
    "1_bit.pbm": (halves(1, 0, "1"), ((255,) * 3, (0,) * 3), 0),
    "palette.png": (halves(LEFT, RIGHT, "RGB").quantize(2), (LEFT, RIGHT), 2),
    "CMYK.jpg": (halves(LEFT, RIGHT, "RGB").convert("CMYK"), (LEFT, RIGHT), 6),
    "grey.jpg": (halves(GREY_LEFT, GREY_RIGHT, "L"), GREYS, 2),
    "grey_16_bits.png": (sixteen_bits(), GREYS, 0),
    "RGBA.png": (halves((*LEFT, 255), (*RIGHT, 255), "RGBA"), (LEFT, RIGHT), 0),
    "grey_alpha.png": (halves((GREY_LEFT, 255), (GREY_RIGHT, 255), "LA"), GREYS, 0),
}


@pytest.mark.parametrize("name", COLOUR_CASES)
def test_every_mode_and_format_gives_its_colours(tmp_path, name):
    image, (left, right), tolerance = COLOUR_CASES[name]
    image.save(tmp_path / name, quality=95)
    picture = decode_image(FileRef(str(tmp_path / name)), 32, 3)
    assert picture.shape == (3, 32, 32) and picture.dtype == torch.uint8 and picture.is_contiguous()
    assert_halves(picture, left, right, tolerance)
    with_alpha = decode_image(FileRef(str(tmp_path / name)), 32, 4)
    assert torch.equal(with_alpha[:3], picture)
    assert (with_alpha[3] == 255).all()


def palette() -> Image.Image:
    image = halves(0, 1, "P")
    image.putpalette([*LEFT, *RIGHT])
    return image


TRANSPARENT = {
    "RGBA.png": (halves((*LEFT, 255), (*RIGHT, 0), "RGBA"), LEFT, {}),
    "RGBA.webp": (halves((*LEFT, 255), (*RIGHT, 0), "RGBA"), LEFT, {"lossless": True}),
    "grey_alpha.png": (halves((GREY_LEFT, 255), (GREY_RIGHT, 0), "LA"), GREYS[0], {}),
    "palette.png": (palette(), LEFT, {"transparency": 1}),
    "colour_key.png": (halves(LEFT, RIGHT, "RGB"), LEFT, {"transparency": RIGHT}),
}


@pytest.mark.parametrize("name", TRANSPARENT)
def test_transparency_is_kept_with_4_channels_and_shows_white_with_3(tmp_path, name):
    image, left, options = TRANSPARENT[name]
    image.save(tmp_path / name, **options)
    assert_halves(decode_image(FileRef(str(tmp_path / name)), 32, 3), left, (255, 255, 255), 0)
    assert_halves(decode_image(FileRef(str(tmp_path / name)), 32, 4)[3:], (255,), (0,), 0)


def test_colour_of_transparent_pixels_does_not_bleed(tmp_path):
    halves((0, 0, 255, 255), (255, 0, 0, 0), "RGBA", (68, 68)).save(tmp_path / "a.png")
    picture = decode_image(FileRef(str(tmp_path / "a.png")), 31, 4)
    assert ((picture[3] > 0) & (picture[3] < 255)).any()  # the edge falls inside a pixel
    assert (picture[0] == 0).all()


@pytest.mark.parametrize("ending", ["png", "jpg", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path, orientation, ending):
    image = photo(60, 40)
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / f"a.{ending}", exif=exif, quality=95)
    ImageOps.exif_transpose(Image.open(tmp_path / f"a.{ending}")).save(tmp_path / "upright.png")
    picture = decode_image(FileRef(str(tmp_path / f"a.{ending}")), 30, 3)
    upright = decode_image(FileRef(str(tmp_path / "upright.png")), 30, 3)
    assert psnr(picture, upright) > 45  # rounding: rows are filtered before columns


@pytest.mark.parametrize("size", [(96, 32), (32, 96)])
def test_centre_is_cropped(tmp_path, size):
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    pixels[..., 0] = 255
    left, top = (size[0] - 32) // 2, (size[1] - 32) // 2
    pixels[top : top + 32, left : left + 32] = (0, 255, 0)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    picture = decode_image(FileRef(str(tmp_path / "a.png")), 32, 3)
    assert (picture == torch.tensor([0, 255, 0]).view(3, 1, 1)).all()


def test_resize_equals_pillows_antialiased_resize(tmp_path):
    image = photo(80, 60)
    image.save(tmp_path / "a.png")
    reference = np.asarray(image.crop((10, 0, 70, 60)).resize((20, 20), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    picture = decode_image(FileRef(str(tmp_path / "a.png")), 20, 3)
    # but for its outer pixels, whose filter may look beyond the crop
    assert torch.equal(picture[:, :, 1:-1], torch.from_numpy(reference.copy())[:, :, 1:-1])


def reduced_and_full(folder: Path, image: Image.Image, size: int) -> tuple[Tensor, Tensor]:
    """The picture of a JPEG, and of a lossless copy of the JPEG's full decode."""
    image.save(folder / "a.jpg", quality=90)
    Image.open(folder / "a.jpg").save(folder / "full.png")
    return decode_image(FileRef(str(folder / "a.jpg")), size, 3), decode_image(
        FileRef(str(folder / "full.png")), size, 3
    )


@pytest.mark.parametrize("width, height, size", [(375, 281, 128), (513, 400, 32)])
def test_jpeg_decoded_at_reduced_scale_looks_like_the_full_decode(tmp_path, width, height, size):
    reduced, full = reduced_and_full(tmp_path, photo(width, height), size)
    assert 35 < psnr(reduced, full) < math.inf  # on such noise, harder than photographs, which reach 43


def bomb() -> bytes:
    header, data = b"IHDR" + struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0), b"IDAT"
    chunks = [struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (header, data)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


JPEG, PNG, WEBP = (encoded(photo(64, 64), kind) for kind in ("jpeg", "png", "webp"))
BROKEN = {
    "truncated": (JPEG[:1000], "truncated"), "empty": (b"", "the file is empty"),
    "no image": (b"404 Not Found", "none of JPEG"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n", "none of JPEG"),
    "broken stream": (PNG.replace(b"IDAT\x78", b"IDAT\0"), ""),  # zlib's header
    "bomb": (bomb(), "bomb"),
}  # fmt: skip
HOLDS_NOTHING = {
    "empty": BROKEN["empty"], "no image": BROKEN["no image"], "header of a jpeg": (JPEG[:40], "Truncated"),
    "header of a png": (PNG[:20], "Truncated"), "webp": (WEBP[: len(WEBP) // 2], "decoder"),  # is read as a whole
}  # fmt: skip


@pytest.mark.parametrize("is_accepted, content, expected", [
    *(pytest.param(False, *case, id=name) for name, case in BROKEN.items()),
    *(pytest.param(True, *case, id=f"accept {name}") for name, case in HOLDS_NOTHING.items()),
])  # fmt: skip
def test_broken_content_is_a_value_error_of_one_line(is_accepted, content, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", is_accepted)
    (tmp_path / "a.jpg").write_bytes(content)
    assert expected in one_line(decode_image, FileRef(str(tmp_path / "a.jpg")), 16, 3)


def several(kind: str, *sides: int) -> bytes:
    """Pictures in one file."""
    first, *others = (noise(number, side, side) for number, side in enumerate(sides))
    first.save(file := io.BytesIO(), kind, save_all=True, append_images=others)
    return file.getvalue()


@pytest.mark.parametrize("inside", [False, True], ids=["file", "part of a file"])
def test_that_of_several_pictures_in_a_file_the_first_is_read_is_told(inside, tmp_path):
    alone = {kind: encoded(noise(0, 300, 300), kind) for kind in ("jpeg", "png", "webp", "gif", "tiff", "bmp", "ppm")}
    more = {f"{kind} of two": several(kind, 64, 64) for kind in ("png", "webp", "gif", "tiff")}
    alone |= {f"{kind} and junk": content + b"junk" * 20_000 for kind, content in alone.items()}
    alone["mpo"] = several("mpo", 300, 300)  # as phones write it, with what belongs to the picture
    for name, content in {**alone, **more}.items():
        path = tmp_path / "a"
        path.write_bytes(b"12" + content + b"3" if inside else content)
        entry = FileRef(str(path), 2, len(content)) if inside else FileRef(str(path))
        with collect_partial_reads() as reasons:
            decode_image(entry, 16, 3)
        assert reasons == ["it holds several pictures, of which the first is read"] * (name in more), name


def test_a_second_frame_that_is_cut_off_spoils_no_first_one(tmp_path):
    content = several("gif", 64, 64)
    first = decode_image(FileRef.in_memory(content, "a"), 16, 3)
    read = 0
    for size in range(len(content) // 2, len(content)):  # the first frame ends near the middle
        with contextlib.suppress(ValueError):
            assert torch.equal(decode_image(FileRef.in_memory(content[:size], "a"), 16, 3), first)
            read += 1
    assert read > 100


# Those of which Pillow reads a part. The table of contents of a compressed TIFF is at its end.
@pytest.mark.parametrize("kind", ["jpeg", "png", "bmp", "gif", "tiff", "ppm"])
def test_an_image_that_is_cut_off_is_what_pillow_reads_of_it_where_that_is_accepted(kind, monkeypatch):
    """--on_bad_sample accept."""

    def as_pillow_reads_it(content: bytes) -> Tensor:
        return torch.from_numpy(np.array(Image.open(io.BytesIO(content)).convert("RGB"))).permute(2, 0, 1)

    whole = encoded(noise(0, 48, 48), kind)
    short = whole[: len(whole) * 3 // 5]
    assert "truncated" in one_line(decode_image, FileRef.in_memory(short, "a"), 48, 3), "nobody asked for it here"
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    found = decode_image(FileRef.in_memory(short, "a"), 48, 3)
    assert torch.equal(found, as_pillow_reads_it(short))
    is_there = (found == as_pillow_reads_it(whole)).all(0)
    assert 0.2 < is_there.float().mean() < 0.7, "the rows that lie in front of the cut, wherever the format puts them"


def between_pixels(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """(h, w, c) -> (height, width, c): at the middle of each new pixel, the four nearest old ones by their distance."""
    for axis, new in ((0, height), (1, width)):
        old = pixels.shape[axis]
        places = ((np.arange(new) + 0.5) * old / new - 0.5).clip(0, old - 1)
        before = np.floor(places).astype(int).clip(0, max(old - 2, 0))
        share = (places - before).reshape([-1 if axis == each else 1 for each in range(3)])
        first, second = (np.take(pixels, before + step, axis).astype(float) for step in (0, 1))
        pixels = (1 - share) * first + share * second
    return pixels


@pytest.mark.parametrize("ending", ["png", "jpg"])
@pytest.mark.parametrize("size", [(301, 200), (97, 230), (30, 19)])
def test_pictures_are_resized_without_averaging_as_in_taming(tmp_path, size, ending):
    """SmallestMaxSize and CenterCrop of albumentations, on a JPEG that is decoded whole."""
    path = tmp_path / f"a.{ending}"
    photo(*size).save(path)
    scale = 24 / min(size)
    width, height = (round(side * scale) for side in size)
    left, top = (width - 24) // 2, (height - 24) // 2
    expected = between_pixels(np.asarray(Image.open(path)), height, width)[top : top + 24, left : left + 24]
    picture = decode_image(FileRef(str(path)), 24, 3, resize="taming").permute(1, 2, 0).numpy()
    np.testing.assert_allclose(picture, expected, rtol=0, atol=0.5 + 1e-3)


def halved(pixels: np.ndarray) -> np.ndarray:
    """The mean of each 2 x 2, without an odd last row or column."""
    height, width = (side // 2 for side in pixels.shape[:2])
    return pixels[: 2 * height, : 2 * width].reshape(height, 2, width, 2, 3).mean((1, 3))


@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_pictures_are_halved_and_then_resized_bicubically_as_in_adm(tmp_path, ending):
    """center_crop_arr of guided-diffusion, on a JPEG that is decoded whole."""
    path = tmp_path / f"a.{ending}"
    photo(136, 96).save(path)
    picture = decode_image(FileRef(str(path)), 24, 3, resize="adm").permute(1, 2, 0).numpy()
    expected = halved(halved(np.asarray(Image.open(path))))  # 34 x 24, which stay as they are
    np.testing.assert_allclose(picture, expected[:, 5:29], rtol=0, atol=2)  # each filter rounds, across and down
    photo(70, 47).save(path)
    picture = decode_image(FileRef(str(path)), 24, 3, resize="adm").permute(1, 2, 0).numpy()
    resized = Image.open(path).resize((36, 24), Image.Resampling.BICUBIC)  # 47 is less than twice 24
    assert np.array_equal(picture, np.asarray(resized.crop((6, 0, 30, 24))))


@pytest.mark.parametrize("resize", ["taming", "adm"])
def test_colours_transparency_and_orientation_do_not_depend_on_how_pictures_are_resized(tmp_path, resize):
    for name, (image, (left, right), tolerance) in COLOUR_CASES.items():
        image.save(tmp_path / name, quality=95)
        assert_halves(decode_image(FileRef(str(tmp_path / name)), 32, 3, resize=resize), left, right, tolerance)
    for name, (image, left, options) in TRANSPARENT.items():
        image.save(tmp_path / name, **options)
        assert_halves(decode_image(FileRef(str(tmp_path / name)), 32, 3, resize=resize), left, (255, 255, 255), 0)
        assert_halves(decode_image(FileRef(str(tmp_path / name)), 32, 4, resize=resize)[3:], (255,), (0,), 0)
    exif = Image.Exif()
    exif[0x0112] = 6
    halves(LEFT, RIGHT, "RGB").save(tmp_path / "turned.png", exif=exif)
    turned = decode_image(FileRef(str(tmp_path / "turned.png")), 32, 3, resize=resize)
    assert_halves(turned.rot90(1, (1, 2)), LEFT, RIGHT, 0)


def test_a_disk_that_fails_is_not_taken_for_a_file_that_is_cut_off(tmp_path, monkeypatch):
    write_tar(tmp_path / "0.tar", {"a": {"jpg": JPEG}})
    images = open_images(str(tmp_path / "0.tar"), image_size=48)
    read, calls = os.pread, itertools.count()

    def fail_late(*request: int) -> bytes:
        if next(calls) > 0:
            raise OSError(5, "Input/output error")
        return read(request[0], 512, request[2])

    monkeypatch.setattr(os, "pread", fail_late)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(OSError, match="Input/output error"):
        images.load(0)


def test_content_counts_and_not_the_name(tmp_path):
    with pytest.raises(FileNotFoundError):
        decode_image(FileRef(str(tmp_path / "a.jpg")), 16, 3)
    (tmp_path / "a.jpg").write_bytes(encoded(halves(LEFT, RIGHT, "RGB"), "png"))
    assert_halves(decode_image(FileRef(str(tmp_path / "a.jpg")), 32, 3), LEFT, RIGHT, 0)


@pytest.mark.parametrize("ending", ["jpg", "png", "webp"])
def test_broken_metadata_does_not_make_a_bad_picture(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    Image.new("RGB", (32, 32), LEFT).save(path, exif=b"Exif\0\0garbage", quality=95)
    assert_halves(decode_image(FileRef(str(path)), 16, 3), LEFT, LEFT, 6)
