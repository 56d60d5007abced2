"""demo:moving as a set of clips (see `Videos`), until sets are made of records and fields."""

from __future__ import annotations

from torch import Tensor

from ..demo import FRAMES_PER_SECOND, DemoSource
from ..images.decoding import randomly_flipped

__all__ = ["FRAMES_PER_SECOND", "Moving"]


class Moving(DemoSource):
    def __init__(
        self, n: int, *, image_size: int, num_frames: int, frames_per_step: float = 1.0, flip: bool = False,
        seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__("moving", n, seed)
        self.image_size, self.num_frames, self.frames_per_step, self.flip = (
            image_size, num_frames, frames_per_step, flip,
        )  # fmt: skip

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        clip: Tensor = self.record(index)["clip"](self.image_size, self.num_frames, self.frames_per_step)
        return randomly_flipped(clip, self.seed, epoch, index) if self.flip and augment else clip
