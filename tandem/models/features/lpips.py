"""Perceptual distances: images compared by the activations of a VGG16, or the logits of a ResNet-50, that was trained
on ImageNet.

The weights of these networks and the heads of LPIPS are never trained and never saved with a model. They come from the
user's files, or are fetched as published.

The package lpips is not used: its imports of torchvision and SciPy take 1.6 s and 176 MiB of each process beside
PyTorch, and it compares in bf16 under autocast. The tests compare with it. For the same reason torchvision is imported
for its ResNet-50 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.io.fetching import fetch_file
from tandem.io.published import LPIPS_HEADS, PUBLISHED, RESNET50, VGG16, read_state_dict
from tandem.io.reading import one_line
from tandem.models.building import build_with_weights

# Simonyan & Zisserman 2015, configuration D: channels of the five blocks, and convolutions in each.
WIDTHS = (64, 128, 256, 512, 512)
_DEPTHS = (2, 2, 3, 3, 3)

# For images in [0, 1]. LPIPS gives equivalent constants for images in [-1, 1].
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_GRAM_BLOCKS = 4  # of the VGG16: those whose Gram matrices Johnson et al. 2016 compare


class _ImageNetDistance(nn.Module):
    """A distance of images by a network that was trained on ImageNet. It stays in eval mode and no parameter requires a
    gradient; gradients flow to the reconstructions only."""

    _mean: Tensor
    _std: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, values in (("_mean", _IMAGENET_MEAN), ("_std", _IMAGENET_STD)):
            self.register_buffer(name, torch.tensor(values)[:, None, None], persistent=False)

    def _freeze(self) -> None:
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> Any:
        """Ignore ``mode`` and stay in eval mode."""
        return super().train(False)

    def _normalize(self, images: Tensor) -> Tensor:
        """Images (b, 3 or 1, h, w) in [0, 1] -> what the network takes (b, 3, h, w)."""
        return (images.float().expand(-1, 3, -1, -1) - self._mean) / self._std


class PerceptualLoss(_ImageNetDistance):
    """Distance of images in the activations of VGG16; under autocast these are computed in its precision, and compared
    and summed in fp32.

    "vgg": mean squared difference of the last convolution's output after its ReLU (Ledig et al. 2017, section 2.2.1).
    "lpips": LPIPS 0.1 (Zhang et al. 2018): squared differences of the unit-length activations of all five blocks,
    weighted by learned heads, averaged over positions and summed over blocks.

    Args:
        kind: "vgg" or "lpips".
        widths: Channels of the five blocks; tests use smaller ones than VGG16.
        gram: Whether the loss has the term "gram_loss", too.
    """

    def __init__(self, kind: str, widths: Sequence[int] = WIDTHS, *, gram: bool = False) -> None:
        super().__init__()
        self._has_gram = gram
        self.features = _vgg16_features(widths)
        self.heads = nn.ModuleList(nn.Conv2d(width, 1, 1, bias=False) for width in widths if kind == "lpips")
        self._freeze()

    def forward(self, reconstructions: Tensor, images: Tensor) -> dict[str, Tensor]:
        """The terms of the loss by name, 0-d: "perceptual_loss", the mean over the images of `distances`, and with
        `gram` "gram_loss", the mean of `gram_distances` of the same activations."""
        activations, targets = self._both_activations(reconstructions, images)
        terms = {"perceptual_loss": self._compare(activations, targets).mean()}
        if self._has_gram:
            terms["gram_loss"] = gram_distances(activations[:_GRAM_BLOCKS], targets[:_GRAM_BLOCKS]).mean()
        return terms

    def distances(self, reconstructions: Tensor, images: Tensor) -> Tensor:
        """Two batches of images (b, 3 or 1, h, w) in [0, 1] -> distance of each pair, fp32 (b,); 0 for equal images.

        Raises:
            ValueError: images with a side of less than 16 pixels, or with another number of channels.
        """
        return self._compare(*self._both_activations(reconstructions, images))

    def _both_activations(self, reconstructions: Tensor, images: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        with torch.no_grad():
            targets = self._activations(images)
        return self._activations(reconstructions), targets

    def _compare(self, activations: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """The distances (b,)."""
        with torch.autocast(targets[0].device.type, enabled=False):
            if not self.heads:
                return (activations[-1] - targets[-1]).square().flatten(1).mean(1)
            blocks = zip(self.heads, activations, targets, strict=True)
            block_distances = [head((_unit(x) - _unit(y)).square()).flatten(1).mean(1) for head, x, y in blocks]
            return torch.stack(block_distances).sum(0)

    def _activations(self, images: Tensor) -> list[Tensor]:
        """Output of each block's last ReLU, fp32 (b, c_i, h / 2^i, w / 2^i) for i = 0 ... 4."""
        _check_shape(*images.shape[1:])
        x = self._normalize(images)
        outputs = []
        for layer in self.features:
            if isinstance(layer, nn.MaxPool2d):
                outputs.append(x)
            x = layer(x)
        return [output.float() for output in (*outputs, x)]


