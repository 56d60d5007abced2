"""Perceptual distances: images compared by the activations of a VGG16 that was trained on ImageNet.

The weights of the VGG16 and the heads of LPIPS are never trained and never saved with a model. They come from the
user's files, or are fetched as published.

The package lpips is not used: its imports of torchvision and SciPy take 1.6 s and 176 MiB of each process beside
PyTorch, and it compares in bf16 under autocast. The tests compare with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from tandem.io.fetching import fetch_file
from tandem.io.published import LPIPS_HEADS, PUBLISHED, VGG16, read_state_dict
from tandem.models.building import build_with_weights

# Simonyan & Zisserman 2015, configuration D: channels of the five blocks, and convolutions in each.
WIDTHS = (64, 128, 256, 512, 512)
_DEPTHS = (2, 2, 3, 3, 3)

# For images in [0, 1]. LPIPS gives equivalent constants for images in [-1, 1].
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class PerceptualLoss(nn.Module):
    """Distance of images in the activations of VGG16; under autocast these are computed in its precision, and compared
    and summed in fp32.

    "vgg": mean squared difference of the last convolution's output after its ReLU (Ledig et al. 2017, section 2.2.1).
    "lpips": LPIPS 0.1 (Zhang et al. 2018): squared differences of the unit-length activations of all five blocks,
    weighted by learned heads, averaged over positions and summed over blocks.

    It stays in eval mode and no parameter requires a gradient; gradients flow to the reconstructions only.

    Args:
        kind: "vgg" or "lpips".
        widths: Channels of the five blocks; tests use smaller ones than VGG16.
    """

    _mean: Tensor
    _std: Tensor

    def __init__(self, kind: str, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        self.features = _vgg16_features(widths)
        self.heads = nn.ModuleList(nn.Conv2d(width, 1, 1, bias=False) for width in widths if kind == "lpips")
        for name, values in (("_mean", _IMAGENET_MEAN), ("_std", _IMAGENET_STD)):
            self.register_buffer(name, torch.tensor(values)[:, None, None], persistent=False)
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> PerceptualLoss:
        """Ignore ``mode`` and stay in eval mode."""
        return super().train(False)

    def forward(self, reconstructions: Tensor, images: Tensor) -> Tensor:
        """Mean over the images of `distances`, 0-d."""
        return self.distances(reconstructions, images).mean()

    def distances(self, reconstructions: Tensor, images: Tensor) -> Tensor:
        """Two batches of images (b, 3 or 1, h, w) in [0, 1] -> distance of each pair, fp32 (b,); 0 for equal images.

        Raises:
            ValueError: images with a side of less than 16 pixels, or with another number of channels.
        """
        with torch.no_grad():
            target_activations = self._activations(images)
        activations = self._activations(reconstructions)
        with torch.autocast(images.device.type, enabled=False):
            if not self.heads:
                return (activations[-1] - target_activations[-1]).square().flatten(1).mean(1)
            blocks = zip(self.heads, activations, target_activations, strict=True)
            block_distances = [head((_unit(x) - _unit(y)).square()).flatten(1).mean(1) for head, x, y in blocks]
            return torch.stack(block_distances).sum(0)

    def _activations(self, images: Tensor) -> list[Tensor]:
        """Output of each block's last ReLU, fp32 (b, c_i, h / 2^i, w / 2^i) for i = 0 ... 4."""
        _check_shape(*images.shape[1:])
        x = (images.float().expand(-1, 3, -1, -1) - self._mean) / self._std
        outputs = []
        for layer in self.features:
            if isinstance(layer, nn.MaxPool2d):
                outputs.append(x)
            x = layer(x)
        return [output.float() for output in (*outputs, x)]


def _check_shape(channels: int, height: int, width: int, hint: str = "") -> None:
    if channels not in (1, 3) or min(height, width) < 2 ** (len(_DEPTHS) - 1):
        expected = "VGG16 compares images of 1 or 3 channels and at least 16 x 16 pixels"
        raise ValueError(f"{expected}, not {channels} of {height} x {width}; use larger images{hint}")


