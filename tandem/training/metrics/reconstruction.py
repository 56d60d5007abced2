"""Quality of reconstructed images, and use of the codes, on a validation split.

PSNR and SSIM are not those of torchmetrics, because every run reports them: importing torchmetrics takes 3.1 s of
processor time and 263 MiB of each process beside PyTorch, and it reduces through torch.distributed, which Horovod does
not use.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tandem.devices import double, fp64_device

from .averages import AllReduce, Averages, add_codes, code_statistics, identity
from .fid import ReconstructionFID

_CELLS, _MAX_CHANNELS = 4, 16  # of `ReconstructedVariance`: cells in each direction, and most channels
_ROUNDING_VARIANCE = 1e-12  # images with a smaller variance differ by rounding alone


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
    x, y = double(images).clamp(0, 1), double(reconstructions).clamp(0, 1)
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
        taps = min(11, side - (side + 1) % 2)  # odd, so that the window has a centre
        offsets = torch.arange(taps, dtype=images.dtype, device=images.device) - taps // 2
        window = torch.exp(-offsets.square() / (2 * 1.5**2))
        shape = [1, 1, 1, 1]
        shape[axis] = taps
        means = functional.conv2d(means, (window / window.sum()).reshape(shape))
    return means.reshape(*batch, *means.shape[-2:])


class ReconstructedVariance:
    """How much of the variance of images their reconstructions have; over all processes.

    - `variance_kept`: variance of the reconstructions / variance of the images. 0: all reconstructions are equal.
    - `explained_variance`: 1 - mean squared error / variance of the images. 1: reconstructions are perfect. 0: they are
      no better than the mean of all images, the best that equal reconstructions can be.

    Images are compared by the means of their 4 x 4 cells, which a model learns first: fine noise does not count. Both
    are NaN if all images are equal.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        # Number of images; squares of images, reconstructions and errors; then sums of images and of reconstructions.
        self._sums = torch.zeros(4 + 2 * _MAX_CHANNELS * _CELLS**2, dtype=torch.float64, device=fp64_device(device))

    def add(self, images: Tensor, reconstructions: Tensor) -> None:
        """Add images and reconstructions (b, c, h, w) in [0, 1], c <= 16."""
        x, y = (self._cell_means(batch) for batch in (images, reconstructions))
        squares = [z.square().sum() for z in (x, y, x - y)]
        self._sums += torch.cat([torch.stack([squares[0].new_full((), len(x)), *squares]), x.sum(0), y.sum(0)])

    def result(self, all_reduce: AllReduce = identity) -> dict[str, float]:
        """Values by name. Collective: one all-reduce."""
        totals = all_reduce(self._sums.clone()).cpu()
        means = totals[1:] / totals[0]
        error, squared_means = means[2], means[3:].view(2, -1).square().sum(1)
        variance, reconstructed_variance = (means[:2] - squared_means).clamp_min(0)
        variance = torch.where(variance > _ROUNDING_VARIANCE, variance, math.nan)
        variance_kept, explained = reconstructed_variance / variance, 1 - error / variance
        return {"variance_kept": variance_kept.item(), "explained_variance": explained.item()}

    @staticmethod
    def _cell_means(images: Tensor) -> Tensor:
        """(b, c, h, w) -> the means of the cells, float64 (b, 256): zeros for missing channels."""
        means = functional.adaptive_avg_pool2d(double(images).clamp(0, 1), _CELLS).flatten(1)
        return functional.pad(means, (0, _MAX_CHANNELS * _CELLS**2 - means.shape[1]))


class ReconstructionQuality:
    """PSNR, SSIM, reconstructed variance and use of the codes, and LPIPS and rFID if their networks are given; over all
    processes.

    Args:
        num_codes: Size of the codebook; 0 without one.
        losses: Names of further values to average.
        lpips: A `PerceptualLoss`, of which "perceptual_loss" is taken.
        inception: Images (b, 3, h, w) in [0, 1] -> feature vectors (b, 2048), for rFID.
    """

    def __init__(
        self,
        num_codes: int,
        device: torch.device | str = "cpu",
        losses: Sequence[str] = ("loss",),
        lpips: Callable[[Tensor, Tensor], Mapping[str, Tensor]] | None = None,
        inception: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._lpips = lpips
        names = [*losses, "psnr", "ssim", *(["lpips"] if lpips else [])]
        self._averages = Averages(*names, device=device)
        self._variance = ReconstructedVariance(device)
        self._counts = torch.zeros(num_codes, dtype=torch.int64, device=device)
        self._fid = ReconstructionFID(inception, device=device) if inception else None

    def add(self, images: Tensor, reconstructions: Tensor, codes: Tensor, **losses: Tensor) -> None:
        """Add images and reconstructions (b, c, h, w) in [0, 1], codes of any shape, and losses, 0-d,
        each a mean over b."""
        if self._lpips:
            losses["lpips"] = self._lpips(reconstructions.clamp(0, 1), images)["perceptual_loss"]
        if self._fid:
            self._fid.add(images, reconstructions)
        per_image = {name: loss.expand(len(images)) for name, loss in losses.items()}
        self._averages.add(psnr=psnr(images, reconstructions), ssim=ssim(images, reconstructions), **per_image)
        self._variance.add(images, reconstructions)
        add_codes(self._counts, codes)

    def result(self, all_reduce: AllReduce = identity) -> tuple[dict[str, float], Tensor]:
        """Values by name, and how often each code was chosen (num_codes,). Collective."""
        counts = all_reduce(self._counts.clone()).cpu()
        values = {**self._averages.result(all_reduce), **self._variance.result(all_reduce), **code_statistics(counts)}
        if self._fid:
            values["rfid"] = self._fid.result(all_reduce)
        return values, counts