class LogitDistance(_ImageNetDistance):
    """Mean squared difference of the 1000 logits of torchvision's ResNet-50 (MaskBit: Weber et al. 2024,
    arXiv:2409.16211, section 2.3) for images of any size, which are resized to 224 x 224 pixels; under autocast the
    logits are computed in its precision, and compared in fp32.

    Args:
        blocks: Residual blocks of the four stages; tests use fewer than ResNet-50.

    Raises:
        ValueError: one line, if torchvision cannot be imported.
    """

    side = 224
    """That of the network's images, in pixels."""

    def __init__(self, blocks: Sequence[int] = (3, 4, 6, 3)) -> None:
        super().__init__()
        try:
            from torchvision.models.resnet import Bottleneck, ResNet
        except (ImportError, RuntimeError) as error:  # a RuntimeError if it was built for another PyTorch
            hint = "pip install --upgrade torch torchvision"
            raise ValueError(f"resnet50 needs torchvision: {hint} ({one_line(error)})") from None
        self.network = ResNet(Bottleneck, list(blocks))
        self._freeze()

    def forward(self, reconstructions: Tensor, images: Tensor) -> dict[str, Tensor]:
        """The term of the loss by name, 0-d: "perceptual_loss", the mean over the images of `distances`."""
        return {"perceptual_loss": self.distances(reconstructions, images).mean()}

    def distances(self, reconstructions: Tensor, images: Tensor) -> Tensor:
        """Two batches of images (b, 3 or 1, h, w) in [0, 1] -> distance of each pair, fp32 (b,); 0 for equal images.

        Raises:
            ValueError: images with another number of channels.
        """
        with torch.no_grad():
            targets = self._logits(images)
        return (self._logits(reconstructions) - targets).square().mean(1)

    def _logits(self, images: Tensor) -> Tensor:
        """Images (b, 3 or 1, h, w) -> fp32 (b, 1000)."""
        if images.shape[1] not in (1, 3):
            raise ValueError(f"ResNet-50 compares images of 1 or 3 channels, not {images.shape[1]}")
        with torch.autocast(images.device.type, enabled=False):
            rows, columns = (_resizing(pixels, self.side, images.device) for pixels in images.shape[-2:])
            resized = rows @ self._normalize(images) @ columns.T
        return self.network(resized).float()


@lru_cache(maxsize=16)
def _resizing(pixels: int, side: int, device: torch.device) -> Tensor:
    """Bilinear resizing with antialiasing as a linear map, fp32 (side, pixels). On a GPU, the backward pass of
    `F.interpolate` with antialiasing adds in an order that changes from call to call; that of a product does not."""
    pixel = torch.eye(pixels)[None, None]  # each column is an image with one white row
    return F.interpolate(pixel, size=(side, pixels), mode="bilinear", antialias=True)[0, 0].to(device)