def _vgg16_features(widths: Sequence[int]) -> nn.Sequential:
    """The convolutions, numbered as torchvision numbers them, without the last pooling."""
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in zip(widths, _DEPTHS, strict=True):
        layers += [nn.MaxPool2d(2)] if layers else []
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
    return nn.Sequential(*layers)


def _unit(x: Tensor) -> Tensor:
    """(b, c, h, w), scaled to length 1 along c; 0 where all channels are 0."""
    return x / (torch.linalg.vector_norm(x, dim=1, keepdim=True) + 1e-10)


def load_perceptual(
    kind: str, weights: str | Path | None = None, device: torch.device | str = "cpu", *, side: int | None = None,
    widths: Sequence[int] = WIDTHS, flag: str = "--perceptual_weights", heartbeat: Callable[[], None] = lambda: None,
) -> PerceptualLoss | None:  # fmt: skip
    """The perceptual loss with its weights.

    Args:
        kind: "vgg", "lpips", or "none".
        weights: A file (.pth as published, or .safetensors) or a folder of them under their published names. The
            weights that it lacks are fetched into torch.hub's cache, unless they are there. None or "published" gives
            no weights, so that all are fetched.
        side: Side of the images in pixels, to check that it is large enough; None if it is not known yet.
        widths: Channels of the five blocks; see `PerceptualLoss`.
        flag: The user's flag for the weights, for messages.
        heartbeat: Called during the fetching, to show that this process is alive.

    Returns:
        None for "none".

    Raises:
        ValueError: one line, if the kind is unknown, images of that side are too small, or weights are missing,
            damaged, hostile or of another network.
    """
    if kind == "none":
        return None
    if kind not in ("vgg", "lpips"):
        raise ValueError(f"perceptual loss {kind!r} is none of none, vgg, lpips")
    hint = f", or do without ({'--perceptual none' if flag == '--perceptual_weights' else f'no {flag}'})"
    if side is not None:
        _check_shape(3, side, side, hint)
    with torch.device("meta"):
        names_by_published = {_published_name(name): name for name in PerceptualLoss(kind, widths).state_dict()}
    files = {"features": VGG16, **({"lin": LPIPS_HEADS} if kind == "lpips" else {})}
    published = " and ".join(map(str, files.values()))
    source = None if weights in (None, PUBLISHED) else Path(weights)
    paths = [source] if source and not source.is_dir() else [file.find_in(source) for file in files.values() if source]
    state: dict[str, Tensor] = {}
    try:
        for path in filter(None, paths):
            state |= read_state_dict(path, names_by_published.keys() - state.keys(), published=published)
        if source and not state:
            raise ValueError(f"{source} holds no weights of {kind}; give {published}")
        for prefix, file in files.items():
            if not any(name.startswith(prefix) for name in state):
                state |= read_state_dict(
                    fetch_file(file, heartbeat), {name for name in names_by_published if name.startswith(prefix)}
                )
    except ValueError as error:
        raise ValueError(f"{flag}: {error}{hint}") from None
    state = {names_by_published[name]: tensor for name, tensor in state.items()}
    try:
        model = build_with_weights(lambda: PerceptualLoss(kind, widths), state)
    except ValueError as error:
        raise ValueError(f"{flag}: the weights of {kind} are of another network: {error}") from None
    return model.to(device)


def load_lpips(
    weights: str | None, side: int, device: torch.device | str = "cpu", heartbeat: Callable[[], None] = lambda: None
) -> PerceptualLoss | None:
    """The LPIPS that validations report, for images of this side in pixels, with the weights of --lpips_weights; None
    without that flag. Raises ValueError as `load_perceptual`."""
    return load_perceptual(
        "lpips" if weights else "none", weights, device, side=side, flag="--lpips_weights", heartbeat=heartbeat
    )


def _published_name(name: str) -> str:
    """The published name of a weight: heads.2.weight -> lin2.model.1.weight; those of the VGG16 are the same."""
    part, index, kind = name.split(".")
    return f"lin{index}.model.1.{kind}" if part == "heads" else name
