"""Quality of reconstructed images, and use of the codes, on a validation split."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .averages import AllReduce, Averages, code_statistics, count_codes, no_reduce
from .fid import ReconstructionFID


def psnr(images: Tensor, reconstructions: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB of each image: (b, c, h, w) twice -> float32 (b,).

    -10 log10(mean squared error) for a peak of 1. Values are clamped to [0, 1]; at most 100 dB, for equal images.
    """
    difference = images.float().clamp(0, 1) - reconstructions.float().clamp(0, 1)
    return -10 * difference.square().flatten(1).mean(1).clamp_min(1e-10).log10()


def ssim(images: Tensor, reconstructions: Tensor) -> Tensor:
    """Structural similarity of each image: (b, c, h, w) twice, clamped to [0, 1] -> float32 (b,) in [-1, 1].

    Wang et al. 2004: Gaussian window of 11 x 11 with sigma 1.5, K1 = 0.01, K2 = 0.03, population moments, mean over
    channels and over the places where the window fits. The window shrinks to fit images of less than 11 pixels.
    """
    # float64: a variance is a small difference of squares, for which TF32 and autocast are too coarse.
    x, y = images.double().clamp(0, 1), reconstructions.double().clamp(0, 1)
    stacked = torch.stack([x, y, x * x, y * y, x * y])
    mean_x, mean_y, square_x, square_y, product = _gaussian_mean(stacked)
    variance_x, variance_y = square_x - mean_x.square(), square_y - mean_y.square()
    covariance = product - mean_x * mean_y
    c1, c2 = 0.01**2, 0.03**2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x.square() + mean_y.square() + c1)
    structure = (2 * covariance + c2) / (variance_x + variance_y + c2)
    return (luminance * structure).flatten(1).mean(1).float()


def _gaussian_mean(images: Tensor) -> Tensor:
    """(..., h, w) -> (..., h', w'): local means under a Gaussian of sigma 1.5, first down, then across."""
    *batch, height, width = images.shape
    means = images.reshape(-1, 1, height, width)
    for axis, side in ((2, height), (3, width)):
        taps = min(11, side - (side + 1) % 2)
        offsets = torch.arange(taps, dtype=images.dtype, device=images.device) - taps // 2
        window = torch.exp(-offsets.square() / (2 * 1.5**2))
        shape = [1, 1, 1, 1]
        shape[axis] = taps
        means = functional.conv2d(means, (window / window.sum()).reshape(shape))
    return means.reshape(*batch, *means.shape[-2:])


class ReconstructionQuality:
    """PSNR, SSIM and use of the codes, and LPIPS and rFID if their networks are given; over all processes.

    Args:
        num_codes: Size of the codebook.
        losses: Names of further values to average.
        lpips: Reconstructions and images (b, c, h, w) in [0, 1] -> their mean distance, 0-d.
        inception: Images (b, 3, h, w) in [0, 1] -> feature vectors (b, 2048), for rFID.
    """

    def __init__(
        self,
        num_codes: int,
        device: torch.device | str = "cpu",
        losses: Sequence[str] = ("loss",),
        lpips: Callable[[Tensor, Tensor], Tensor] | None = None,
        inception: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._lpips = lpips
        names = [*losses, "psnr", "ssim", *(["lpips"] if lpips else [])]
        self._averages = Averages(*names, device=device)
        self._counts = torch.zeros(num_codes, dtype=torch.int64, device=device)
        self._fid = ReconstructionFID(inception, device=device) if inception else None

    def add(self, images: Tensor, reconstructions: Tensor, codes: Tensor, **losses: Tensor) -> None:
        """Add images and reconstructions (b, c, h, w) in [0, 1], codes of any shape, and losses (), means over b."""
        if self._lpips:
            losses["lpips"] = self._lpips(reconstructions.clamp(0, 1), images)
        if self._fid:
            self._fid.add(images, reconstructions)
        per_image = {name: loss.expand(len(images)) for name, loss in losses.items()}
        self._averages.add(psnr=psnr(images, reconstructions), ssim=ssim(images, reconstructions), **per_image)
        count_codes(self._counts, codes)

    def result(self, all_reduce: AllReduce = no_reduce) -> tuple[dict[str, float], Tensor]:
        """Values by name, and how often each code was chosen (num_codes,). Collective."""
        counts = all_reduce(self._counts.clone()).cpu()
        values = {**self._averages.result(all_reduce), **code_statistics(counts)}
        if self._fid:
            values["rfid"] = self._fid.result(all_reduce)
        return values, counts
