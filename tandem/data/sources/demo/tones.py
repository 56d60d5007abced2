"""Sounds: a tone of some waveform and pitch, in pulses, that fades or swells; phases are integers."""

from __future__ import annotations

import functools
import math
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.data.sources.record import Record
from tandem.hashing import GOLDEN_GAMMA, Draws, Key, derive_key, mix64

Array = npt.NDArray[np.floating]

# The synonyms of each value, the plainest first; no synonym stands for two values.
WAVEFORMS = {
    "sine": ("sine wave", "sine tone", "pure tone"),
    "triangle": ("triangle wave", "triangle tone", "triangular wave"),
    "square": ("square wave", "square tone", "rectangular wave"),
    "sawtooth": ("sawtooth wave", "sawtooth tone", "saw wave"),
    "noise": ("noise", "band of noise", "hissing noise"),
}
PITCHES = {
    "low": ("low", "deep", "low-pitched"),
    "middle": ("middle", "medium-pitched", "mid-range"),
    "high": ("high", "high-pitched", "shrill"),
}
TEMPOS = {
    "slow": ("slow", "leisurely", "lazy"),
    "medium": ("moderate", "medium-paced", "middling"),
    "fast": ("fast", "rapid", "quick"),
}
ENVELOPES = {
    "steady": ("at a steady volume", "equally loud throughout", "at a constant level"),
    "fading": ("fading away", "growing softer", "getting quieter"),
    "swelling": ("swelling", "growing louder", "getting louder"),
}
_WORDS = {"waveform": WAVEFORMS, "pitch": PITCHES, "tempo": TEMPOS, "envelope": ENVELOPES}
TEMPLATES = (
    "a {pitch} {waveform} in {tempo} pulses, {envelope}",
    "{tempo} pulses of a {pitch} {waveform}, {envelope}",
    "{envelope}: a {pitch} {waveform} that pulses at a {tempo} rate",
    "the sound of a {pitch} {waveform}, {envelope}, with {tempo} pulses",
)
HERTZ = {"low": (130.0, 185.0), "middle": (340.0, 480.0), "high": (900.0, 1250.0)}
PULSES_PER_SECOND = {"slow": (1.8, 2.4), "medium": (4.0, 5.3), "fast": (9.0, 12.0)}
LOUDEST_OVER_SOFTEST = 10.0  # ratio of loudness between the ends of a clip that fades or swells

_LOWEST_SAMPLE_RATE, _SHORTEST_CLIP_SECONDS = 8000, 0.5  # below these, two waveforms or two tempos would sound alike
_RMS = 0.25  # root mean square of a pulse at its loudest, for every waveform
_ENTRIES_BITS = 12  # a table of one period has 2^12 entries
_ENTRIES = 1 << _ENTRIES_BITS
_MOST_HARMONICS = 40
_DUTY, _RAMP = 0.6, 0.08  # shares of a pulse's period: of the sound, and of its rise and of its fall


def draw_tone(seed: int, index: int, epoch: int | str) -> Record:
    draws = Draws("tones", seed, index)
    traits = {name: draws.choice(table) for name, table in _WORDS.items()}
    low, high = HERTZ[traits["pitch"]]
    hertz, pulses_per_second = low * (high / low) ** draws.uniform(), draws.uniform(*PULSES_PER_SECOND[traits["tempo"]])
    draws, words = Draws("tone words", seed, index), {name: table[traits[name]] for name, table in _WORDS.items()}
    captions = [TEMPLATES[0].format(**{name: first for name, (first, *_) in words.items()})]
    for template in TEMPLATES[1:]:
        captions.append(template.format(**{name: draws.choice(synonyms) for name, synonyms in words.items()}))
    key = ("tone", seed, epoch, index)
    return {
        "sound": partial(_synthesize, traits["waveform"], traits["envelope"], hertz, pulses_per_second, key),
        "texts": {"captions": captions, "label": words["waveform"][0]},
    }


def check_sound(sample_rate: int, clip_samples: int) -> None:
    """Raise ValueError, in one line, if different tones would sound alike in such a clip."""
    if sample_rate < _LOWEST_SAMPLE_RATE or clip_samples < _SHORTEST_CLIP_SECONDS * sample_rate:
        raise ValueError(
            f"demo:tones needs a sample rate of {_LOWEST_SAMPLE_RATE} Hz and clips of {_SHORTEST_CLIP_SECONDS} s "
            f"at least, not {sample_rate} Hz and {clip_samples / sample_rate:g} s"
        )


