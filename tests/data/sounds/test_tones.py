"""demo:tones: the sounds are what their captions say, everywhere the same."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from data import open_sounds
from data.sounds.tones import ENVELOPES, HERTZ, PITCHES, TEMPOS, WAVEFORMS

RATE = 16000
# Second and third harmonic over the first, from their Fourier series.
HARMONICS = {"sine": (0, 0), "triangle": (0, 1 / 9), "square": (0, 1 / 3), "sawtooth": (1 / 2, 1 / 3)}


def tones(n: int | None = None, seconds: float = 2.0, **options):
    return open_sounds(f"demo:tones:{n}" if n else "demo:tones", sample_rate=RATE, clip_seconds=seconds, **options)


def value_of(words: dict[str, tuple[str, ...]], caption: str) -> str:
    """The one attribute of a kind that a caption names."""
    found = {name for name, synonyms in words.items() if any(re.search(rf"\b{word}\b", caption) for word in synonyms)}
    assert len(found) == 1, (caption, found)
    return found.pop()


def combination(caption: str) -> tuple[str, ...]:
    for compound, plain in (("low-pitched", "deep"), ("high-pitched", "shrill"), ("medium-pitched", "mid-range")):
        caption = caption.replace(compound, plain)
    return tuple(value_of(words, caption) for words in (WAVEFORMS, PITCHES, TEMPOS, ENVELOPES))


def spectrum(sound: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Amplitudes and their frequencies in Hz, so closely that no peak lies between two of them."""
    n = 8 * len(sound)
    return np.abs(np.fft.rfft(sound * np.hanning(len(sound)), n)), np.fft.rfftfreq(n, 1 / RATE)


def near(amplitudes: np.ndarray, frequencies: np.ndarray, hertz: float) -> float:
    return float(amplitudes[np.abs(frequencies - hertz) < 2].max())


def test_captions_are_true_of_pitch_and_waveform():
    sounds = tones(seconds=6)
    seen = set()
    for i in range(60):
        waveform, pitch, *_ = combination(sounds.texts(i).captions[1])
        amplitudes, frequencies = spectrum(sounds.load(i).numpy())
        low, high = HERTZ[pitch]
        if waveform == "noise":
            power = amplitudes**2
            centre = (power * frequencies).sum() / power.sum()
            width = math.sqrt((power * (frequencies - centre) ** 2).sum() / power.sum())
            assert 0.9 * low < centre < 1.1 * high and width > 0.05 * centre
            assert np.sort(power)[-80:].sum() / power.sum() < 0.3, "a tone stands out"
        else:
            hertz = frequencies[amplitudes.argmax()]
            assert low - 1 < hertz < high + 1
            ratios = [near(amplitudes, frequencies, k * hertz) / amplitudes.max() for k in (2, 3)]
            assert ratios == pytest.approx(HARMONICS[waveform], abs=0.05), waveform
        seen |= {waveform, pitch}
    assert seen == {*WAVEFORMS, *PITCHES}
