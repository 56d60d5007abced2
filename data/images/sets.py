"""The image sets a script can train on: a folder of files, tars, or the built-in demonstration."""

from __future__ import annotations

import os
from typing import Any, Protocol

from torch import Tensor

from ..contracts import Samples, skipped_of
from ..crops import CENTER, Crop
from ..files.find import Folder, TarFiles, find_files
from ..files.opening import Listing, demonstration_size, list_files
from ..files.source import Places
from ..files.table_columns import IMAGES
from ..files.table_files import TableFiles
from ..files.tables import Tables
from ..files.tars import Members, Tars
from ..own import OwnData
from .decoding import ENDINGS, decode_source, randomly_flipped
from .own import OwnImages
from .shapes import Shapes


class Images(Samples, Protocol):
    """A numbered set of images, uint8 (channels, image_size, image_size)."""

    def name(self, index: int) -> str:
        """The name of the image in an index: its path relative to the folder or in its tar, with '/' between the
        parts."""
        ...


class ImageFiles:
    """Images in files or in tars. See `Images` for the methods.

    Args:
        enlarge: Whether images whose shorter side has fewer than `image_size` pixels are enlarged; else `load` raises
            `Incomplete` for them.
        crop: What is cut out of augmented images; out of others it is the middle.
    """

    def __init__(
        self, places: Places, *, image_size: int, channels: int = 3, flip: bool = False, seed: int = 0,
        enlarge: bool = True, crop: Crop = CENTER,
    ) -> None:  # fmt: skip
        self.places, self.describe, self.name = places, places.describe, places.name
        self.fingerprint, self.skipped = places.fingerprint, skipped_of(places)
        self.image_size, self.channels, self.flip, self.seed = image_size, channels, flip, seed
        self.enlarge, self.crop = enlarge, crop

    def __len__(self) -> int:
        return len(self.places)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        cut = self.crop.cut(epoch, index) if augment else None
        image = decode_source(self.places.source(index), self.image_size, self.channels, self.enlarge, cut)
        return randomly_flipped(image, self.seed, epoch, index) if self.flip and augment else image


def open_images(
    spec: str | OwnData | None, *, image_size: int, channels: int = 3, flip: bool = False, seed: int = 0,
    crop: Crop = CENTER,
) -> ImageFiles | Shapes | OwnImages:  # fmt: skip
    """Open a set of images by its name:

    - `demo:shapes` (also None), `demo:shapes:<number of images>`;
    - a folder of images, flat or nested, in the order of the relative path;
    - webdataset tars: one .tar, a folder of them, a pattern (`tars/*.tar`) or a range (`{000..010}.tar`);
    - Arrow or parquet files, or a folder of them (see `data.files.tables`);
    - a user's own dataset (`OwnData`).

    channels: 3 (RGB) or 4 (RGBA). flip: half of the augmented images are mirrored left to right. crop: what is
    cut out of them, but for the demonstration. No image is opened.
    Raises ValueError, in one line, if there is no such set or nothing in it.
    """
    if channels not in (3, 4):
        raise ValueError(f"images have 3 channels (RGB) or 4 (RGBA), not {channels}")
    spec = "demo:shapes" if spec is None else spec
    alike: dict[str, Any] = {"image_size": image_size, "channels": channels, "flip": flip, "seed": seed}
    if isinstance(spec, OwnData):
        return OwnImages(spec, **alike, crop=crop)
    if (n := demonstration_size(spec, "shapes", "images")) is not None:
        return Shapes(n, **alike)
    return ImageFiles(_find(os.path.expanduser(spec)), **alike, crop=crop)


def _find(path: str) -> Places:
    def listed(folder: str) -> Listing:
        return list_files(folder, ENDINGS, "images", "demo:shapes")

    files = find_files(path, "images", listed, manifests=False, tables=True)
    if isinstance(files, TableFiles):
        return Tables(files, IMAGES)
    if isinstance(files, TarFiles):
        return Tars(files.paths, Members("image", (ENDINGS,), suffix=".images"))
    assert isinstance(files, Folder)
    return files
