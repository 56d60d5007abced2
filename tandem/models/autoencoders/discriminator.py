"""The patch discriminator (PatchGAN: Isola et al. 2017) of Muse's VQGAN (Chang et al. 2023; Esser et al. 2021, section
3.1), that of MaskBit (Weber et al. 2024), and one of videos with several heads: one sees single frames, the others how
frames follow one another, as in MoCoGAN (Tulyakov et al. 2018)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.config.models.autoencoders import DiscriminatorConfig, VideoDiscriminatorConfig
from tandem.models.base import Pretrained
from tandem.models.layers.convolutional import channels_last, group_norm, leaky_relu

_LAST_KERNEL = 4  # height and width of the unpadded convolution that computes the logits
_MAX_LAYERS = 40
_TIME_STRIDES = (1, 2)  # of each clip head: it sees every frame, or every second one
_TIME_HALVINGS = 2


class Discriminator(Pretrained):
    """Images to a grid of logits, positive where a patch looks real.

    A 5 x 5 convolution, then ``layers`` halvings (4 x 4 convolution of stride 2, GroupNorm, LeakyReLU) to dim, 2 dim,
    4 dim, ... channels, then a 1 x 1 convolution, LeakyReLU and an unpadded 4 x 4 convolution. Weights start as PyTorch
    initialises convolutions. All operations can be differentiated twice, as a gradient penalty needs.

    Raises:
        ValueError: a number that is not positive.
    """

    Config = DiscriminatorConfig
    num_heads = 1
    _smallest_map = _LAST_KERNEL  # side of the last grid of channels that is large enough

    def __init__(self, config: DiscriminatorConfig) -> None:
        super().__init__(config)
        dim, channels, layers = config.dim, config.channels, config.layers
        if min(dim, channels, layers) < 1:
            sizes = f"dim {dim}, {channels} channels and {layers} layers"
            raise ValueError(f"a discriminator of {sizes}: give numbers of at least 1 (--discr_dim, --discr_layers)")
        if layers > _MAX_LAYERS:
            hint = f"lower --discr_layers to at most {_MAX_LAYERS}"
            raise ValueError(f"a discriminator of {layers} layers halves images as often: {hint}")
        widths = [dim] + [dim * 2**level for level in range(layers)]
        self.layers = nn.Sequential(
            nn.Sequential(nn.Conv2d(channels, dim, 5, padding=2), leaky_relu()),
            *(self._make_halving(fan_in, fan_out) for fan_in, fan_out in itertools.pairwise(widths)),
        )
        self.to_logits = self._make_head(widths[-1])

    def _make_halving(self, fan_in: int, fan_out: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(fan_in, fan_out, 4, stride=2, padding=1), group_norm(fan_out), leaky_relu())

    def _make_head(self, width: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(width, width, 1), leaky_relu(), nn.Conv2d(width, 1, _LAST_KERNEL))

    def forward(self, images: Tensor) -> Tensor:
        """Images (b, c, h, w) in [0, 1] -> fp32 logits (b, 1, h', w'), h' = floor(h / 2^layers) - 3: 5 for 128 pixels.

        Raises:
            ValueError: images too small.
        """
        self.check_side(min(images.shape[-2:]))
        x = images.to(next(self.parameters()).dtype)  # the weights may have been cast to half precision
        return self.to_logits(self.layers(channels_last(x))).float()

    def check_side(self, pixels: int) -> None:
        """Raise a ValueError if images of this height or width are too small."""
        _check_side(pixels, self._smallest_map, len(self.layers) - 1)


def _check_side(pixels: int, smallest_map: int, layers: int) -> None:
    """Raise a ValueError unless ``layers`` halvings leave at least ``smallest_map`` places of so many pixels."""
    smallest_side = smallest_map * 2**layers
    if pixels < smallest_side:
        max_layers = (pixels // smallest_map).bit_length() - 1
        hint = f", or lower --discr_layers to {max_layers}" if max_layers > 0 else ""
        raise ValueError(
            f"images of {pixels} pixels are too small for a discriminator of {layers} layers (--discr_layers), which "
            f"needs {smallest_side}: use larger images (--image_size){hint}"
        )


class MaskBitDiscriminator(Discriminator):
    """The discriminator of MaskBit (Weber et al. 2024, arXiv:2409.16211, section 2.3), as its authors' code has it:
    images to a grid of logits, positive where a patch looks real.

    A 5 x 5 convolution, then ``layers`` halvings (3 x 3 convolution, `Blur`, GroupNorm, LeakyReLU) to dim, 2 dim, 4
    dim, ... channels, a maximum over windows that leaves at most 16 x 16 places, a 1 x 1 convolution, LeakyReLU and a
    padded 5 x 5 convolution: logits (b, 1, h', w') with h' = min(floor(h / 2^layers), 16). dim 128 and 4 layers are the
    authors'. There, smaller grids are enlarged to 16 x 16.
    """

    _smallest_map = 2  # with one place and one channel in a group, GroupNorm makes 0 of everything

    def _make_halving(self, fan_in: int, fan_out: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(fan_in, fan_out, 3, padding=1), Blur(), group_norm(fan_out, max_groups=32), leaky_relu()
        )

    def _make_head(self, width: int) -> nn.Sequential:
        return nn.Sequential(MaxPool(16), nn.Conv2d(width, width, 1), leaky_relu(), nn.Conv2d(width, 1, 5, padding=2))


class Blur(nn.Module):
    """Halves the side after a blur: each channel is convolved with the outer product of (1, 3, 3, 1) / 8 with itself,
    with stride 2 (Zhang 2019, "Making convolutional networks shift-invariant again"). (b, c, h, w) -> (b, c,
    floor(h / 2), floor(w / 2)); what lies outside is 0."""

    _kernel: Tensor

    def __init__(self) -> None:
        super().__init__()
        weights = (1, 3, 3, 1)
        # In Python: arithmetic on the meta device would import the compiler.
        kernel = torch.tensor([[row * column / 64 for column in weights] for row in weights])
        self.register_buffer("_kernel", kernel, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        kernels = self._kernel.to(x.dtype).expand(x.shape[1], 1, -1, -1)
        return F.conv2d(x, kernels, stride=2, padding=1, groups=x.shape[1])


class MaxPool(nn.Module):
    """The maximum in each of ``side`` x ``side`` windows, as of `nn.AdaptiveMaxPool2d`, whose backward pass is not
    deterministic on a GPU; a smaller height or width stays as it is."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        for dim in (-2, -1):
            size = x.shape[dim]
            if size > self.side:
                # The first place of each window, and the one after its last.
                windows = [(i * size // self.side, -(-(i + 1) * size // self.side)) for i in range(self.side)]
                x = torch.stack([x.narrow(dim, first, end - first).amax(dim) for first, end in windows], dim)
        return x


_FRAME_HEADS = {"muse": Discriminator, "maskbit": MaskBitDiscriminator}


class VideoDiscriminator(Pretrained):
    """Videos to one tensor of logits for each head, positive where a patch looks real.

    The first head is a `Discriminator`, or with ``frame_head`` "maskbit" a `MaskBitDiscriminator`, which sees one frame
    of each clip. The others are patch discriminators with 3-D convolutions: one sees every frame, for fast motion, and
    one every second frame, for slow motion. No sample influences another's logits, and all operations can be
    differentiated twice, as a gradient penalty needs.

    A clip head with time stride s computes logits of clips of more than s frames only. So images, videos of one frame,
    train the frame head alone; the momentum of an optimizer still moves the others.

    Raises:
        ValueError: a number that is not positive, or an unknown kind of head.
    """

    Config = VideoDiscriminatorConfig
    num_heads = 1 + len(_TIME_STRIDES)
    """Number of logit tensors for clips with enough frames."""

    def __init__(self, config: VideoDiscriminatorConfig) -> None:
        super().__init__(config)
        if config.frame_head not in _FRAME_HEADS:
            raise ValueError(f"frame_head {config.frame_head!r} is unknown; use {', '.join(_FRAME_HEADS)}")
        dim, layers, channels = config.dim, config.layers, config.channels
        self.frame_head = _FRAME_HEADS[config.frame_head](DiscriminatorConfig(dim, layers, channels))
        self.clip_heads = nn.ModuleList(_ClipHead(dim, layers, channels) for _ in _TIME_STRIDES)

    def forward(self, videos: Tensor, frames: Tensor) -> list[Tensor]:
        """Videos (b, c, f, h, w) in [0, 1] and the frame of each that the frame head sees, int64 (b,) -> fp32 logits of
        each head: (b, 1, h', w') of the frame head, then (b, 1, f', h', w') of each clip head for which the clips are
        long enough; h' = floor(h / 2^layers) - 3 and f' = ceil(f'' / 4), if a head sees f'' frames and layers > 2.

        Raises:
            ValueError: videos too small for one logit.
        """
        self.check_side(min(videos.shape[-2:]))
        images = videos[torch.arange(len(videos), device=videos.device), :, frames]
        x = videos.to(next(self.parameters()).dtype)  # the weights may have been cast to half precision
        heads = zip(_TIME_STRIDES, self.clip_heads, strict=True)
        frame_logits = self.frame_head(images)  # first, as registered: gradients are sent in the reverse order
        return [frame_logits, *(head(x[:, :, ::stride]).float() for stride, head in heads if videos.shape[2] > stride)]

    def check_side(self, pixels: int) -> None:
        """Raise a ValueError if videos of this height or width are too small for one logit."""
        _check_side(pixels, _LAST_KERNEL, len(self.frame_head.layers) - 1)  # that of the clip heads


class _ClipHead(nn.Module):
    """Videos (b, c, f, h, w) -> logits (b, 1, f', h', w').

    ``layers`` halvings of the side to dim, 2 dim, 4 dim, ... channels, of which the second and the third also halve the
    time. Unlike the frame head it has no convolution at full resolution, which would cost most for many frames.
    """

    def __init__(self, dim: int, layers: int, channels: int) -> None:
        super().__init__()
        widths = [channels] + [dim * 2**level for level in range(layers)]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv3d(fan_in, fan_out, (3, 4, 4), (2 if 0 < level <= _TIME_HALVINGS else 1, 2, 2), padding=1),
                    group_norm(fan_out) if level else nn.Identity(),
                    leaky_relu(),
                )
                for level, (fan_in, fan_out) in enumerate(itertools.pairwise(widths))
            )
        )
        self.to_logits = nn.Sequential(
            nn.Conv3d(widths[-1], widths[-1], 1),
            leaky_relu(),
            nn.Conv3d(widths[-1], 1, (1, _LAST_KERNEL, _LAST_KERNEL)),
        )

    def forward(self, videos: Tensor) -> Tensor:
        return self.to_logits(self.layers(videos))
