"""The image sets a script can train on: a folder of files, or the built-in demonstration."""

from __future__ import annotations

import os
from typing import Protocol

from torch import Tensor

from .folder import ImageFolder
from .shapes import Shapes

DEMO_PREFIX = "demo:"
DEMO_SIZE = 4096


class Images(Protocol):
    """A numbered set of images."""

    def __len__(self) -> int: ...

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        """uint8 (channels, image_size, image_size); augmentation draws from (seed, epoch, index) alone.

        Raises OSError, ValueError or whatever the decoder raises where the image cannot be read.
        """
        ...

    def describe(self, index: int) -> str:
        """The name by which a user finds the image: its path."""
        ...


def open_images(
    spec: str | None, *, image_size: int, channels: int = 3, flip: bool = False, seed: int = 0
) -> ImageFolder | Shapes:
    """Open `demo:shapes` (also None), `demo:shapes:<number of images>` or a folder of images.

    channels: 3 (RGB) or 4 (RGBA). flip: half of the augmented images are mirrored left to right.
    Raises ValueError, in one line, where there is no such set.
    """
    if channels not in (3, 4):
        raise ValueError(f"images have 3 channels (RGB) or 4 (RGBA), not {channels}")
    if spec is None or spec.startswith(DEMO_PREFIX):
        n = _demo_size(spec or "demo:shapes")
        return Shapes(n, image_size=image_size, channels=channels, flip=flip, seed=seed)
    return ImageFolder(os.path.expanduser(spec), image_size=image_size, channels=channels, flip=flip, seed=seed)


def _demo_size(spec: str) -> int:
    name, _, number = spec.removeprefix(DEMO_PREFIX).partition(":")
    if name != "shapes":
        raise ValueError(f"there is no demonstration set {spec!r}: the one there is is demo:shapes")
    if number == "":
        return DEMO_SIZE
    if not (number.isascii() and number.isdigit() and int(number) > 0):
        raise ValueError(
            f"{spec!r} asks for {number!r} images, which is no positive number: write e.g. demo:shapes:{DEMO_SIZE}"
        )
    return int(number)
