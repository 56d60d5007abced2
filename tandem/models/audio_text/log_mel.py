"""Waveforms to spectrograms, and random masks that hide parts of them during training."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.config.models.mulan import MuLaNConfig
from tandem.models.layers.attention import at_least_fp32

# Decibels are relative to a power of 1, and clamped at 80 below the loudest of the clip.
_AMIN, _TOP_DB = 1e-10, 80.0

# The range is mapped to [-1, 1]. Bands of loud music are between about -60 and 30 dB; silence is at -100 dB.
_CENTRE_DB, _HALF_RANGE_DB = -20.0, 40.0

MASK_NOISE = 4  # uniform numbers that the masks of one spectrogram need
_MAX_FFT = 1 << 16


def check_waveforms(waveforms: Tensor) -> None:
    """Raise ValueError, in one line, unless they are floats (b, n)."""
    if waveforms.ndim != 2 or not waveforms.is_floating_point():
        actual = f"waveforms of shape {tuple(waveforms.shape)} and {waveforms.dtype}"
        raise ValueError(f"{actual}: give (b, n) floats, mixed to mono")


class Spectrogram:
    """Waveforms (b, n) to log-mel spectrograms or to power spectra.

    Frames are centred on multiples of the hop, and the window is a periodic Hann.
    Always computed in fp32 (in fp64 for fp64 waveforms), whatever the precision of the model around it. This class is
    not a module and has no buffers, because some backends cast buffers.

    The spectrogram "log_mel" has bands on the mel scale in dB, mapped so that loud music lies about in [-1, 1] and
    silence at -2; "power" has the n_fft / 2 + 1 squared magnitudes. A window of win_length samples lies in the middle
    of a frame of n_fft samples, and is 0 around it. Clips shorter than a patch are padded with silence.

    Raises:
        ValueError: one line that names the field of the configuration.
    """

    def __init__(self, config: MuLaNConfig) -> None:
        sample_rate, n_fft, hop_length, n_mels = config.sample_rate, config.n_fft, config.hop_length, config.n_mels
        win_length = config.win_length or n_fft
        if not 2 <= n_fft <= _MAX_FFT:
            raise ValueError(f"n_fft {n_fft} is not between 2 and {_MAX_FFT} samples")
        if not 1 <= win_length <= n_fft:
            raise ValueError(f"win_length {win_length} is not between 1 and n_fft {n_fft}")
        if not 1 <= hop_length <= win_length:
            problem = f"hop_length {hop_length} is not between 1 and win_length {win_length}"
            raise ValueError(f"{problem}: it would skip samples")
        fmin, fmax = config.fmin, sample_rate / 2 if config.fmax is None else config.fmax
        if not 0 <= fmin < fmax <= sample_rate / 2:
            rule = f"they must be in order, and at most half of sample_rate {sample_rate}"
            raise ValueError(f"fmin {fmin} and fmax {fmax} Hz: {rule}")
        self.kind, self.padding = config.spectrogram, config.spectrogram_padding
        if self.kind == "log_mel" and not 1 <= n_mels <= n_fft // 2 + 1:
            raise ValueError(f"n_mels {n_mels} is not between 1 and the {n_fft // 2 + 1} frequencies of n_fft {n_fft}")
        self.sample_rate, self.n_fft, self.hop_length, self.win_length = sample_rate, n_fft, hop_length, win_length
        self.fmin, self.fmax = float(fmin), float(fmax)
        self.min_samples = (config.patch_size - 1) * hop_length + n_fft % 2
        if self.padding == "reflect":
            self.min_samples = max(self.min_samples, n_fft // 2 + 1)  # the mirrored part is shorter than the clip
        self.bands = n_mels if self.kind == "log_mel" else n_fft // 2 + 1
        if self.kind == "log_mel":
            _check_bands(sample_rate, n_fft, mel_edges(n_mels, self.fmin, self.fmax))
        self._constants: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def num_frames(self, samples: int) -> int:
        """Number of frames of a clip with this number of samples."""
        padded = max(samples, self.min_samples) + 2 * (self.n_fft // 2)
        return 1 + (padded - self.n_fft) // self.hop_length

    def __call__(self, waveforms: Tensor) -> Tensor:
        """Waveforms (b, n) in [-1, 1] -> (b, bands, frames), in fp32 or fp64.

        Raises:
            ValueError: waveforms that are not of two dimensions.
        """
        check_waveforms(waveforms)
        with torch.autocast(waveforms.device.type, enabled=False):
            half, num_missing = self.n_fft // 2, max(0, self.min_samples - waveforms.shape[1])
            waveforms = F.pad(at_least_fp32(waveforms), (0, num_missing))
            waveforms = F.pad(waveforms, (half, half), "reflect" if self.padding == "reflect" else "constant")
            window, filters = self.prepare(waveforms.device, waveforms.dtype)
            spectrum = torch.stft(
                waveforms, self.n_fft, self.hop_length, self.win_length, window, center=False, return_complex=True
            )
            power = spectrum.real.square() + spectrum.imag.square()
            return power if self.kind == "power" else (_to_decibels(filters @ power) - _CENTRE_DB) / _HALF_RANGE_DB

    def prepare(self, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """The window (win_length,) and the filters (bands, n_fft / 2 + 1), made once for each device and dtype."""
        key = device, dtype
        if key not in self._constants:
            with torch.inference_mode(False):  # training, too, uses these cached tensors
                window = torch.hann_window(self.win_length, periodic=True, dtype=torch.float64, device="cpu")
                filters = torch.zeros(0, dtype=torch.float64, device="cpu")
                if self.kind == "log_mel":
                    filters = mel_filters(self.sample_rate, self.n_fft, self.bands, self.fmin, self.fmax)
                self._constants[key] = window.to(*key), filters.to(*key)
        return self._constants[key]


def _to_decibels(power: Tensor) -> Tensor:
    """10 log10 of powers (b, ...), raised to no less than 80 dB below the largest value of each clip."""
    decibels = 10 * power.clamp(min=_AMIN).log10()
    loudest = decibels.flatten(1).amax(dim=1)
    return decibels.maximum((loudest - _TOP_DB)[:, None, None])


def mel_edges(n_mels: int, fmin: float, fmax: float) -> list[float]:
    """The n_mels + 2 edges of the triangular filters in Hz: filter i goes from edge i through i + 1 to i + 2.

    The edges are evenly spaced on the mel scale of Slaney's Auditory Toolbox (1998): 3/200 mel per Hz up to 1 kHz and
    27 mel for each factor of 6.4 above.
    """

    def mel(hz: float) -> float:
        return 3 * hz / 200 if hz < 1000 else 15 + 27 * math.log(hz / 1000, 6.4)

    def hertz(mels: float) -> float:
        return mels * 200 / 3 if mels < 15 else 1000 * 6.4 ** ((mels - 15) / 27)

    low, step = mel(fmin), (mel(fmax) - mel(fmin)) / (n_mels + 1)
    return [hertz(low + band * step) for band in range(n_mels + 2)]


def mel_filters(sample_rate: int, n_fft: int, n_mels: int, fmin: float, fmax: float) -> Tensor:
    """Triangular filters (n_mels, n_fft / 2 + 1) over power spectra, each of area 1 in Hz; fp64 on the CPU."""
    edges = torch.tensor(mel_edges(n_mels, fmin, fmax), dtype=torch.float64, device="cpu")[:, None]
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    bins = torch.arange(n_fft // 2 + 1, dtype=torch.float64, device="cpu") * (sample_rate / n_fft)
    triangles = torch.minimum((bins - low) / (centre - low), (high - bins) / (high - centre)).clamp(min=0)
    return triangles * 2 / (high - low)


def _check_bands(sample_rate: int, n_fft: int, edges: list[float]) -> None:
    spacing = sample_rate / n_fft
    for band, (low, high) in enumerate(zip(edges[:-2], edges[2:], strict=True)):
        if not (math.floor(low / spacing) + 1) * spacing < high:
            hint = f"frequency of n_fft {n_fft} (every {spacing:.0f} Hz); use fewer bands or a larger n_fft"
            raise ValueError(f"n_mels {len(edges) - 2}: band {band} ({low:.0f} to {high:.0f} Hz) has no {hint}")


def spec_augment(spectrograms: Tensor, noise: Tensor, time_fraction: float, frequency_fraction: float) -> Tensor:
    """Zero one range of frames and one of bands in each spectrogram (Park et al. 2019, "SpecAugment").

    A range has up to floor(fraction x size) frames or bands; all lengths and all places are equally likely. Fractions
    are below 1, so that at least one frame and one band remain.

    Args:
        spectrograms: (b, bands, frames).
        noise: (b, 4) uniform in [0, 1): length and place in time, length and place in frequency.
    """
    _, bands, frames = spectrograms.shape
    time_mask = _random_mask(noise[:, 0], noise[:, 1], frames, time_fraction)
    frequency_mask = _random_mask(noise[:, 2], noise[:, 3], bands, frequency_fraction)
    return spectrograms.masked_fill(time_mask[:, None, :] | frequency_mask[:, :, None], 0.0)


def _random_mask(length_noise: Tensor, place_noise: Tensor, size: int, fraction: float) -> Tensor:
    """Uniform noise (b,) for length and place -> bool (b, size), true in one range of each row."""
    longest = min(int(fraction * size), size - 1)
    # Clamp, because noise just below 1 becomes 1 when it is rounded to half precision.
    length = (length_noise.float() * (longest + 1)).floor().clamp(0, longest)
    last_start = size - length
    start = (place_noise.float() * (last_start + 1)).floor().clamp(min=0).minimum(last_start)
    position = torch.arange(size, device=length.device)
    return (position >= start[:, None]) & (position < (start + length)[:, None])
