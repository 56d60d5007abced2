"""A folder of image files, flat or nested."""

from __future__ import annotations

import os

from torch import Tensor

from ..listing import list_files
from ..packed import PackedStrings
from .augmentation import randomly_flipped
from .decoding import decode_image

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


class ImageFolder:
    """Every image below a folder, numbered in the order of the relative path. See `Images` for the methods."""

    def __init__(self, folder: str, *, image_size: int, channels: int = 3, flip: bool = False, seed: int = 0) -> None:
        self.folder = folder
        self.image_size, self.channels, self.flip, self.seed = image_size, channels, flip, seed
        self._paths = PackedStrings(list_images(folder))

    def __len__(self) -> int:
        return len(self._paths)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        image = decode_image(self.describe(index), self.image_size, self.channels)
        return randomly_flipped(image, self.seed, epoch, index) if self.flip and augment else image

    def describe(self, index: int) -> str:
        return os.path.join(self.folder, self._paths[index])


def list_images(folder: str) -> list[str]:
    """Relative paths ('/' between the parts) of the image files below `folder`, sorted; see `list_files`.

    Raises ValueError, in one line, where the folder is missing, no folder, not readable or holds no image.
    """
    images, n_others = list_files(folder, ENDINGS, "images", "demo:shapes")
    if not images:
        raise ValueError(
            f"no image in {folder!r}, which holds {n_others} other file{'' if n_others == 1 else 's'}: "
            f"files that end in {' '.join(ENDINGS)} are read, in the folder and in those below it"
        )
    return images
