"""Perceptual distances: images compared by the activations of a VGG16 that was trained on ImageNet.

The weights of the VGG16 are never trained and never saved with a model. They come from files on this machine; nothing
is downloaded. The heads of LPIPS, 7 kB, are also in the packages lpips and torchmetrics, where they are found.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from .files.building import build_with_weights
from .files.published import read_state_dict, where_from

# Simonyan & Zisserman 2015, configuration D: channels of the five blocks, and convolutions in each.
WIDTHS = (64, 128, 256, 512, 512)
_DEPTHS = (2, 2, 3, 3, 3)

# For images in [0, 1]. LPIPS gives equivalent constants for images in [-1, 1].
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# Names of the published files: the trunk, by torchvision, and the heads of LPIPS 0.1, of which there are two names.
_TRUNK_FILE = "vgg16-397923af.pth"
_HEADS_FILES = ("vgg_lpips.pth", "vgg.pth")
# Packages whose wheels hold the heads, and where.
_HEADS_IN_PACKAGES = {"lpips": "weights/v0.1/vgg.pth", "torchmetrics": "functional/image/lpips_models/vgg.pth"}
_FROM_PACKAGE = "they come with pip install lpips, or torchmetrics"


class PerceptualLoss(nn.Module):
    """Distance of images in the activations of VGG16; under autocast these are computed in its precision, and compared
    and summed in fp32.

    "vgg": mean squared difference of the last convolution's output after its ReLU (Ledig et al. 2017, section 2.2.1).
    "lpips": LPIPS 0.1 (Zhang et al. 2018): squared differences of the unit-length activations of all five blocks,
    weighted by learned heads, averaged over places and summed over blocks.

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
            wanted = self._activations(images)
        found = self._activations(reconstructions)
        with torch.autocast(images.device.type, enabled=False):
            if not self.heads:
                return (found[-1] - wanted[-1]).square().flatten(1).mean(1)
            blocks = zip(self.heads, found, wanted, strict=True)
            per_block = [head((_unit(x) - _unit(y)).square()).flatten(1).mean(1) for head, x, y in blocks]
            return torch.stack(per_block).sum(0)

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


def _check_shape(channels: int, height: int, width: int, or_else: str = "") -> None:
    if channels not in (1, 3) or min(height, width) < 2 ** (len(_DEPTHS) - 1):
        takes = "VGG16 compares images of 1 or 3 channels and at least 16 x 16 pixels"
        raise ValueError(f"{takes}, not {channels} of {height} x {width}; use larger images{or_else}")


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
    """(b, c, h, w), scaled to length 1 over c; 0 where all channels are 0."""
    return x / (torch.linalg.vector_norm(x, dim=1, keepdim=True) + 1e-10)


def load_perceptual(
    kind: str, weights: str | Path | None = None, device: torch.device | str = "cpu", *,
    side: int | None = None, widths: Sequence[int] = WIDTHS, flag: str = "--perceptual_weights",
) -> PerceptualLoss | None:  # fmt: skip
    """The perceptual loss with weights from this machine's disk.

    Args:
        kind: "vgg", "lpips", or "none".
        weights: A file (.pth as published, or .safetensors) or a folder of them under their published names. Missing
            weights are searched in torch.hub's cache. "lpips" needs two files, or one with the weights of both.
        side: Side of the images in pixels, to check that it is large enough; None if it is not known yet.
        widths: Channels of the five blocks; see `PerceptualLoss`.
        flag: What the user names the weights with, for messages.

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
    or_else = f", or do without ({'--perceptual none' if flag == '--perceptual_weights' else f'no {flag}'})"
    if side is not None:
        _check_shape(3, side, side, or_else)
    with torch.device("meta"):
        ours = {_published_name(name): name for name in PerceptualLoss(kind, widths).state_dict()}
    found: dict[str, Tensor] = {}
    searched = _candidates(kind, weights, flag)
    for path in searched:
        if path.exists() and (missing := ours.keys() - found.keys()):
            found |= read_state_dict(path, missing)
    if missing := ours.keys() - found.keys():
        raise ValueError(f"{_absence(kind, missing, searched)}; put the file there or name it ({flag}){or_else}")
    found = {ours[name]: tensor for name, tensor in found.items()}
    try:
        with torch.random.fork_rng(devices=[]):  # random initial weights are drawn, then replaced
            model = build_with_weights(lambda: PerceptualLoss(kind, widths), found)
    except ValueError as error:
        raise ValueError(f"{flag}: the weights of {kind} are of another network: {error}") from None
    return model.to(device)


def load_lpips(weights: str | None, side: int, device: torch.device | str = "cpu") -> PerceptualLoss | None:
    """The LPIPS that a validation reports of images with this side in pixels, with the weights of --lpips_weights; None
    without any. Raises ValueError as `load_perceptual`."""
    return load_perceptual("lpips" if weights else "none", weights, device, side=side, flag="--lpips_weights")


def _published_name(name: str) -> str:
    """heads.2.weight -> lin2.model.1.weight, LPIPS's name of it; a name of the trunk, which is torchvision's, stays."""
    part, index, kind = name.split(".")
    return f"lin{index}.model.1.{kind}" if part == "heads" else name


def _candidates(kind: str, weights: str | Path | None, flag: str) -> list[Path]:
    """Paths that may hold the weights, in the order of search. Raises ValueError if ``weights`` does not exist."""
    names = [_TRUNK_FILE, *(_HEADS_FILES if kind == "lpips" else ())]
    in_cache = [Path(torch.hub.get_dir()) / "checkpoints" / name for name in names]
    in_cache += _heads_in_packages() if kind == "lpips" else []
    if weights is None:
        return in_cache
    named = Path(weights)
    if not named.exists():
        raise ValueError(f"{flag}: there is no {named} to take the weights of {kind} from; {_sources(kind)}")
    return [*([named / name for name in names] if named.is_dir() else [named]), *in_cache]


def _heads_in_packages() -> list[Path]:
    """Files of LPIPS's heads in installed packages, which are not imported."""
    found = []
    for package, inside in _HEADS_IN_PACKAGES.items():
        spec = importlib.util.find_spec(package)
        folders = spec.submodule_search_locations if spec else None
        found += [Path(folder) / inside for folder in folders or ()]
    return [path for path in found if path.is_file()]


def _absence(kind: str, missing: set[str], searched: Sequence[Path]) -> str:
    heads_only = all(name.startswith("lin") for name in missing)
    what = f"the heads of LPIPS 0.1 ({' or '.join(_HEADS_FILES)})" if heads_only else f"VGG16's ({_TRUNK_FILE})"
    places = ", ".join(dict.fromkeys(str(path if path.is_file() else path.parent) for path in searched))
    needs = f"the perceptual loss {kind} needs weights that are in none of {places}: {what}, such as {min(missing)}"
    return f"{needs}; {_FROM_PACKAGE if heads_only else _sources(kind)}"


def _sources(kind: str) -> str:
    """Where the weights of a distance are published, as a clause."""
    of_vgg = f"VGG16's file: {where_from('vgg16')}"
    return of_vgg if kind == "vgg" else f"{of_vgg}; the heads of LPIPS: {_FROM_PACKAGE}"
