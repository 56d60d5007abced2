"""demo:tones, a generated set of captioned sounds: a tone of some waveform and pitch, in pulses, that fades or swells.

Everything depends only on (seed, index) and is computed with integer phases, so it is the same on every machine.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..hashing import GOLDEN_GAMMA, Draws, derive_key
from .sidecars import Texts

Array = npt.NDArray[np.float32]

# Every value with the words for it, the plain ones first; no words are used for two values.
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
TEMPLATES = (
    "a {pitch} {waveform} in {tempo} pulses, {envelope}",
    "{tempo} pulses of a {pitch} {waveform}, {envelope}",
    "{envelope}: a {pitch} {waveform} that pulses at a {tempo} rate",
    "the sound of a {pitch} {waveform}, {envelope}, with {tempo} pulses",
)
HERTZ = {"low": (130.0, 185.0), "middle": (340.0, 480.0), "high": (900.0, 1250.0)}
PULSES_PER_SECOND = {"slow": (1.8, 2.4), "medium": (4.0, 5.3), "fast": (9.0, 12.0)}
LOUDEST_OVER_SOFTEST = 10.0  # ratio of loudness between the ends of a clip that fades or swells

_LOWEST_SAMPLE_RATE, _SHORTEST_CLIP_SECONDS = 8000, 0.5  # below, two waveforms or two tempos would sound alike
_RMS = 0.25  # root mean square of a pulse at its loudest, for every waveform
_ENTRIES_BITS = 12  # a table of one period has 2^12 entries
_MOST_HARMONICS = 40
_DUTY, _RAMP = 0.6, 0.08  # shares of a pulse's period: of the sound, and of its rise and of its fall


@dataclass(frozen=True)
class Tone:
    """The attributes of a sound: keys of the tables above, the frequency in Hz and the pulses per second."""

    waveform: str
    pitch: str
    tempo: str
    envelope: str
    hertz: float
    pulses_per_second: float


class Tones:
    """`n` tones, with four captions each; both depend only on (seed, index). See `Sounds` for the methods.

    The first caption has the same words for all tones of equal attributes, the others use random synonyms. Augmentation
    changes what no caption mentions: the loudness, the phases of wave and pulses, and the noise.
    """

    fingerprint = ""

    def __init__(self, n: int, *, sample_rate: int, clip_samples: int, seed: int = 0) -> None:
        if sample_rate < _LOWEST_SAMPLE_RATE or clip_samples < _SHORTEST_CLIP_SECONDS * sample_rate:
            raise ValueError(
                f"demo:tones needs a sample rate of {_LOWEST_SAMPLE_RATE} Hz and clips of {_SHORTEST_CLIP_SECONDS} s "
                f"at least, not {sample_rate} Hz and {clip_samples / sample_rate:g} s"
            )
        self.n, self.sample_rate, self.clip_samples, self.seed = n, sample_rate, clip_samples, seed

    def __len__(self) -> int:
        return self.n

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        tone = self.tone(index)
        draws = Draws("tone", self.seed, epoch if augment else "plain", index)
        beat = _periods(self.clip_samples, tone.pulses_per_second / self.sample_rate, draws.uniform())
        samples = self._carrier(tone, draws)
        samples *= _pulse()[beat]
        samples *= _ramp(tone.envelope, self.clip_samples)
        samples *= np.float32(draws.uniform(0.5, 1.0))
        return torch.from_numpy(samples)

    def texts(self, index: int) -> Texts:
        tone, draws = self.tone(index), Draws("tone words", self.seed, index)
        words = (WAVEFORMS[tone.waveform], PITCHES[tone.pitch], TEMPOS[tone.tempo], ENVELOPES[tone.envelope])
        written = []
        for number, template in enumerate(TEMPLATES):
            waveform, pitch, tempo, envelope = (w[draws.below(len(w)) if number else 0] for w in words)
            written.append(template.format(waveform=waveform, pitch=pitch, tempo=tempo, envelope=envelope))
        return Texts(written, WAVEFORMS[tone.waveform][0])

    def describe(self, index: int) -> str:
        return f"demo:tones[{index}]"

    def tone(self, index: int) -> Tone:
        """The attributes of sound `index`."""
        if not 0 <= index < self.n:
            raise IndexError(index)
        draws = Draws("tones", self.seed, index)
        waveform, pitch, tempo, envelope = (
            list(choices)[draws.below(len(choices))] for choices in (WAVEFORMS, PITCHES, TEMPOS, ENVELOPES)
        )
        low, high = HERTZ[pitch]
        hertz = low * (high / low) ** draws.uniform()
        return Tone(waveform, pitch, tempo, envelope, hertz, draws.uniform(*PULSES_PER_SECOND[tempo]))

    def _carrier(self, tone: Tone, draws: Draws) -> Array:
        phase = _periods(self.clip_samples, tone.hertz / self.sample_rate, draws.uniform())
        if tone.waveform == "noise":
            return self._noise(tone, phase, draws.bits())
        n_harmonics = min(_MOST_HARMONICS, int(0.48 * self.sample_rate / tone.hertz))
        return _period(tone.waveform, n_harmonics)[phase]

    def _noise(self, tone: Tone, phase: npt.NDArray[np.int64], key: int) -> Array:
        """Noise whose spectrum is a band around the tone's frequency: two waves, a quarter of a period apart, each
        times noise of low frequencies."""
        rate = tone.hertz / 3  # values per second of the noise of low frequencies
        at = np.arange(self.clip_samples) * (rate / self.sample_rate)
        n = int(at[-1]) + 2
        quarter = 1 << (_ENTRIES_BITS - 2)
        wave = _period("sine", 1)
        total = np.zeros(self.clip_samples, np.float32)
        for half, shift in enumerate((0, quarter)):
            slow = np.interp(at, np.arange(n), _white(n, key + half)).astype(np.float32)
            total += slow * wave[(phase + shift) & ((1 << _ENTRIES_BITS) - 1)]
        # Scale to `_RMS`: uniform numbers in [-1, 1) have the mean square 1/3, linear interpolation between them has
        # 2/9, and so the sum of the two products has 4/9 of `_RMS` squared.
        return total * np.float32(1.5)


def _periods(n: int, per_sample: float, start: float) -> npt.NDArray[np.int64]:
    """Samples 0 to n - 1 of a wave -> where in its period each is, in 0 .. 2^12 - 1; in 32-bit fixed point."""
    step, first = round(per_sample * 2**32), int(start * 2**32)
    return ((first + step * np.arange(n, dtype=np.int64)) & (2**32 - 1)) >> (32 - _ENTRIES_BITS)


@functools.lru_cache(maxsize=256)
def _period(waveform: str, n_harmonics: int) -> Array:
    """One period of a waveform without the harmonics that a sample rate cannot hold, of root mean square `_RMS`."""
    turn = 2 * math.pi * np.arange(1 << _ENTRIES_BITS) / (1 << _ENTRIES_BITS)
    order = range(1, n_harmonics + 1)
    silence = np.zeros_like(turn)
    if waveform == "sine":
        wave = np.sin(turn)
    elif waveform == "triangle":
        wave = sum(((-1) ** (k // 2) / k**2 * np.sin(k * turn) for k in order if k % 2), silence)
    else:
        wave = sum((np.sin(k * turn) / k for k in order if k % 2 or waveform == "sawtooth"), silence)
    return (wave * (_RMS / np.sqrt(np.mean(wave**2)))).astype(np.float32)


@functools.lru_cache(maxsize=1)
def _pulse() -> Array:
    """Loudness over one period of the pulses, in [0, 1]."""
    at = np.arange(1 << _ENTRIES_BITS) / (1 << _ENTRIES_BITS)
    rise = np.clip(np.minimum(at, _DUTY - at) / _RAMP, 0, 1)
    return (rise * rise * (3 - 2 * rise)).astype(np.float32)


@functools.lru_cache(maxsize=8)
def _ramp(envelope: str, n: int) -> Array:
    """Loudness over the clip, in [0.1, 1], linear in decibels."""
    if envelope == "steady":
        return np.ones(n, np.float32)
    fading = np.geomspace(1.0, 1.0 / LOUDEST_OVER_SOFTEST, n).astype(np.float32)
    return fading if envelope == "fading" else fading[::-1]


def _white(n: int, *key: int) -> npt.NDArray[np.float64]:
    """n uniform numbers in [-1, 1), from the same sequence as `Draws`, computed at once."""
    x = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA) + np.uint64(derive_key("white", *key))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
