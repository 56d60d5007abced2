"""demo:shapes as a set of captioned images (see `Captioned`), until sets are made of records and fields."""

from __future__ import annotations

from torch import Tensor

from ..demo import WIDTH, condition_of
from .embeddings import Kind
from .shapes import Shapes

__all__ = ["WIDTH", "Scenes", "condition_of"]


class Scenes(Shapes):
    has_captions = True

    def __init__(self, n: int, *, image_size: int, flip: bool = False, seed: int = 0) -> None:
        super().__init__(n, image_size=image_size, flip=flip, seed=seed)
        self.kind = "scenes"

    def embeddings(self, kind: Kind) -> _OfScenes:
        return _OfScenes(self, kind)


class _OfScenes:
    fingerprint = ""

    def __init__(self, scenes: Scenes, kind: Kind) -> None:
        self._scenes, self._name = scenes, kind.key
        self.shape: tuple[int, ...] = tuple(self.load(0).shape)

    def load(self, index: int) -> Tensor:
        numbers: Tensor = self._scenes.record(index)[self._name]()
        return numbers
