"""The log-mel filter bank of Kaldi with the settings of AST (Gong et al. 2021), computed on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention import at_least_fp32
from .log_mel import check_waveforms

SAMPLE_RATE = 16000
_FRAME, _HOP, _N_FFT = 400, 160, 512  # samples: 25 ms, 10 ms, and the next power of two
_LOWEST_HZ, _PREEMPHASIS = 20.0, 0.97
_FLOOR = 2.0**-23  # energies are raised to this, fp32's epsilon


class Fbank:
    """Waveforms (b, n) at 16 kHz to log-mel spectrograms as transformers' ASTFeatureExtractor makes them: frames inside
    the clip, each without its mean, with a pre-emphasis and a symmetric Hann window; natural logarithms of the energies
    in bands that are triangles on the mel scale; minus a mean and over twice a standard deviation.

    Computed in fp32 (in fp64 for fp64 waveforms), whatever the precision of the model around it. Not a module: see
    `log_mel.Spectrogram`, of which this has the interface.

    Args:
        config: That of a `PretrainedAudioTower`; "bands", "mean" and "std" (None: not normalised) are used.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.sample_rate, self.bands = SAMPLE_RATE, int(config["bands"])
        self.mean, self.std = config["mean"], config["std"]
        self._constants: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def frames(self, samples: int) -> int:
        """Number of frames of a clip with this number of samples; a clip shorter than a frame is padded to one."""
        return 1 + (max(samples, _FRAME) - _FRAME) // _HOP

    def __call__(self, waveforms: Tensor) -> Tensor:
        """Waveforms (b, n) in [-1, 1] -> (b, bands, frames), in fp32 or fp64.

        Raises:
            ValueError: waveforms that are not of two dimensions.
        """
        check_waveforms(waveforms)
        with torch.autocast(waveforms.device.type, enabled=False):
            waveforms = at_least_fp32(waveforms)
            waveforms = F.pad(waveforms, (0, max(0, _FRAME - waveforms.shape[1])))
            window, filters = self.prepare(waveforms.device, waveforms.dtype)
            frames = waveforms.unfold(1, _FRAME, _HOP)
            frames = frames - frames.mean(dim=-1, keepdim=True)
            before = F.pad(frames[..., :-1], (1, 0))  # what is before the first sample does not matter: its weight is 0
            spectrum = torch.fft.rfft((frames - _PREEMPHASIS * before) * window, _N_FFT)
            power = spectrum.real.square() + spectrum.imag.square()
            bands = (power @ filters.mT).clamp(min=_FLOOR).log().mT
            return bands if self.mean is None else (bands - self.mean) / (2 * self.std)

    def prepare(self, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """The window (400,) and the filters (bands, 257), made once for each device and dtype."""
        key = device, dtype
        if key not in self._constants:
            with torch.inference_mode(False):  # training, too, uses these cached tensors
                window = torch.hann_window(_FRAME, periodic=False, dtype=torch.float64, device="cpu")
                self._constants[key] = window.to(*key), kaldi_filters(self.bands).to(*key)
        return self._constants[key]


def kaldi_filters(bands: int) -> Tensor:
    """Triangles (bands, 257) over power spectra, of height 1 and evenly spaced from 20 Hz to 8 kHz on the mel scale of
    Kaldi, 1127 ln(1 + Hz / 700), on which their sides are straight; fp64 on the CPU."""

    def mel(hz: Tensor) -> Tensor:
        return 1127 * (1 + hz / 700).log()

    low, high = (1127 * math.log1p(hz / 700) for hz in (_LOWEST_HZ, SAMPLE_RATE / 2))
    edges = torch.linspace(low, high, bands + 2, dtype=torch.float64, device="cpu")[:, None]
    bins = mel(torch.arange(_N_FFT // 2 + 1, dtype=torch.float64, device="cpu") * (SAMPLE_RATE / _N_FFT))
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    return torch.minimum((bins - left) / (centre - left), (right - bins) / (right - centre)).clamp(min=0)
