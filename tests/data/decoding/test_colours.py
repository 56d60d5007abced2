"""Black, white, transparent pixels and colours are what the tags and the profile of a file say."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tandem.data.decoding.images import decode_image, decode_picture
from tandem.data.sources.record import FileRef
from tests.data.helpers import one_line
from tests.data.source_table import encoded

SIDE = 64
# Samples of a picture are 0.8 of white on the left and 0.2 of it on the right.
SHARES = np.full((SIDE, SIDE), 0.8)
SHARES[:, SIDE // 2 :] = 0.2
LEFT, RIGHT = 204, 51
TRANSPARENT = 255  # on white


def scaled(white: float, kind: str) -> np.ndarray:
    return (SHARES * white if kind[1] == "f" else (SHARES * white).round()).astype(kind)


def shown(content: bytes, channels: int = 3) -> Tensor:
    return decode_image(FileRef.in_memory(content, "a"), 32, channels)


def sides(content: bytes) -> tuple[list[int], list[int]]:
    """The colours of both halves, away from the edge between them."""
    picture = shown(content)
    for half in (picture[..., :14], picture[..., 18:]):
        assert (half == half[:, :1, :1]).all()
    return picture[:, 0, 0].tolist(), picture[:, 0, -1].tolist()


def png(depth: int, colour: int, rows: Iterable[bytes], *chunks: tuple[bytes, bytes], behind: bytes = b"") -> bytes:
    """`chunks`: between header and pixels; `behind`: chunks behind the pixels."""
    header = struct.pack(">IIBBBBB", SIDE, SIDE, depth, colour, 0, 0, 0)
    pixels = (b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    before = b"".join(chunk(*each) for each in ((b"IHDR", header), *chunks, pixels))
    return b"\x89PNG\r\n\x1a\n" + before + behind + chunk(b"IEND", b"")


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def packed(samples: np.ndarray, depth: int) -> list[bytes]:
    """Rows of samples of up to 16 bits, without a gap between them."""
    bits = np.unpackbits(samples.astype(">u2").view(np.uint8).reshape(*samples.shape, 2), axis=-1)[..., 16 - depth :]
    return [np.packbits(row.reshape(-1)).tobytes() for row in bits]


SHORT, LONG, FLOAT, DOUBLE = 3, 4, 11, 12  # types of tags


def tiff(pixels: bytes, bits: int, white_is_zero: bool = False, kind: int = 1, order: str = "<", **tags: Any) -> bytes:
    """Grey in one strip. `kind`: 1 without a sign, 2 with one, 3 floats. `tags`: t341=(DOUBLE, 255.0)."""
    wanted = {
        256: (LONG, SIDE), 257: (LONG, SIDE), 258: (SHORT, bits), 259: (SHORT, 1), 262: (SHORT, int(not white_is_zero)),
        273: (LONG, 8), 277: (SHORT, 1), 278: (LONG, SIDE), 279: (LONG, len(pixels)), 339: (SHORT, kind),
        **{int(name[1:]): tag for name, tag in tags.items()},
    }  # fmt: skip
    end = 8 + len(pixels) + 2 + 12 * len(wanted) + 4
    entries, values = b"", b""
    for number, (type_, value) in sorted(wanted.items()):
        content = struct.pack(order + {SHORT: "H", LONG: "I", FLOAT: "f", DOUBLE: "d"}[type_], value)
        if len(content) > 4:
            values, content = values + content, struct.pack(order + "I", end + len(values))
        entries += struct.pack(order + "HHI", number, type_, 1) + content.ljust(4, b"\0")
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8 + len(pixels))
    return start + pixels + struct.pack(order + "H", len(wanted)) + entries + bytes(4) + values


U16 = scaled(65535, "<u2").tobytes()
S16 = scaled(32767, "<i2").tobytes()
U12 = scaled(4095, "<u2")
F32 = scaled(1, "<f4").tobytes()
GREY = {
    "floats from 0 to 1": tiff(F32, 32, kind=3),
    "floats, big endian": tiff(scaled(1, ">f4").tobytes(), 32, kind=3, order=">"),
    "floats, white is 0": tiff((1 - scaled(1, "<f4")).tobytes(), 32, True, 3),
    "floats whose tags say 255": tiff(scaled(255, "<f4").tobytes(), 32, kind=3, t340=(FLOAT, 0.0), t341=(FLOAT, 255.0)),
    "floats with tags of their extremes": tiff(F32, 32, kind=3, t340=(DOUBLE, 0.2), t341=(DOUBLE, 0.8)),
    "floats of a PFM": b"Pf 64 64 -1.0\n" + F32,
    "16 bits": tiff(U16, 16),
    "16 bits, big endian": tiff(scaled(65535, ">u2").tobytes(), 16, order=">"),
    "16 bits, white is 0": tiff((65535 - scaled(65535, "<u2")).tobytes(), 16, True),
    "16 bits with a tag of their maximum": tiff(U16, 16, t281=(SHORT, 52428)),
    "12 bits": tiff(b"".join(packed(U12, 12)), 12),
    "12 bits of 16": tiff(U12.tobytes(), 16, t281=(SHORT, 4095)),
    "12 bits of 16, white is 0": tiff((4095 - U12).tobytes(), 16, True, t281=(SHORT, 4095)),
    "12 bits of 16 of a PGM": b"P5 64 64 4095\n" + scaled(4095, ">u2").tobytes(),
    "signed 16 bits whose tags say 32767": tiff(S16, 16, kind=2, t340=(DOUBLE, 0.0), t341=(DOUBLE, 32767.0)),
    "32 bits whose tags say 255": tiff(
        scaled(255, "<i4").tobytes(), 32, kind=2, t340=(DOUBLE, 0.0), t341=(DOUBLE, 255.0)
    ),
    "8 bits, white is 0": tiff((255 - scaled(255, "u1")).tobytes(), 8, True),
}


@pytest.mark.parametrize("name", GREY)
def test_grey_is_as_bright_as_the_tags_of_its_file_say(name):
    assert sides(GREY[name]) == ([LEFT] * 3, [RIGHT] * 3)


UNREAD = "a variant that Pillow does not read"
NO_RANGE = {
    "signed 16 bits": (tiff(S16, 16, kind=2), "signed integers of 16 bits"),
    "signed 8 bits": (tiff(scaled(127, "i1").tobytes(), 8, kind=2), "signed integers of 8 bits"),
    "signed 32 bits": (tiff(scaled(255, "<i4").tobytes(), 32, kind=2), "integers of 32 bits"),
    "32 bits": (tiff(scaled(2**32 - 1, "<u4").tobytes(), 32), "integers of 32 bits"),
    "floats from 0 to 255": (tiff(scaled(255, "<f4").tobytes(), 32, kind=3), "reach from 51 to 204"),
    "floats below 0": (tiff((scaled(1, "<f4") - 0.5).tobytes(), 32, kind=3), "reach from -0.3 to 0.3"),
    "no numbers": (tiff((scaled(1, "<f4") * np.float32("nan")).tobytes(), 32, kind=3), "reach from nan to nan"),
    "more than 12 bits": (tiff(U16, 16, t281=(SHORT, 4095)), "white is 4095"),
    "floats of colours": (tiff(F32 * 3, 32, kind=3, t262=(SHORT, 2), t277=(SHORT, 3)), UNREAD),
    "half precision": (tiff(scaled(1, "<f2").tobytes(), 16, kind=3), UNREAD),
    "double precision": (tiff(scaled(1, "<f8").tobytes(), 64, kind=3), UNREAD),
    "14 bits": (tiff(b"".join(packed(scaled(2**14 - 1, "<u2"), 14)), 14), UNREAD),
    "12 bits, white is 0": (tiff(b"".join(packed(4095 - U12, 12)), 12, True), UNREAD),
}


@pytest.mark.parametrize("name", NO_RANGE)
def test_grey_whose_range_no_tag_tells_is_refused_in_one_line(name):
    content, expected = NO_RANGE[name]
    assert expected in one_line(shown, content)


def test_a_picture_of_32_bits_of_a_users_dataset_has_no_range():
    assert "integers of 32 bits" in one_line(decode_picture, Image.fromarray(scaled(255, "<i4")), 32, 3)
    picture = decode_picture(Image.fromarray(scaled(1, "<f4")), 32, 3)
    assert (picture[0, 0, 0], picture[0, 0, -1]) == (LEFT, RIGHT)


def transparent(*values: int) -> tuple[bytes, bytes]:
    return b"tRNS", struct.pack(f">{len(values)}H", *values)


def in_three(samples: np.ndarray) -> list[bytes]:
    return [np.repeat(row[:, None], 3, 1).tobytes() for row in samples]


def with_alpha(alpha: np.ndarray) -> list[bytes]:
    return [row.tobytes() for row in np.stack([scaled(255, "u1"), alpha.astype(np.uint8)], -1)]


SIXTEEN = scaled(65535, ">u2")
ODD_SIXTEEN = np.where(SHARES < 0.5, 0x3312, SIXTEEN).astype(">u2")  # of which both bytes differ
HIDDEN = np.where(SHARES < 0.5, 0, 255)
TRANSPARENT_RIGHT = {
    **{f"{n} bits of grey": png(n, 0, packed(scaled(2**n - 1, "u2"), n), transparent(round(0.2 * (2**n - 1))))
       for n in (2, 4, 8)},
    "16 bits of grey": png(16, 0, packed(ODD_SIXTEEN, 16), transparent(0x3312)),
    "8 bits of colours": png(8, 2, in_three(scaled(255, "u1")), transparent(RIGHT, RIGHT, RIGHT)),
    "16 bits of colours": png(16, 2, in_three(ODD_SIXTEEN), transparent(0x3312, 0x3312, 0x3312)),
    **{f"a palette of {n} bits": png(n, 3, packed(SHARES < 0.5, n), (b"PLTE", bytes([LEFT] * 3 + [RIGHT] * 3)),
                                     (b"tRNS", b"\xff\0")) for n in (1, 2, 4, 8)},
    "grey with alpha": png(8, 4, with_alpha(HIDDEN)),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSPARENT_RIGHT)
def test_the_transparent_value_of_a_png_of_any_depth_is_transparent(name):
    left, right = sides(TRANSPARENT_RIGHT[name])
    assert left == [170 if name.startswith("2") else LEFT] * 3 and right == [TRANSPARENT] * 3
    alpha = shown(TRANSPARENT_RIGHT[name], 4)[3]
    assert (alpha[:, :14] == 255).all() and (alpha[:, 18:] == 0).all()


def test_grey_that_is_multiplied_by_its_alpha_is_read():
    two = {"t258": (SHORT, 8), "t277": (SHORT, 2), "t338": (SHORT, 1)}
    pixels = np.stack([np.where(SHARES < 0.5, 0, LEFT), HIDDEN], -1).astype(np.uint8).tobytes()
    content = tiff(pixels, 8, **two)
    try:
        assert Image.open(io.BytesIO(content)).mode == "La"
    except (OSError, AssertionError):
        pytest.skip("this Pillow does not read it")
    assert sides(content) == ([LEFT] * 3, [TRANSPARENT] * 3)


def bmp(masks: Sequence[int], alpha: np.ndarray) -> bytes:
    """32 bits, of which the masks say what they are: red, green, blue and alpha."""
    shifts = [mask.bit_length() - 8 for mask in masks]
    channels = [*[scaled(255, "u4")] * 3, alpha.astype("u4")]
    pixels = sum(channel << np.uint32(shift) for channel, shift in zip(channels, shifts, strict=True))
    content = np.asarray(pixels, "<u4")[::-1].tobytes()
    header = struct.pack("<IiiHHIIiiII", 108, SIDE, SIDE, 1, 32, 3, len(content), 2835, 2835, 0, 0)
    header = (header + struct.pack("<4I", *masks)).ljust(108, b"\0")
    return b"BM" + struct.pack("<IHHI", 122 + len(content), 0, 0, 122) + header + content


MASKS = (0xFF0000, 0xFF00, 0xFF, 0xFF000000)


@pytest.mark.parametrize("masks", [MASKS, (0xFF000000, 0xFF0000, 0xFF00, 0xFF)])
def test_a_bitmap_whose_alpha_is_empty_is_opaque(masks):
    assert sides(bmp(masks, HIDDEN * 0)) == ([LEFT] * 3, [RIGHT] * 3)
    assert (shown(bmp(masks, HIDDEN * 0), 4)[3] == 255).all()
    assert sides(bmp(masks, HIDDEN)) == ([LEFT] * 3, [TRANSPARENT] * 3)


ROWS = in_three(scaled(255, "u1"))
TOO_LONG = zlib.compress(bytes(65 << 20))
COMMENTS = {
    "compressed": (b"zTXt", b"Raw profile\0\0" + zlib.compress(bytes(range(256)) * 6000)),
    "international": (b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(b"<x/>" * 400_000)),
    "beyond 64 MiB": (b"zTXt", b"Comment\0\0" + TOO_LONG),
    "profile": (b"iCCP", b"ICC\0\0" + TOO_LONG),
    "profile that is none": (b"iCCP", b"ICC\0\7"),
    "time": (b"tIME", b"short"),
}


@pytest.mark.parametrize("name", COMMENTS)
@pytest.mark.parametrize("place", ["before", "behind", "damaged"])
def test_a_comment_of_a_png_does_not_cost_the_picture(name, place):
    comment = chunk(*COMMENTS[name])
    if place == "damaged":
        comment = comment[:-1] + bytes([comment[-1] ^ 1])  # of its checksum
    plain = png(8, 2, ROWS)
    at = plain.index(b"IEND" if place == "behind" else b"IDAT") - 4
    assert sides(plain[:at] + comment + plain[at:]) == ([LEFT] * 3, [RIGHT] * 3)


def test_a_png_whose_pixels_are_damaged_is_refused_as_before():
    damaged = png(8, 2, ROWS, COMMENTS["compressed"])
    at = damaged.index(b"IDAT") + 20
    for content in (damaged[:at], damaged[:at] + b"\xff" * 20 + damaged[at + 20 :]):
        assert one_line(shown, content)


# Profiles


def s15(*values: float) -> bytes:
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def profile(space: bytes, pcs: bytes, **tags: bytes) -> bytes:
    """An ICC profile of version 2. `tags`: content by name."""
    text = b"made for a test\0"
    described = {
        "desc": b"desc\0\0\0\0" + struct.pack(">I", len(text)) + text + bytes(78), "cprt": b"text\0\0\0\0none\0",
        "wtpt": b"XYZ \0\0\0\0" + s15(0.9505, 1, 1.0891), **tags,
    }  # fmt: skip
    table, body, begin = b"", b"", 128 + 4 + 12 * len(described)
    for name, content in described.items():
        table += struct.pack(">4sII", name.encode(), begin + len(body), len(content))
        body += content.ljust(-(-len(content) // 4) * 4, b"\0")
    device = b"prtr" if space == b"CMYK" else b"mntr"
    header = struct.pack(">I4sI4s4s4s", begin + len(body), b"none", 0x02400000, device, space, pcs)
    header = (header + bytes(12) + b"acsp" + bytes(28) + s15(0.9642, 1, 0.8249)).ljust(128, b"\0")
    return header + struct.pack(">I", len(described)) + table + body


def gamma(exponent: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(exponent * 256)) + b"\0\0"


P3 = np.array([[0.51512, 0.29198, 0.15710], [0.24120, 0.69225, 0.06657], [-0.00105, 0.04189, 0.78407]])
SRGB = np.array([[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]])  # of D50


def matrix(primaries: np.ndarray, exponent: float) -> bytes:
    columns = {f"{name}XYZ": b"XYZ \0\0\0\0" + s15(*primaries[:, place]) for place, name in enumerate("rgb")}
    return profile(b"RGB ", b"XYZ ", **columns, **{f"{name}TRC": gamma(exponent) for name in "rgb"})


DISPLAY_P3, LINEAR_GREY = matrix(P3, 2.2), profile(b"GRAY", b"XYZ ", kTRC=gamma(1))


def inks() -> bytes:
    """A profile of CMYK in which any ink alone is of L* 50, and two of them are black."""
    levels = [min(100, 50 * max(0, 2 - bin(corner).count("1"))) for corner in range(16)]
    colours = b"".join(bytes([round(level * 2.55), 128, 128]) for level in levels)
    ramp = bytes(range(256))
    lut = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + s15(1, 0, 0, 0, 1, 0, 0, 0, 1) + ramp * 4 + colours + ramp * 3
    return profile(b"CMYK", b"Lab ", A2B0=lut)


def encoded_srgb(linear: np.ndarray) -> list[int]:
    """IEC 61966-2-1."""
    linear = linear.clip(0, 1)
    curved = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return (255 * curved).round().astype(int).tolist()


def of_p3(colour: Sequence[int]) -> list[int]:
    return encoded_srgb(np.linalg.inv(SRGB) @ P3 @ (np.array(colour) / 255) ** 2.2)


ORANGE, GREEN = (200, 60, 20), (30, 150, 40)


def coloured(mode: str = "RGB", left: Any = ORANGE, right: Any = GREEN) -> Image.Image:
    image = Image.new(mode, (SIDE, SIDE), left)
    image.paste(right, (SIDE // 2, 0, SIDE, SIDE))
    return image


def assert_near(content: bytes, left: Sequence[int], right: Sequence[int], tolerance: int = 2) -> None:
    picture = shown(content).int()
    for colour, half in ((left, picture[..., :14]), (right, picture[..., 18:])):
        assert (half - torch.tensor(colour).view(3, 1, 1)).abs().max() <= tolerance, (half[:, 0, 0], colour)


@pytest.mark.parametrize("ending, options", [
    ("png", {}), ("jpg", {"quality": 98}), ("tiff", {}), ("webp", {"lossless": True})
])  # fmt: skip
def test_colours_of_another_space_are_converted_to_srgb(ending, options):
    tolerance = 4 if ending == "jpg" else 2
    with_profile = encoded(coloured(), ending, icc_profile=DISPLAY_P3, **options)
    assert_near(with_profile, of_p3(ORANGE), of_p3(GREEN), tolerance)
    assert np.abs(np.subtract(of_p3(ORANGE), ORANGE)).max() > 15, "or it would not be seen"


def test_pictures_with_palette_or_alpha_have_their_profile_too():
    assert_near(encoded(coloured().quantize(2), "png", icc_profile=DISPLAY_P3), of_p3(ORANGE), of_p3(GREEN), 4)
    content = encoded(coloured("RGBA", (*ORANGE, 255), (*GREEN, 0)), "png", icc_profile=DISPLAY_P3)
    assert_near(content, of_p3(ORANGE), [255] * 3)
    picture = shown(content, 4)
    assert (picture[3, :, :14] == 255).all() and (picture[3, :, 18:] == 0).all()


def test_grey_and_inks_have_their_profile():
    of_grey = [encoded_srgb(np.full(3, level / 255)) for level in (LEFT, RIGHT)]
    assert_near(encoded(coloured("L", LEFT, RIGHT), "png", icc_profile=LINEAR_GREY), *of_grey)
    with_alpha = encoded(coloured("LA", (LEFT, 255), (RIGHT, 0)), "png", icc_profile=LINEAR_GREY)
    assert_near(with_alpha, of_grey[0], [255] * 3)
    fifty = encoded_srgb(np.full(3, ((50 + 16) / 116) ** 3))
    cyan, none = (255, 0, 0, 0), (0, 0, 0, 0)
    for ending in ("tiff", "jpg"):
        image = coloured("CMYK", cyan, none)
        assert_near(encoded(image, ending, icc_profile=inks(), **_best(ending)), fifty, [255] * 3, 4)
        assert_near(encoded(image, ending, **_best(ending)), (0, 255, 255), [255] * 3, 4)


def _best(ending: str) -> dict[str, Any]:
    return {"quality": 100, "subsampling": 0} if ending == "jpg" else {}


IGNORED_CLASSES: dict[str, tuple[Callable[[], Image.Image], bytes]] = {
    "no profile": (coloured, b"no profile but words" * 20), "cut off": (coloured, DISPLAY_P3[:300]),
    "header alone": (coloured, DISPLAY_P3[:128]), "of grey": (coloured, LINEAR_GREY), "of inks": (coloured, inks()),
    "of colours": (lambda: coloured("L", LEFT, RIGHT), DISPLAY_P3), "empty": (coloured, b""),
    "without curves": (coloured, profile(b"RGB ", b"XYZ ")),
}  # fmt: skip


@pytest.mark.parametrize("name", IGNORED_CLASSES)
@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_a_profile_that_is_damaged_or_does_not_fit_leaves_the_picture_as_it_is(name, ending):
    image, content = IGNORED_CLASSES[name]
    assert torch.equal(shown(encoded(image(), ending, icc_profile=content)), shown(encoded(image(), ending)))


def test_a_profile_that_says_srgb_in_other_words_changes_no_bit():
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8))
    curve = np.array([((x + 0.055) / 1.055) ** 2.4 if x > 0.04045 else x / 12.92 for x in np.linspace(0, 1, 1024)])
    table = b"curv\0\0\0\0" + struct.pack(">I", 1024) + (curve * 65535).round().astype(">u2").tobytes()
    columns = {f"{name}XYZ": b"XYZ \0\0\0\0" + s15(*SRGB[:, place]) for place, name in enumerate("rgb")}
    srgb = profile(b"RGB ", b"XYZ ", **columns, **{f"{name}TRC": table for name in "rgb"})
    assert torch.equal(shown(encoded(noise, "png", icc_profile=srgb)), shown(encoded(noise, "png")))
