"""demo:shapes as a set of images (see `Images`), until sets are made of records and fields."""

from __future__ import annotations

from torch import Tensor

from ..demo import DemoSource
from .decoding import randomly_flipped


class Shapes(DemoSource):
    def __init__(self, n: int, *, image_size: int, channels: int = 3, flip: bool = False, seed: int = 0) -> None:
        super().__init__("shapes", n, seed)
        self.image_size, self.channels, self.flip = image_size, channels, flip

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        image: Tensor = self.record(index)["image"](self.image_size, self.channels)
        return randomly_flipped(image, self.seed, epoch, index) if self.flip and augment else image

    def caption(self, index: int) -> str:
        caption: str = self.record(index)["texts"]["captions"][0]
        return caption
