"""demo:tones as a set of sounds (see `Sounds`), until sets are made of records and fields."""

from __future__ import annotations

from torch import Tensor

from ..demo import DemoSource, check_sound
from .sidecars import Texts


class Tones(DemoSource):
    def __init__(self, n: int, *, sample_rate: int, clip_samples: int, seed: int = 0) -> None:
        check_sound(sample_rate, clip_samples)
        super().__init__("tones", n, seed)
        self.sample_rate, self.clip_samples = sample_rate, clip_samples

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        sound: Tensor = self.record(index, epoch, augment)["sound"](self.sample_rate, self.clip_samples)
        return sound

    def texts(self, index: int) -> Texts:
        return Texts(**self.record(index)["texts"])
