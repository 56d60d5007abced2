"""The images of the record: a folder of the user's, or public ones that are in the wheels of installed packages."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from PIL import Image

from tandem.data.decoding.images import ENDINGS

TILE = 96  # pixels
#: The colour photographs in the wheels of scikit-image and scikit-learn, without the second one of the stereo pair.
PHOTOS = {
    "train": ("skimage/data/astronaut.png", "skimage/data/motorcycle_left.png", "skimage/data/rocket.jpg",
              "sklearn/datasets/images/china.jpg", "sklearn/datasets/images/flower.jpg"),
    "held_out": ("skimage/data/chelsea.png", "skimage/data/coffee.png"),
}  # fmt: skip


@dataclass(frozen=True)
class Images:
    """Images to train on and to measure."""

    name: str  # for the page and for IMAGES of the command; empty for the public ones
    flags: list[str]  # how train_vqgan.py gets them
    paths: list[Path]
    digest: str  # SHA-256 over names and contents


def images_of(folder: Path) -> Images:
    """The images of a folder with its sub-folders. Raises ValueError if there are none."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS and path.is_file())
    if not paths:
        raise ValueError(f"IMAGES={folder}: expected a folder of images; without IMAGES, public images are taken")
    contents = [f"{hashlib.sha256(p.read_bytes()).hexdigest()} {p.relative_to(folder).as_posix()}\n" for p in paths]
    flags = ["--image_folder", str(folder), "--valid_fraction", "0.1", "--split_seed", "0"]
    return Images(f"{folder.resolve().name}/", flags, paths, hashlib.sha256("".join(contents).encode()).hexdigest())


def public_images(folder: Path) -> Images:
    """Tiles of photographs that are in the wheels of installed packages, written to `folder` as BMP, whose bytes are
    the pixels, so that their digest does not depend on a version of zlib. Two photographs are held out as a whole:
    tiles beside those of the training would be too easy."""
    if not folder.exists():  # a training that went on alone may be reading them
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        for split, names in PHOTOS.items():
            (unfinished / split).mkdir(parents=True, exist_ok=True)
            for name in names:
                package, _, file = name.partition("/")
                photo = Image.open(str(files(package) / file)).convert("RGB")
                for top in range(0, photo.height - TILE + 1, TILE):
                    for left in range(0, photo.width - TILE + 1, TILE):
                        tile = photo.crop((left, top, left + TILE, top + TILE))
                        tile.save(unfinished / split / f"{Path(name).stem}_{top:03d}_{left:03d}.bmp")
        unfinished.rename(folder)
    flags = ["--image_folder", str(folder / "train"), "--valid_folder", str(folder / "held_out")]
    return replace(images_of(folder), name="", flags=flags)
