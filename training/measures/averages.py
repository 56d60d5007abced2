"""Metrics as sums and counts, so that they pool exactly over batches and processes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

AllReduce = Callable[[Tensor], Tensor]


def no_reduce(tensor: Tensor) -> Tensor:
    """The sum over one process."""
    return tensor


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
    # float64, because a variance is a small difference of squares, which TF32 and autocast would spoil.
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


class Averages:
    """Means of named values over all items of all processes.

    Args:
        names: What is averaged. Every process names the same, whether or not it gets to add anything.
        device: Where the sums live, in float64; nothing waits for the device before `result`.
    """

    def __init__(self, *names: str, device: torch.device | str = "cpu") -> None:
        self._rows = {name: row for row, name in enumerate(names)}
        self._sums_and_counts = torch.zeros(len(names), 2, dtype=torch.float64, device=device)

    def add(self, **values: Tensor) -> None:
        """Take in one value per item: tensors (n,), or () for one item."""
        for name, value in values.items():
            row = self._sums_and_counts[self._rows[name]]
            row[0] += value.detach().sum(dtype=torch.float64)
            row[1] += value.numel()

    def result(self, all_reduce: AllReduce = no_reduce) -> dict[str, float]:
        """Means by name, over everything added on any process; NaN where nothing was. Collective: one sum."""
        sums, counts = all_reduce(self._sums_and_counts.clone()).cpu().unbind(1)
        return dict(zip(self._rows, (sums / counts).tolist(), strict=True))


class CodeUsage:
    """How often each code of a codebook is chosen.

    Args:
        num_codes: Size of the codebook.
        device: Where the counts live.
    """

    def __init__(self, num_codes: int, device: torch.device | str = "cpu") -> None:
        self._counts = torch.zeros(num_codes, dtype=torch.int64, device=device)

    def add(self, codes: Tensor) -> None:
        """Count int64 codes of any shape, in [0, num_codes)."""
        flat = codes.flatten()
        self._counts.index_add_(0, flat, torch.ones_like(flat))  # bincount would wait for the device

    def counts(self, all_reduce: AllReduce = no_reduce) -> Tensor:
        """Counts int64 (num_codes,) on the CPU, over all processes. Collective: one sum."""
        return all_reduce(self._counts.clone()).cpu()


def code_statistics(counts: Tensor) -> dict[str, float]:
    """Of counts (num_codes,): `codes_used`, `codes_used_fraction`, and `perplexity`, the exponential of the entropy
    in nats of the distribution of codes: from 1 (one code) to num_codes (all equally often)."""
    probabilities = counts.double() / counts.sum().clamp_min(1)
    entropy = -torch.special.xlogy(probabilities, probabilities).sum()
    used = int((counts > 0).sum())
    return {"codes_used": used, "codes_used_fraction": used / len(counts), "perplexity": entropy.exp().item()}


def usage_of_codes(codes: Sequence[Tensor], num_codes: int, all_reduce: AllReduce = no_reduce) -> dict[str, float]:
    """`code_statistics` of the codes of some micro-batches, over all processes. Collective: one sum."""
    usage = CodeUsage(num_codes, codes[0].device)
    usage.add(torch.cat(list(codes)))
    return code_statistics(usage.counts(all_reduce))
