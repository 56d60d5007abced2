"""The image sets a script can train on: a folder of files, or the built-in demonstration."""

from __future__ import annotations

import os
from typing import Protocol

from torch import Tensor

from ..contracts import Samples
from ..files.opening import demonstration_size, list_files, nothing_found
from ..files.packed import PackedStrings
from .decoding import decode_image, randomly_flipped
from .shapes import Shapes

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


class Images(Samples, Protocol):
    """A numbered set of images, uint8 (channels, image_size, image_size)."""

    def name(self, index: int) -> str:
        """The name of the image in an index: its path relative to the folder, with '/' between the parts."""
        ...


class ImageFolder:
    """Every image below a folder, flat or nested, in the order of the relative path. See `Images` for the methods.

    Raises ValueError, in one line, if the folder is missing, no folder, not readable or holds no image.
    """

    def __init__(self, folder: str, *, image_size: int, channels: int = 3, flip: bool = False, seed: int = 0) -> None:
        self.folder = folder
        self.image_size, self.channels, self.flip, self.seed = image_size, channels, flip, seed
        images, n_others = list_files(folder, ENDINGS, "images", "demo:shapes")
        if not images:
            raise nothing_found("image", folder, n_others, ENDINGS)
        self._names = PackedStrings(images)

    def __len__(self) -> int:
        return len(self._names)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        image = decode_image(self.describe(index), self.image_size, self.channels)
        return randomly_flipped(image, self.seed, epoch, index) if self.flip and augment else image

    def describe(self, index: int) -> str:
        return os.path.join(self.folder, self._names[index])

    def name(self, index: int) -> str:
        return self._names[index]


def open_images(
    spec: str | None, *, image_size: int, channels: int = 3, flip: bool = False, seed: int = 0
) -> ImageFolder | Shapes:
    """Open `demo:shapes` (also None), `demo:shapes:<number of images>` or a folder of images.

    channels: 3 (RGB) or 4 (RGBA). flip: half of the augmented images are mirrored left to right.
    Raises ValueError, in one line, if there is no such set.
    """
    if channels not in (3, 4):
        raise ValueError(f"images have 3 channels (RGB) or 4 (RGBA), not {channels}")
    spec = "demo:shapes" if spec is None else spec
    if (n := demonstration_size(spec, "shapes", "images")) is not None:
        return Shapes(n, image_size=image_size, channels=channels, flip=flip, seed=seed)
    return ImageFolder(os.path.expanduser(spec), image_size=image_size, channels=channels, flip=flip, seed=seed)