def _synthesize(
    waveform: str, envelope: str, hertz: float, pulses_per_second: float, key: Key, sample_rate: int, clip_samples: int
) -> Tensor:
    draws = Draws(*key)
    beat = _phases(clip_samples, pulses_per_second / sample_rate, draws.uniform())
    phase = _phases(clip_samples, hertz / sample_rate, draws.uniform())
    if waveform == "noise":
        samples = _noise(phase, hertz / 3 / sample_rate, draws.bits())
    else:
        samples = _one_period(waveform, min(_MOST_HARMONICS, int(0.48 * sample_rate / hertz)))[phase]
    samples = samples * _pulse()[beat] * _ramp(envelope, clip_samples) * np.float32(draws.uniform(0.5, 1.0))
    return torch.from_numpy(samples)


def _noise(phase: npt.NDArray[np.int64], rate: float, key: int) -> Array:
    """Noise whose spectrum is a band around the frequency of a wave with these phases: the sum of two waves, a quarter
    of a period apart, each multiplied by noise of low frequencies with `rate` values per sample."""
    positions = np.arange(len(phase)) * rate
    n = int(positions[-1]) + 2
    samples = np.zeros(len(phase), np.float32)
    for number in range(2):
        envelope = np.interp(positions, np.arange(n), _white_noise(n, key + number)).astype(np.float32)
        samples += envelope * _one_period("sine", 1)[(phase + number * _ENTRIES // 4) % _ENTRIES]
    # Scale to `_RMS`: uniform numbers in [-1, 1) have the mean square 1/3, linear interpolation between them has
    # 2/9, and so the sum of the two products has 4/9 of `_RMS` squared.
    return samples * np.float32(1.5)


def _white_noise(n: int, key: int) -> Array:
    """n uniform numbers in [-1, 1), from the same sequence as `Draws`, computed at once."""
    states = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA) + np.uint64(derive_key("white", key))
    return (mix64(states) >> 11).astype(np.float64) * 2.0**-52 - 1.0


def _phases(n: int, per_sample: float, start: float) -> npt.NDArray[np.int64]:
    """The phases of samples 0 to n - 1 of a wave, in 0 .. 2^12 - 1, computed in 32-bit fixed point."""
    step, first = round(per_sample * 2**32), int(start * 2**32)
    return ((first + step * np.arange(n, dtype=np.int64)) & (2**32 - 1)) >> (32 - _ENTRIES_BITS)


@functools.lru_cache(maxsize=256)
def _one_period(waveform: str, n_harmonics: int) -> Array:
    """One band-limited period of a waveform, with root mean square `_RMS`."""
    angles = 2 * math.pi * np.arange(_ENTRIES) / _ENTRIES
    harmonics = range(1, n_harmonics + 1)
    zeros = np.zeros_like(angles)
    if waveform == "sine":
        wave = np.sin(angles)
    elif waveform == "triangle":
        wave = sum(((-1) ** (k // 2) / k**2 * np.sin(k * angles) for k in harmonics if k % 2), zeros)
    else:
        wave = sum((np.sin(k * angles) / k for k in harmonics if k % 2 or waveform == "sawtooth"), zeros)
    return (wave * (_RMS / np.sqrt(np.mean(wave**2)))).astype(np.float32)


@functools.lru_cache(maxsize=1)
def _pulse() -> Array:
    """Loudness over one period of the pulses, in [0, 1]."""
    positions = np.arange(_ENTRIES) / _ENTRIES
    rise = np.clip(np.minimum(positions, _DUTY - positions) / _RAMP, 0, 1)
    return (rise * rise * (3 - 2 * rise)).astype(np.float32)


@functools.lru_cache(maxsize=8)
def _ramp(envelope: str, n: int) -> Array:
    """Loudness over the clip, in [0.1, 1], linear in decibels."""
    if envelope == "steady":
        return np.ones(n, np.float32)
    fading = np.geomspace(1.0, 1.0 / LOUDEST_OVER_SOFTEST, n).astype(np.float32)
    return fading if envelope == "fading" else fading[::-1]
