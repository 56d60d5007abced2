"""What is cut out of pictures in training: the distribution, its keys, and the same square by every decoder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import ks_2samp
from torchvision.transforms import RandomResizedCrop

from tandem.data.decoding.images import Box, Crop, center_box, decode_image, decode_picture
from tandem.data.sets import open_conditioned, open_images, open_videos
from tandem.data.sources.record import FileRef
from tandem.hashing import Draws
from tests.data.decoding.films import write_video

N = 4000
ONCE = 1e-4  # how often two samples of N draws from one distribution may be farther apart (Kolmogorov-Smirnov)
CASES = [(300, 200, (0.5, 0.6)), (300, 200, (0.08, 1.0)), (150, 600, (0.08, 1.0)), (1000, 100, (0.08, 1.0))]


def regions(crop: Crop, width: int, height: int) -> np.ndarray:
    """Left, top, width and height of N regions: the square that is cut hides their shape, which torchvision states."""
    return np.array([crop.region(width, height, Draws("test", i)) for i in range(N)])


@pytest.mark.parametrize(("width", "height", "area"), CASES)
def test_regions_are_distributed_as_those_of_torchvision(width, height, area):
    ours = regions(Crop(area=area), width, height)
    picture = torch.zeros(1, height, width)
    torch.manual_seed(0)
    drawn = [RandomResizedCrop.get_params(picture, list(area), [3 / 4, 4 / 3]) for _ in range(N)]
    theirs = np.array([(left, top, across, down) for top, left, down, across in drawn])
    for column in range(4):
        assert ks_2samp(ours[:, column], theirs[:, column]).pvalue > ONCE, column
    for measured in (lambda r: r[:, 2] * r[:, 3], lambda r: r[:, 2] / r[:, 3]):
        assert ks_2samp(measured(ours), measured(theirs)).pvalue > ONCE


def test_regions_reach_every_edge_of_the_picture():
    """Of a small one: in one of hundreds of pixels, the distribution hardly changes without its last column."""
    left, top, across, down = regions(Crop(area=(0.2, 0.6)), 12, 12).T
    assert (left.min(), top.min(), (left + across).max(), (top + down).max()) == (0, 0, 12, 12)


def test_a_random_square_is_everywhere_where_it_fits_equally_often():
    found = [Crop("random", seed=3).box_chooser(0, index)(45, 40, 32, 32) for index in range(N)]
    assert {square.width for square in found} == {40} and {square.top for square in found} == {0}
    counts = np.bincount([int(square.left) for square in found], minlength=6)
    assert len(counts) == 6
    assert ((counts - N / 6) ** 2 / (N / 6)).sum() < 25.7  # chi-squared with 5 degrees of freedom: once in 10,000


@pytest.mark.parametrize("place", ["center", "random"])
def test_the_square_is_a_largest_one_of_its_region_and_in_its_middle_unless_it_is_random(place):
    crop = Crop(place, (0.2, 0.8), seed=1)
    is_in_the_middle = []
    for index in range(200):
        left, top, across, down = crop.region(300, 200, Draws("square", 1, 2, index))
        square = crop.box_chooser(2, index)(300, 200, 32, 32)
        assert square.width == square.height == min(across, down)
        assert left <= square.left <= left + across - square.width and top <= square.top <= top + down - square.height
        is_in_the_middle.append(
            (square.left, square.top) == (left + (across - square.width) / 2, top + (down - square.width) / 2)
        )
    assert all(is_in_the_middle) is (place == "center")


def places(path: Path, width: int, height: int) -> Path:
    """An image whose red says the column of a pixel, and its green the row."""
    columns, rows = np.meshgrid(np.arange(width), np.arange(height))
    Image.fromarray(np.stack([columns, rows, 0 * rows], 2).astype(np.uint8)).save(path)
    return path


@pytest.mark.parametrize(("width", "height"), [(90, 40), (40, 90)])
def test_a_random_square_of_an_image_is_cut_in_training_alone(tmp_path, width, height):
    places(tmp_path / "a.png", width, height)
    crop = Crop("random", seed=5)
    images = open_images(str(tmp_path), image_size=40, seed=5, crop=crop)
    begins = set()
    for epoch in range(20):
        left, top, *_ = map(int, crop.box_chooser(epoch, 0)(width, height, 40, 40))
        image = images.load(0, epoch, augment=True)["images"]
        assert torch.equal(image[0, 0], torch.arange(left, left + 40).to(torch.uint8))
        assert torch.equal(image[1, :, 0], torch.arange(top, top + 40).to(torch.uint8))
        begins.add((left, top))
        assert torch.equal(images.load(0, epoch)["images"], decode_image(FileRef(str(tmp_path / "a.png")), 40, 3)), (
            "the middle"
        )
    assert len(begins) > 10


@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_a_region_is_resized_as_pillow_resizes_it(tmp_path, ending):
    smooth = np.linspace(0, 255, 320)
    pixels = np.stack([np.tile(smooth, (320, 1)), np.tile(smooth[:, None], (1, 320)), np.full((320, 320), 90)], 2)
    path = tmp_path / f"a.{ending}"
    Image.fromarray(pixels.astype(np.uint8)).save(path, **({"quality": 100} if ending == "jpg" else {}))
    square = Box(100, 40, 160, 160)
    found = decode_image(FileRef(str(path)), 32, 3, choose_box=lambda *sides: square)
    expected = Image.open(path).resize((32, 32), Image.Resampling.BILINEAR, box=(100, 40, 260, 200))
    difference = np.abs(found.permute(1, 2, 0).numpy().astype(int) - np.asarray(expected).astype(int))
    assert difference.max() <= (0 if ending == "png" else 3)  # the JPEG is decoded at a quarter of its size


def test_a_region_of_a_turned_image_is_turned(tmp_path):
    places(tmp_path / "a.png", 90, 40)
    with Image.open(tmp_path / "a.png") as image:
        exif = Image.Exif()
        exif[0x0112] = 6  # to be turned by a quarter, clockwise
        image.save(tmp_path / "b.png", exif=exif)

    def choose_box(width: int, height: int, *sample_sides: int) -> Box:
        return Box(width - 40, 0, 40, 40)

    files = [FileRef(str(tmp_path / f"{name}.png")) for name in "ab"]
    plain, turned = (decode_image(file, 40, 3, choose_box=choose_box) for file in files)
    assert torch.equal(turned, torch.rot90(plain, -1, (1, 2)))


@pytest.mark.parametrize(("width", "height", "box"), [(90, 40, (5, 0, 80, 40)), (50, 60, (0, 17.5, 50, 25))])
def test_a_part_that_is_not_square_is_the_largest_in_the_middle(width, height, box, tmp_path):
    assert center_box(width, height, 32, 16) == box
    found = decode_image(FileRef(str(places(tmp_path / "a.png", width, height))), (16, 32), 3)
    left, top, across, down = box
    edges = (left, top, left + across, top + down)
    expected = Image.open(tmp_path / "a.png").resize((32, 16), Image.Resampling.BILINEAR, box=edges)
    assert torch.equal(found, torch.from_numpy(np.asarray(expected).copy()).permute(2, 0, 1))
    for index in range(50):
        w, h, (x, y, a, b) = width, height, Crop("random").box_chooser(0, index)(width, height, 32, 16)
        assert (a, b) == box[2:] and 0 <= x <= w - a and 0 <= y <= h - b


@pytest.mark.parametrize("ending", ["png", "jpg", "webp", "tiff"])
def test_an_image_on_its_side_is_cut_as_the_upright_one(ending, tmp_path):
    path, exif = places(tmp_path / f"a.{ending}", 90, 40), Image.Exif()
    exif[0x0112] = 6
    with Image.open(path) as image:
        upright = image.transpose(Image.Transpose.ROTATE_270)
        image.save(tmp_path / f"b.{ending}", exif=exif, **({"quality": 95} if ending in ("jpg", "webp") else {}))
    found = decode_image(FileRef(str(tmp_path / f"b.{ending}")), (64, 40), 3).int()
    difference = (found - decode_picture(upright, (64, 40), 3).int()).abs()
    tolerance = 40 if ending in ("jpg", "webp") else 0  # these lose something when they are saved once more
    assert difference.max() <= tolerance and difference.float().mean() < 4


def test_nothing_smaller_than_the_pictures_to_draw_is_cut_out(tmp_path):
    places(tmp_path / "a.png", 60, 40)
    images = open_conditioned(str(tmp_path), image_size=32, crop=Crop("random", (0.05, 0.2)))
    for epoch in range(20):
        image = images.load(0, epoch, augment=True)["images"].int()
        assert image[0, 0, -1] - image[0, 0, 0] == 31, "not enlarged"


def test_all_frames_of_a_clip_are_cut_at_one_place(tmp_path):
    ramp = np.tile(np.arange(96, dtype=np.uint8) * 2, (48, 1))
    write_video(tmp_path / "a.mkv", 8, codec="ffv1", pictures=[ramp] * 8)
    films = open_videos(str(tmp_path), image_size=48, num_frames=4, crop=Crop("random", seed=2))
    begins = set()
    for epoch in range(12):
        clip = films.load(0, epoch, augment=True)["videos"]
        assert clip.shape == (3, 4, 48, 48) and torch.equal(clip, clip[:, :1].expand_as(clip))
        begins.add(int(clip[0, 0, 0, 0]))
    assert len(begins) > 6 and films.load(0)["videos"][0, 0, 0, 0] == pytest.approx(48, abs=2), (
        "validation sees the middle"
    )


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_is_none_also_where_the_part_is_not_square(orientation, tmp_path):
    path, exif = places(tmp_path / "a.png", 90, 40), Image.Exif()
    exif[0x0112] = orientation
    with Image.open(path) as image:
        image.save(tmp_path / "plain.jpg")
        image.save(tmp_path / "stated.jpg", exif=exif)
    plain, stated = (decode_image(FileRef(str(tmp_path / name)), (40, 64), 3) for name in ("plain.jpg", "stated.jpg"))
    assert torch.equal(stated, plain)
