"""Quality of reconstructed videos, and use of the codes, on a validation split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .averages import AllReduce, Averages, identity
from .fid import ReconstructionFID
from .reconstruction import ReconstructionQuality, psnr


def dpsnr(videos: Tensor, reconstructions: Tensor) -> Tensor:
    """PSNR in dB of each clip's motion, the differences of neighbouring frames: (b, c, f, h, w) twice, f >= 2 ->
    float32 (b,).

    -10 log10(mean squared error of the differences), after clamping values to [0, 1]; at most 100 dB. Unlike FVD it
    depends on motion alone: an error that is the same in every frame does not count.
    """
    motion_error = _error(videos, reconstructions).diff(dim=2)
    return -10 * motion_error.square().flatten(1).mean(1).clamp_min(1e-10).log10()


def flicker(videos: Tensor, reconstructions: Tensor) -> Tensor:
    """How much the error changes from frame to frame: (b, c, f, h, w) twice, f >= 2 -> float32 (b,) in [0, 2].

    E |e_{t+1} - e_t|^2 / (E |e_t|^2 + E |e_{t+1}|^2) with the error e of values clamped to [0, 1]: 0 if the error
    stands still, 1 if it is independent from frame to frame, 2 if it only changes its sign. 0 where there is no error.
    """
    error = _error(videos, reconstructions)
    change, squares = error.diff(dim=2).square().flatten(1).mean(1), error.square()
    energy = (squares[:, :, 1:] + squares[:, :, :-1]).flatten(1).mean(1)
    return change / energy.clamp_min(torch.finfo(torch.float32).tiny)


def _error(videos: Tensor, reconstructions: Tensor) -> Tensor:
    return reconstructions.float().clamp(0, 1) - videos.float().clamp(0, 1)


class VideoQuality:
    """Measures of reconstructed videos and use of the codes, over all processes.

    - the metrics of `ReconstructionQuality`, means over single frames. (The PSNR of a whole clip, from the mean squared
      error over its frames, is lower.)
    - `psnr_first`, `psnr_rest`: PSNR of first frames and of all others.
    - `dpsnr`, `flicker`: means over the clips; see the functions of these names.
    - `rfvd`: Fréchet distance of I3D's logits (Unterthiner et al. 2018).

    Args:
        num_codes: Size of the codebook.
        num_frames: Frames of a clip; with 1, there is no `psnr_first`, `psnr_rest`, `dpsnr` and `flicker`.
        losses: Names of further values to average.
        lpips: As for `ReconstructionQuality`.
        i3d: Videos (b, 3, f, h, w) in [0, 1] -> feature vectors (b, 400), for rFVD.
    """

    def __init__(
        self,
        num_codes: int,
        num_frames: int,
        device: torch.device | str = "cpu",
        losses: Sequence[str] = ("loss",),
        lpips: Callable[[Tensor, Tensor], Mapping[str, Tensor]] | None = None,
        i3d: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._frames = ReconstructionQuality(num_codes, device, losses, lpips)
        motion_names = ("psnr_first", "psnr_rest", "dpsnr", "flicker")
        self._motion = Averages(*motion_names, device=device) if num_frames > 1 else None
        self._fvd = ReconstructionFID(i3d, dim=400, device=device) if i3d else None

    def add(self, videos: Tensor, reconstructions: Tensor, codes: Tensor, **losses: Tensor) -> None:
        """Add videos and reconstructions (b, c, f, h, w) in [0, 1], codes of any shape, and losses (), means over b."""
        frames = list(zip(videos.unbind(2), reconstructions.unbind(2), strict=True))
        # One frame at a time, because LPIPS needs much memory; the clip's codes are counted once, with the first.
        for number, (x, y) in enumerate(frames):
            self._frames.add(x, y, codes if number == 0 else codes[:0], **losses)
        if self._motion and len(frames) > 1:
            frame_psnr = torch.stack([psnr(x, y) for x, y in frames])
            self._motion.add(
                psnr_first=frame_psnr[0], psnr_rest=frame_psnr[1:], dpsnr=dpsnr(videos, reconstructions),
                flicker=flicker(videos, reconstructions),
            )  # fmt: skip
        if self._fvd:
            self._fvd.add(videos, reconstructions)

    def result(self, all_reduce: AllReduce = identity) -> tuple[dict[str, float], Tensor]:
        """Values by name, and how often each code was chosen (num_codes,). Collective."""
        values, counts = self._frames.result(all_reduce)
        if self._motion:
            values |= self._motion.result(all_reduce)
        if self._fvd:
            values["rfvd"] = self._fvd.result(all_reduce)
        return values, counts
