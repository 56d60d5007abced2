"""The patch discriminator of Muse's VQGAN (Chang et al. 2023; Esser et al. 2021, section 3.1)."""

from __future__ import annotations

import itertools
import math

from torch import Tensor, nn

from .convolutional import channels_last, leaky_relu
from .files.pretrained import Pretrained, constructor_arguments

_LAST_KERNEL = 4  # side of the unpadded convolution that gives the logits
_MOST_LAYERS = 40


class Discriminator(Pretrained):
    """Images to a grid of logits, positive where a patch looks real.

    A 5 x 5 convolution, then ``layers`` halvings (4 x 4 convolution of stride 2, GroupNorm, LeakyReLU) to dim, 2 dim,
    4 dim, ... channels, then a 1 x 1 convolution, LeakyReLU and an unpadded 4 x 4 convolution. Weights start as PyTorch
    initialises convolutions. All operations can be differentiated twice, as a gradient penalty needs.

    Args:
        dim: Channels after the first convolution and the first halving; they double with each further halving.
        groups: Groups of the group normalisations. A layer whose channels are no multiple of this number uses the
            greatest common divisor of both.

    Raises:
        ValueError: a number that is not positive.
    """

    num_heads = 1

    def __init__(self, dim: int, channels: int = 3, layers: int = 4, groups: int = 16) -> None:
        super().__init__()
        self.config = constructor_arguments(locals())
        if min(dim, channels, layers, groups) < 1:
            sizes = f"dim {dim}, {channels} channels, {layers} layers and {groups} groups"
            raise ValueError(f"a discriminator of {sizes}: give numbers of at least 1")
        if layers > _MOST_LAYERS:
            raise ValueError(f"{layers} layers of a discriminator are as many halvings; give at most {_MOST_LAYERS}")
        widths = [dim] + [dim * 2**level for level in range(layers)]
        self.smallest_side = _LAST_KERNEL * 2**layers
        self.layers = nn.Sequential(
            nn.Sequential(nn.Conv2d(channels, dim, 5, padding=2), leaky_relu(0.1)),
            *(
                nn.Sequential(
                    nn.Conv2d(fan_in, fan_out, 4, stride=2, padding=1),
                    nn.GroupNorm(math.gcd(groups, fan_out), fan_out),
                    leaky_relu(0.1),
                )
                for fan_in, fan_out in itertools.pairwise(widths)
            ),
        )
        self.to_logits = nn.Sequential(
            nn.Conv2d(widths[-1], widths[-1], 1), leaky_relu(0.1), nn.Conv2d(widths[-1], 1, _LAST_KERNEL)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Images (b, c, h, w) in [0, 1] -> fp32 logits (b, 1, h', w'), h' = floor(h / 2^layers) - 3: 5 for 128 pixels.

        Raises:
            ValueError: images too small for one logit.
        """
        self.check_side(min(images.shape[-2:]))
        x = images.to(next(self.parameters()).dtype)  # the weights may have been cast to half precision
        return self.to_logits(self.layers(channels_last(x))).float()

    def check_side(self, pixels: int) -> None:
        """Raise a ValueError if images of this height or width are too small for one logit."""
        if pixels < self.smallest_side:
            needs = (
                f"{len(self.layers) - 1} layers, which needs {self.smallest_side}; use larger images or fewer layers"
            )
            raise ValueError(f"images of {pixels} pixels are too small for a discriminator of {needs}")
