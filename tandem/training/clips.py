"""What is drawn at random about the clips of an update: their length, and the frames that are judged alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tandem.devices import to_device

from .noise import Noise

T = TypeVar("T")


def loss_of_frames(image_loss: Callable[[Tensor, Tensor], T]) -> Callable[[Tensor, Tensor, Tensor], T]:
    """A function that compares one frame of each video by a loss of images (b, c, h, w). It takes two batches of videos
    (b, c, f, h, w) and the index of the frame of each, int64 (b,)."""

    def select(videos: Tensor, frames: Tensor) -> Tensor:
        return videos[torch.arange(len(videos), device=videos.device), :, frames]

    return lambda fake, real, frames: image_loss(select(fake, frames), select(real, frames))


class ClipDraws:
    """Draws that are functions of the seed, the update and, for frames, the place of a clip in the batch. All processes
    draw the same length, because those of FSDP and ZeRO 3 have to compute equally much.

    Args:
        lengths: Numbers of frames, each as likely as the others.
        only_longest: Draw the longest length alone, so that a dry run takes as much time and memory as any update.
    """

    def __init__(self, seed: int, lengths: Sequence[int], device: torch.device, *, only_longest: bool = False) -> None:
        self._frame_noise, self._length_noise = Noise(seed, "frame"), Noise(seed, "clip length")
        self._lengths, self._device = [max(lengths)] if only_longest else lengths, device

    def length(self, step: int) -> int:
        """The frames of the clips of update `step`."""
        if len(self._lengths) == 1:
            return self._lengths[0]
        return self._lengths[int(self._length_noise.uniform(step, [0], ()).item() * len(self._lengths))]

    def cut(self, batch: Mapping[str, Any], step: int) -> dict[str, Any]:
        """A batch with the beginnings of its "videos" (b, c, f, h, w); images stay images."""
        return {**batch, "videos": batch["videos"][:, :, : self.length(step)]}

    def update_kind(self, kind: Callable[..., Any]) -> Callable[..., Any]:
        """An `update_kind` of `training.updates` that tells lengths apart, too."""
        return lambda step, batch=None: (kind(step, batch), self.length(step))

    def frames(self, micro_batch: Mapping[str, Any], step: int) -> dict[str, Tensor]:
        """The number of a random frame of each clip (b,), for the losses that judge single frames."""
        # On the CPU, so that every device draws the same.
        fractions = self._frame_noise.uniform(step, micro_batch["positions"], ())
        return {"frames": to_device((fractions * micro_batch["videos"].shape[2]).long(), self._device)}
