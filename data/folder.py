"""A folder of image files, flat or nested."""

from __future__ import annotations

import os
import stat

import numpy as np
from torch import Tensor

from .augmentation import randomly_flipped
from .decoding import decode_image

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


class ImageFolder:
    """Every image below a folder, numbered in the order of the relative path. See `Images` for the methods."""

    def __init__(self, folder: str, *, image_size: int, channels: int = 3, flip: bool = False, seed: int = 0) -> None:
        self.folder = folder
        self.image_size, self.channels, self.flip, self.seed = image_size, channels, flip, seed
        self._paths = _PackedStrings(list_images(folder))

    def __len__(self) -> int:
        return len(self._paths)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        image = decode_image(self.describe(index), self.image_size, self.channels)
        return randomly_flipped(image, self.seed, epoch, index) if self.flip and augment else image

    def describe(self, index: int) -> str:
        return os.path.join(self.folder, self._paths[index])


def list_images(folder: str) -> list[str]:
    """Relative paths ('/' between the parts) of the image files below `folder`, sorted; no file is opened.

    Linked folders are followed, each real folder is visited once; names that begin with a dot are passed over.
    Raises ValueError, in one line, where the folder is missing, no folder, not readable or holds no image.
    """
    _require_folder(folder)
    images: list[str] = []
    n_others = 0
    visited = set()
    pending = [""]
    while pending:
        relative = pending.pop()
        identity, entries = _scan(os.path.join(folder, relative))
        if identity in visited:
            continue
        visited.add(identity)
        folders = []
        for entry in entries:
            name = f"{relative}/{entry.name}" if relative else entry.name
            if entry.is_dir():
                folders.append(name)
            elif entry.name.lower().endswith(ENDINGS) and entry.is_file():
                images.append(name)
            else:
                n_others += 1
        pending += sorted(folders, reverse=True)  # so that of two links to one folder, the first in order is followed
    if not images:
        raise ValueError(
            f"no image in {folder!r}, which holds {n_others} other file{'' if n_others == 1 else 's'}: "
            f"files that end in {' '.join(ENDINGS)} are read, in the folder and in those below it"
        )
    return sorted(images)


def _require_folder(folder: str) -> None:
    try:
        mode = os.stat(folder).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"there is no folder {folder!r}: give the path of a folder of images, or demo:shapes to try without one"
        ) from None
    except OSError as error:
        raise ValueError(f"cannot read the folder {folder!r}: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise ValueError(f"{folder!r} is a file, not a folder: give the path of the folder that holds the images")


def _scan(path: str) -> tuple[tuple[int, int], list[os.DirEntry[str]]]:
    """Folder -> (what identifies it whatever the path, its entries but the hidden ones)."""
    try:
        status = os.stat(path)
        with os.scandir(path) as entries:
            return (status.st_dev, status.st_ino), [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise ValueError(f"cannot read the folder {path!r}: {error.strerror}") from None


class _PackedStrings:
    """Strings in two flat buffers. A list of str would be copied, page by page, into every loader worker by the mere
    counting of references."""

    def __init__(self, strings: list[str]) -> None:
        encoded = [os.fsencode(string) for string in strings]
        self._bytes = b"".join(encoded)
        self._ends = np.cumsum([len(string) for string in encoded])

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(self._bytes[start : self._ends[index]])