def gram_distances(activations: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Two lists of activations (b, c_i, h_i, w_i) -> sum over i of |G_i - G'_i|^2 for each image, fp32 (b,). G_i is the
    Gram matrix F F^T / (c_i h_i w_i) of the activations F (c_i, h_i w_i) (Johnson et al. 2016, section 3.2)."""
    with torch.autocast(targets[0].device.type, enabled=False):
        differences = [_gram(x) - _gram(y) for x, y in zip(activations, targets, strict=True)]
        return torch.stack([difference.square().sum((1, 2)) for difference in differences]).sum(0)


def _gram(x: Tensor) -> Tensor:
    features = x.float().flatten(2)
    return features @ features.transpose(1, 2) / features[0].numel()


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
    gram: bool = False,
) -> PerceptualLoss | LogitDistance | None:  # fmt: skip
    """The perceptual loss with its weights.

    Args:
        kind: "vgg", "lpips", "resnet50", or "none".
        weights: A file (.pth as published, or .safetensors) or a folder of them under their published names. The
            weights that it lacks are fetched into torch.hub's cache, unless they are there. None or "published" gives
            no weights, so that all are fetched.
        side: Side of the images in pixels, to check that it is large enough; None if it is not known yet.
        widths: Channels of the five blocks; see `PerceptualLoss`.
        flag: The user's flag for the weights, for messages.
        heartbeat: Called during the fetching, to show that this process is alive.
        gram: Whether the loss of the VGG16 has the term "gram_loss", too.

    Returns:
        None for "none".

    Raises:
        ValueError: one line, if the kind is unknown, images of that side are too small, or weights are missing,
            damaged, hostile or of another network.
    """
    if kind == "none":
        return None
    files_by_kind = {
        "vgg": {"features": VGG16}, "lpips": {"features": VGG16, "lin": LPIPS_HEADS}, "resnet50": {"": RESNET50},
    }  # fmt: skip
    if kind not in files_by_kind:
        raise ValueError(f"perceptual loss {kind!r} is none of none, {', '.join(files_by_kind)}")
    files, is_resnet = files_by_kind[kind], kind == "resnet50"
    hint = f", or do without ({'--perceptual none' if flag == '--perceptual_weights' else f'no {flag}'})"
    if side is not None and not is_resnet:
        _check_shape(3, side, side, hint)
    make: Callable[[], PerceptualLoss | LogitDistance] = (
        LogitDistance if is_resnet else partial(PerceptualLoss, kind, widths, gram=gram)
    )
    with torch.device("meta"):
        names = make().state_dict()
    names_by_published = {_published_name(name): name for name in names}
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
    # Numbers of batches, which change no result, are missing in older files.
    counters = {name: torch.tensor(0) for name in names if name.endswith("num_batches_tracked")}
    state = counters | {names_by_published[name]: tensor for name, tensor in state.items()}
    try:
        model = build_with_weights(make, state)
    except ValueError as error:
        raise ValueError(f"{flag}: the weights of {kind} are of another network: {error}") from None
    return model.to(device)


def load_lpips(
    weights: str | None, side: int, device: torch.device | str = "cpu", heartbeat: Callable[[], None] = lambda: None
) -> PerceptualLoss | LogitDistance | None:
    """The LPIPS that validations report, for images of this side in pixels, with the weights of --lpips_weights; None
    without that flag. Raises ValueError as `load_perceptual`."""
    return load_perceptual(
        "lpips" if weights else "none", weights, device, side=side, flag="--lpips_weights", heartbeat=heartbeat
    )


def _published_name(name: str) -> str:
    """The published name of a weight: heads.2.weight -> lin2.model.1.weight, network.fc.bias -> fc.bias; those of the
    VGG16 are the same."""
    part, index, *rest = name.removeprefix("network.").split(".")
    return f"lin{index}.model.1.{rest[0]}" if part == "heads" else name.removeprefix("network.")
