"""Webdataset tars of sounds with texts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..files import tars
from .decoding import ENDINGS, ClipDecoder
from .sidecars import NO_CAPTION, TEXT_ENDINGS, Texts, read_texts

MEMBERS = tars.Members("sound", (ENDINGS, *((ending,) for ending in TEXT_ENDINGS)))


class Tars:
    """The sounds of tars. Members whose names are equal up to the first dot after the folder are a sample: a sound,
    and a .json (see `texts_of_object`) or .txt (a caption per line). See `Sounds` for the methods.

    Raises ValueError, in one line, if a tar is damaged, or none holds a sound, or no sound has a text.
    """

    def __init__(self, paths: Sequence[str], clips: ClipDecoder) -> None:
        self._clips, self._tars = clips, tars.Tars(paths, MEMBERS)
        self.fingerprint = self._tars.fingerprint
        if not (self._tars.table[:, 2::2] >= 0).any():
            raise ValueError(f"no sound in {self._tars} has a caption, a .json or .txt of the same name")

    def __len__(self) -> int:
        return len(self._tars)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        return self._clips.load(self._tars.source(index), index, epoch, augment)

    def texts(self, index: int) -> Texts:
        for kind, ending in enumerate(TEXT_ENDINGS, 1):
            if (place := self._tars.beside(index, kind)) is not None:
                return read_texts(self._tars.path(index), ending, *place)
        raise ValueError(f"{NO_CAPTION}: the tar holds neither a .txt nor a .json of its name")

    def describe(self, index: int) -> str:
        return self._tars.describe(index)
