"""I3D: the network of the Fréchet video distance, Inception-v1 with 3-D convolutions (Carreira & Zisserman 2017).

Its weights are never trained and never saved with a model. They come from a file on this machine: a plain state dict of
the network trained on Kinetics-400, such as `i3d_pretrained_400.pt`, which is not fetched, because no checksum of it is
published.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.devices import full_precision
from tandem.io.published import read_state_dict
from tandem.models.building import build_with_weights

I3D_DIM = 400  # classes of Kinetics-400
SMALLEST_FRAMES = 9  # the last pooling takes 2 frames of ceil(f / 8)
_SIDE = 224
EPS = 1e-3  # of the batch normalisations, as in I3D's training and in the TensorFlow graph of the published distance
_PUBLISHED = "I3D: i3d_pretrained_400.pt of https://github.com/npurson/fid-metrics/releases/tag/v1.0 (50 MB)"

# Channels of the convolutions of `_Mixed`, branch by branch; or kernel and stride of a pooling.
_BLOCKS = {
    "Mixed_3b": (64, 96, 128, 16, 32, 32),
    "Mixed_3c": (128, 128, 192, 32, 96, 64),
    "MaxPool3d_4a_3x3": (3, 2),
    "Mixed_4b": (192, 96, 208, 16, 48, 64),
    "Mixed_4c": (160, 112, 224, 24, 64, 64),
    "Mixed_4d": (128, 128, 256, 24, 64, 64),
    "Mixed_4e": (112, 144, 288, 32, 64, 64),
    "Mixed_4f": (256, 160, 320, 32, 128, 128),
    "MaxPool3d_5a_2x2": (2, 2),
    "Mixed_5b": (256, 160, 320, 32, 128, 128),
    "Mixed_5c": (384, 192, 384, 48, 128, 128),
}


class I3D(nn.Module):
    """Videos to the logits of 400 kinds of action, in eval mode and without gradients for its 12.7 million weights.

    Modules have the names of the published state dicts. Convolutions and poolings pad with zeros as TensorFlow's "same"
    does, one more behind than in front if their number is odd.

    Args:
        eps: Added to the variance by batch normalisations.
    """

    def __init__(self, eps: float = EPS) -> None:
        super().__init__()
        self.Conv3d_1a_7x7 = _Unit(3, 64, 7, stride=2)
        self.MaxPool3d_2a_3x3 = _MaxPool((1, 3, 3), (1, 2, 2))
        self.Conv3d_2b_1x1 = _Unit(64, 64, 1)
        self.Conv3d_2c_3x3 = _Unit(64, 192, 3)
        self.MaxPool3d_3a_3x3 = _MaxPool((1, 3, 3), (1, 2, 2))
        channels = 192
        for name, widths in _BLOCKS.items():
            if len(widths) == 2:
                kernel, stride = widths
                self.add_module(name, _MaxPool((kernel,) * 3, (stride,) * 3))
            else:
                self.add_module(name, _Mixed(channels, *widths))
                channels = widths[0] + widths[2] + widths[4] + widths[5]
        self.logits = _Unit(channels, I3D_DIM, 1, is_last=True)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm3d):
                module.eps = eps
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> I3D:
        """Ignore ``mode`` and stay in eval mode."""
        return super().train(False)

    def forward(self, videos: Tensor) -> Tensor:
        """Videos (b, 3, f, 224, 224) in [-1, 1], f >= 9 -> mean over time of the logits, (b, 400)."""
        x = videos
        for name, module in self.named_children():
            if name == "logits":
                x = F.avg_pool3d(x, (2, 7, 7), stride=1)
            x = module(x)
        return x.mean((2, 3, 4))

    def features(self, videos: Tensor) -> Tensor:
        """Videos (b, 3, f, h, w) in [0, 1] -> fp32 vectors (b, 400), under autocast too.

        As for published values, frames are rounded to 8 bits and resized to 224 x 224 bilinearly, without regard to
        their proportions and without smoothing.

        Raises:
            ValueError: fewer than 9 frames, or not 3 channels.
        """
        check_shape(videos.shape[1], videos.shape[2])
        with full_precision(videos.device.type):
            pixels = (videos.float().clamp(0, 1) * 255).round()
            frames = pixels.transpose(1, 2).flatten(0, 1)
            frames = F.interpolate(frames, size=(_SIDE, _SIDE), mode="bilinear", align_corners=False)
            return self(frames.unflatten(0, (len(videos), -1)).transpose(1, 2) / 127.5 - 1)


def check_shape(channels: int, frames: int) -> None:
    """Raise a ValueError if I3D does not take videos of so many channels and frames."""
    if channels != 3 or frames < SMALLEST_FRAMES:
        expected = f"I3D, the network of rFVD, takes videos of 3 channels and at least {SMALLEST_FRAMES} frames"
        raise ValueError(f"{expected}, not {channels} channels and {frames} frames; use longer clips, or no rFVD")


def load_i3d(weights: str | Path, device: torch.device | str = "cpu", eps: float = EPS) -> I3D:
    """I3D with weights from a file (.pt, .pth or .safetensors); `eps`: see `I3D`.

    Raises:
        ValueError: one line, if the file is missing, damaged, hostile or of another network.
    """
    with torch.device("meta"):
        expected = I3D().state_dict()
    state = read_state_dict(Path(weights), expected, published=_PUBLISHED)
    # Older files lack the batch counters of the batch normalisations.
    counts = {name: torch.zeros((), dtype=torch.int64) for name in expected if name.endswith("num_batches_tracked")}
    try:
        model = build_with_weights(partial(I3D, eps), {**counts, **state})
    except ValueError as error:
        raise ValueError(f"the weights in {weights} are not those of I3D: {error}") from None
    return model.to(device)


def i3d_features(
    weights: str | Path | None, frames: int, device: torch.device | str = "cpu", eps: float = EPS
) -> Callable[[Tensor], Tensor] | None:
    """`I3D.features` of I3D with this `eps`, for RGB videos of this number of frames; None without a file of weights.
    Raises ValueError, in one line, if I3D takes no such videos or the file does not hold it."""
    if weights is None:
        return None
    check_shape(3, frames)
    return load_i3d(weights, device, eps).features


class _Unit(nn.Module):
    """Convolution, batch normalisation and ReLU; the last one has a bias instead of the two."""

    def __init__(self, fan_in: int, fan_out: int, kernel: int, stride: int = 1, *, is_last: bool = False) -> None:
        super().__init__()
        self.conv3d = nn.Conv3d(fan_in, fan_out, kernel, stride, bias=is_last)
        self.bn = None if is_last else nn.BatchNorm3d(fan_out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv3d(pad_same(x, self.conv3d.kernel_size, self.conv3d.stride))
        return x if self.bn is None else F.relu(self.bn(x))


class _MaxPool(nn.Module):
    def __init__(self, kernel: tuple[int, ...], stride: tuple[int, ...]) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool3d(pad_same(x, self.kernel, self.stride), self.kernel, self.stride)


class _Mixed(nn.Module):
    """Four branches side by side: 1 x 1; 1 x 1, 3 x 3; 1 x 1, 3 x 3; pooling, 1 x 1."""

    def __init__(self, fan_in: int, *sizes: int) -> None:
        super().__init__()
        b0, b1a, b1b, b2a, b2b, b3b = sizes
        self.b0 = _Unit(fan_in, b0, 1)
        self.b1a, self.b1b = _Unit(fan_in, b1a, 1), _Unit(b1a, b1b, 3)
        self.b2a, self.b2b = _Unit(fan_in, b2a, 1), _Unit(b2a, b2b, 3)
        self.b3a, self.b3b = _MaxPool((3, 3, 3), (1, 1, 1)), _Unit(fan_in, b3b, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.b0(x), self.b1b(self.b1a(x)), self.b2b(self.b2a(x)), self.b3b(self.b3a(x))], dim=1)


def pad_same(x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """(b, c, f, h, w), padded with zeros so that a kernel makes ceil(size / stride) outputs along f, h and w."""
    padding: list[int] = []
    for size, k, s in zip(x.shape[2:], kernel, stride, strict=True):
        missing = max((-(-size // s) - 1) * s + k - size, 0)
        padding = [missing // 2, missing - missing // 2, *padding]  # F.pad counts from the last dimension
    return F.pad(x, padding)
