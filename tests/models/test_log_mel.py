"""Spectrograms against librosa's, and masks that leave something to see."""

from __future__ import annotations

from typing import Any

import librosa
import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.config.models.mulan import MuLaNConfig
from tandem.models.audio_text.log_mel import Spectrogram, spec_augment

SETTINGS: list[dict[str, Any]] = [
    {},
    {"sample_rate": 16000, "n_fft": 400, "hop_length": 160, "n_mels": 40},
    {"sample_rate": 22050, "n_fft": 2048, "hop_length": 512, "n_mels": 128},
    {"sample_rate": 44100, "n_fft": 2048, "hop_length": 441, "n_mels": 96, "fmin": 30.0, "fmax": 16000.0},
    {"sample_rate": 48000, "n_fft": 1024, "hop_length": 480, "n_mels": 64, "fmin": 50.0, "fmax": 14000.0},
    {"sample_rate": 8000, "n_fft": 255, "hop_length": 101, "n_mels": 16, "fmin": 1200.0},
]


def spectrogram_of(**settings: Any) -> Spectrogram:
    """Whose clips may be as short as a frame."""
    return Spectrogram(MuLaNConfig(patch_size=1, **settings))


def music(sample_rate: int, seconds: float = 0.5) -> np.ndarray:
    """Two clips (2, n) in fp64: chords that start and end in silence, and noise that is 50 dB softer."""
    time = np.arange(int(sample_rate * seconds)) / sample_rate
    chord = np.sin(2 * np.pi * np.outer((220.0, 277.2, 1760.0), time)).sum(axis=0) / 4
    chord[: len(chord) // 4] = chord[-len(chord) // 4 :] = 0
    return np.stack([chord, np.random.default_rng(0).normal(size=len(time)) * 3e-3])


def librosa_decibels(waveforms: np.ndarray, settings: dict[str, Any]) -> np.ndarray:
    """librosa's melspectrogram and power_to_db with their defaults, clip by clip, in fp64."""
    sizes = {"sample_rate": 16000, "n_fft": 1024, "hop_length": 160, "n_mels": 64, **settings}
    sizes["sr"] = sizes.pop("sample_rate")
    powers = [librosa.feature.melspectrogram(y=clip, **sizes, dtype=np.float64) for clip in waveforms]
    return np.stack([librosa.power_to_db(power) for power in powers])


@pytest.mark.parametrize("settings", SETTINGS)
def test_log_mel_is_that_of_librosa(settings: dict[str, Any]) -> None:
    """In fp32, noise is within a ten thousandth of a decibel."""
    waveforms = music(settings.get("sample_rate", 16000))
    for clips, tolerance in ((waveforms, 1e-7), (waveforms[1:].astype(np.float32), 1e-4)):
        log_mel = spectrogram_of(**settings)(torch.from_numpy(clips))
        assert log_mel.numpy().dtype == clips.dtype
        decibels = (40 * log_mel - 20).numpy()  # back from the range in which a model sees them
        expected = librosa_decibels(clips.astype(np.float64), settings)
        np.testing.assert_allclose(decibels, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("samples", [0, 40, 65, 8000])
def test_a_window_shorter_than_a_frame_and_mirrored_ends_are_those_of_librosa(samples: int) -> None:
    """The spectrogram of the public model: n_fft 128, win_length 24, hop_length 12, power, reflect."""
    waveforms = np.random.default_rng(0).normal(size=(2, samples))
    ours = spectrogram_of(n_fft=128, hop_length=12, win_length=24, spectrogram="power", spectrogram_padding="reflect")
    padded = np.pad(waveforms, ((0, 0), (0, max(0, 65 - samples))))
    theirs = [
        librosa.stft(clip, n_fft=128, hop_length=12, win_length=24, pad_mode="reflect", dtype=np.complex128)
        for clip in padded
    ]
    power = ours(torch.from_numpy(waveforms))
    assert power.shape == (2, 65, ours.num_frames(samples))
    np.testing.assert_allclose(power.numpy(), np.abs(np.stack(theirs)) ** 2, atol=1e-10)


@pytest.mark.parametrize("kind", ["log_mel", "power"])
@pytest.mark.parametrize("samples", [0, 1, 159, 160, 511, 1023, 4000, 4800, 16000])
def test_silence_and_short_clips_give_numbers_in_as_many_frames_as_said(kind: str, samples: int) -> None:
    spectrogram = spectrogram_of(spectrogram=kind)
    out = spectrogram(torch.stack([torch.zeros(samples), torch.ones(samples)]))
    assert out.shape == (2, spectrogram.bands, 1 + samples // 160) and out.isfinite().all()
    assert spectrogram.num_frames(samples) == out.shape[2]
    if kind == "log_mel":
        assert (out[0] == -2.0).all()  # -100 dB


def test_what_inference_has_cached_serves_in_training() -> None:
    spectrogram, waveforms = spectrogram_of(), torch.rand(1, 1000, requires_grad=True)
    with torch.inference_mode():
        spectrogram(torch.rand(1, 1000))
    spectrogram(waveforms).sum().backward()
    assert waveforms.grad is not None and waveforms.grad.isfinite().all()


def masked(noise: Tensor, time: float, frequency: float) -> Tensor:
    """bool (b, 32 bands, 48 frames)"""
    return spec_augment(torch.ones(len(noise), 32, 48), noise, time, frequency) == 0


@pytest.mark.parametrize(("time", "frequency"), [(0.2, 0.25), (0.5, 0.5), (0.99, 0.99), (0.0, 0.999), (0.0, 0.0)])
def test_masks_cannot_erase_a_whole_input_in_thousands_of_draws(time: float, frequency: float) -> None:
    noise = torch.rand(5000, 4, generator=torch.Generator().manual_seed(0))
    extremes = torch.cartesian_prod(*[torch.tensor([0.0, 0.5, 1 - 2**-24, 1.0])] * 4)  # 1.0: rounded to fp16
    hidden = masked(torch.cat([noise, extremes]), time, frequency)
    most = 1 - (1 - time) * (1 - frequency)
    assert hidden.flatten(1).float().mean(dim=1).max() <= most + 1e-6
    assert not hidden.all(dim=2).all(dim=1).any(), "every frequency is gone"


def test_frames_and_bands_are_masked_by_numbers_of_their_own() -> None:
    noise = torch.rand(50, 4, generator=torch.Generator().manual_seed(1))
    others = torch.rand(50, 2, generator=torch.Generator().manual_seed(2))
    first, of_time, of_frequency = (
        masked(draws, 0.25, 0.25)
        for draws in (noise, torch.cat([others, noise[:, 2:]], 1), torch.cat([noise[:, :2], others], 1))
    )
    assert torch.equal(of_time.all(dim=2), first.all(dim=2)) and not torch.equal(of_time, first)
    assert torch.equal(of_frequency.all(dim=1), first.all(dim=1)) and not torch.equal(of_frequency, first)
