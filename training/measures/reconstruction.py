"""What every tokenizer of images is measured by on a validation split."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .averages import AllReduce, Averages, CodeUsage, code_statistics, no_reduce, psnr, ssim
from .fid import ReconstructionFID


class ReconstructionQuality:
    """Means over all images of all processes: PSNR, SSIM, use of the codes, and what networks say where there are any.

    Args:
        num_codes: Size of the codebook.
        device: Where the sums live.
        losses: Names of further values to average.
        lpips: Reconstructions and images (b, c, h, w) in [0, 1] -> their mean distance, 0-d.
        inception: Images (b, 3, h, w) in [0, 1] -> vectors (b, 2048): reports the rFID.
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
        self._usage = CodeUsage(num_codes, device=device)
        self._fid = ReconstructionFID(inception, device=device) if inception else None

    def add(self, images: Tensor, reconstructions: Tensor, codes: Tensor, **losses: Tensor) -> None:
        """Images and their reconstructions (b, c, h, w) in [0, 1], their codes, and losses () that are means over b."""
        if self._lpips:
            losses["lpips"] = self._lpips(reconstructions.clamp(0, 1), images)
        if self._fid:
            self._fid.add(images, reconstructions)
        per_image = {name: loss.expand(len(images)) for name, loss in losses.items()}
        self._averages.add(psnr=psnr(images, reconstructions), ssim=ssim(images, reconstructions), **per_image)
        self._usage.add(codes)

    def result(self, all_reduce: AllReduce = no_reduce) -> tuple[dict[str, float], Tensor]:
        """Values by name, and how often each code was chosen (num_codes,). Collective."""
        counts = self._usage.counts(all_reduce)
        values = {**self._averages.result(all_reduce), **code_statistics(counts)}
        if self._fid:
            values["rfid"] = self._fid.result(all_reduce)
        return values, counts
