"""A discriminator of videos with several heads: one judges single frames, the others how frames follow one another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .convolutional import leaky_relu
from .discriminator import Discriminator
from .files.pretrained import Pretrained, constructor_arguments

_LAST_KERNEL = 4  # side in space of the unpadded convolution that gives the logits, as in Discriminator
_TIME_HALVINGS = 2


class VideoDiscriminator(Pretrained):
    """Videos to one tensor of logits for each head, positive where a patch looks real.

    The first head is a `Discriminator`, which sees one frame of each clip. The others are patch discriminators with 3-D
    convolutions, which see every frame, every second frame and so on, because one of them alone would either be blind
    to slow motion or to fast motion. No sample influences another's logits, and all operations can be differentiated
    twice, as a gradient penalty needs.

    A clip head with time stride s judges clips of more than s frames and gives no logits for shorter ones. So one-frame
    videos, which are images, are judged by the frame head alone; the momentum of an optimizer still moves the others.

    Args:
        dim: Channels of the first layer of the frame head.
        layers: Halvings of the side in every head.
        clip_dim: Channels of the first layer of a clip head (None: dim).
        time_strides: Distance in frames of the frames that each clip head sees, in rising order.
        groups: Groups of the group normalisations; see `Discriminator`.

    Raises:
        ValueError: a number that is not positive, or time strides that do not rise.
    """

    def __init__(
        self,
        dim: int,
        channels: int = 3,
        layers: int = 4,
        groups: int = 16,
        clip_dim: int | None = None,
        time_strides: Sequence[int] = (1, 2),
    ) -> None:
        super().__init__()
        self.config = constructor_arguments(locals())
        strides, width = list(time_strides), dim if clip_dim is None else clip_dim
        if width < 1 or min(strides, default=1) < 1 or strides != sorted(set(strides)):
            raise ValueError(
                f"clip heads of {width} channels with time strides {strides}: give positive, rising numbers"
            )
        self.time_strides = tuple(strides)
        self.frame_head = Discriminator(dim, channels, layers, groups)
        self.clip_heads = nn.ModuleList(_ClipHead(width, channels, layers, groups) for _ in strides)

    @property
    def num_heads(self) -> int:
        """Heads in all, and logits that clips with enough frames get."""
        return 1 + len(self.clip_heads)

    def forward(self, videos: Tensor, frames: Tensor) -> list[Tensor]:
        """Videos (b, c, f, h, w) in [0, 1] and the frame of each that the frame head sees, int64 (b,) -> fp32 logits of
        each head: (b, 1, h', w') of the frame head, then (b, 1, f', h', w') of each clip head for which the clips are
        long enough; h' = floor(h / 2^layers) - 3 and f' = ceil(f'' / 4), if a head sees f'' frames and layers > 2.

        Raises:
            ValueError: videos too small for one logit.
        """
        self.check_side(min(videos.shape[-2:]))
        shown = videos[torch.arange(len(videos), device=videos.device), :, frames]
        x = videos.to(next(self.parameters()).dtype)  # the weights may have been cast to half precision
        heads = zip(self.time_strides, self.clip_heads, strict=True)
        of_frame = self.frame_head(shown)  # in the order of registration, in reverse of which gradients are sent
        return [of_frame, *(head(x[:, :, ::stride]).float() for stride, head in heads if videos.shape[2] > stride)]

    def check_side(self, pixels: int) -> None:
        """Raise a ValueError if videos of this height or width are too small for one logit."""
        self.frame_head.check_side(pixels)


class _ClipHead(nn.Module):
    """Videos (b, c, f, h, w) -> logits (b, 1, f', h', w').

    ``layers`` halvings of the side to dim, 2 dim, 4 dim, ... channels, of which the second and the third also halve the
    time. Unlike the frame head it has no convolution at full resolution: for many frames that would cost most of all.
    """

    def __init__(self, dim: int, channels: int, layers: int, groups: int) -> None:
        super().__init__()
        widths = [channels] + [dim * 2**level for level in range(layers)]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv3d(fan_in, fan_out, (3, 4, 4), _stride(level), padding=1),
                    nn.GroupNorm(math.gcd(groups, fan_out), fan_out) if level else nn.Identity(),
                    leaky_relu(0.1),
                )
                for level, (fan_in, fan_out) in enumerate(itertools.pairwise(widths))
            )
        )
        self.to_logits = nn.Sequential(
            nn.Conv3d(widths[-1], widths[-1], 1),
            leaky_relu(0.1),
            nn.Conv3d(widths[-1], 1, (1, _LAST_KERNEL, _LAST_KERNEL)),
        )

    def forward(self, videos: Tensor) -> Tensor:
        return self.to_logits(self.layers(videos))


def _stride(level: int) -> tuple[int, int, int]:
    return (2 if 0 < level <= _TIME_HALVINGS else 1, 2, 2)
