"""demo:tones: the sounds are what their captions say, everywhere the same."""

from __future__ import annotations

import hashlib
import math
import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from data import open_sounds
from data.sounds.tones import ENVELOPES, HERTZ, PITCHES, PULSES_PER_SECOND, TEMPOS, WAVEFORMS

ROOT = Path(__file__).resolve().parents[3]
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
    plain = (
        caption.replace("low-pitched", "deep").replace("high-pitched", "shrill").replace("medium-pitched", "mid-range")
    )
    return tuple(value_of(words, plain) for words in (WAVEFORMS, PITCHES, TEMPOS, ENVELOPES))


def digest(n: int = 20, **options) -> str:
    sounds = tones(**options)
    return hashlib.sha256(b"".join(sounds.load(i).numpy().tobytes() for i in range(n))).hexdigest()


def test_sounds_are_the_same_in_every_process():
    program = "from test_tones import digest; print(digest())"
    path = [str(ROOT), str(Path(__file__).parent)]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {path}; {program}"]
    other = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert other.stdout.strip() == digest()


def test_sounds_depend_on_seed_and_index():
    assert digest(seed=0) == digest(seed=0) != digest(seed=1)
    sounds = tones(50)
    assert len({sounds.load(i).numpy().tobytes() for i in range(50)}) == 50


def test_number_of_sounds_changes_none_of_them():
    few, many = tones(5), tones(5000)
    assert all(torch.equal(few.load(i), many.load(i)) for i in range(5))
    assert [few.captions(i) for i in range(5)] == [many.captions(i) for i in range(5)]
    assert len(tones()) == 4096


def test_sound_is_what_the_contract_says():
    sounds = tones()
    for i in range(100):
        sound = sounds.load(i)
        assert sound.shape == (2 * RATE,) and sound.dtype == torch.float32 and sound.is_contiguous()
        assert 0.05 < sound.abs().max() <= 1


def spectrum(sound: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Amplitudes and their frequencies in Hz, so closely that no peak lies between two of them."""
    n = 8 * len(sound)
    return np.abs(np.fft.rfft(sound * np.hanning(len(sound)), n)), np.fft.rfftfreq(n, 1 / RATE)


def loudness(sound: np.ndarray) -> np.ndarray:
    """Root mean square of windows of 10 ms."""
    return np.sqrt((sound.reshape(-1, RATE // 100) ** 2).mean(axis=1))


def near(amplitudes: np.ndarray, frequencies: np.ndarray, hertz: float) -> float:
    return float(amplitudes[np.abs(frequencies - hertz) < 2].max())


def test_captions_are_true_of_pitch_and_waveform():
    sounds = tones(seconds=6)
    seen = set()
    for i in range(60):
        waveform, pitch, *_ = combination(sounds.captions(i)[1])
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


def test_captions_are_true_of_the_envelope():
    sounds = tones(seconds=6)
    decibels = defaultdict(set)
    for i in range(60):
        *_, envelope = combination(sounds.captions(i)[2])
        first, _, last = np.array_split(loudness(sounds.load(i).numpy()), 3)
        decibels[envelope].add(10 * math.log10((last**2).mean() / (first**2).mean()))
    assert set(decibels) == set(ENVELOPES)
    assert max(abs(d) for d in decibels["steady"]) < 3
    assert max(decibels["fading"]) < -10 and min(decibels["swelling"]) > 10  # 13.3 but for whole pulses


def test_captions_are_true_of_the_tempo():
    sounds = tones(seconds=6)
    seen = set()
    for i in range(60):
        waveform, _, tempo, envelope = combination(sounds.captions(i)[3])
        if waveform == "noise":
            continue  # the noise is the louder and softer
        loud = loudness(sounds.load(i).numpy())
        loud *= {"steady": 1, "fading": 10, "swelling": 0.1}[envelope] ** np.linspace(0, 1, len(loud))
        sounding = loud > 0.5 * loud.max()
        n_pulses = int((sounding[1:] & ~sounding[:-1]).sum())
        low, high = PULSES_PER_SECOND[tempo]
        assert math.floor(6 * low) <= n_pulses <= math.ceil(6 * high), (tempo, n_pulses)
        seen.add(tempo)
    assert seen == set(TEMPOS)


def test_no_waveform_is_louder_than_another():
    sounds = tones(seconds=6)
    loud = defaultdict(list)
    for i in range(150):
        if sounds.tone(i).envelope == "steady":
            loud[sounds.tone(i).waveform].append(float(sounds.load(i).std()))
    means = [sum(values) / len(values) for values in loud.values()]
    assert len(means) == 5 and max(means) / min(means) < 1.4  # gains are drawn from 0.5 to 1


def test_four_captions_say_the_same_in_other_words():
    sounds = tones()
    for i in range(200):
        captions = sounds.captions(i)
        tone = sounds.tone(i)
        assert len(set(captions)) == 4
        assert {combination(c) for c in captions} == {(tone.waveform, tone.pitch, tone.tempo, tone.envelope)}
        assert sounds.label(i) == WAVEFORMS[tone.waveform][0]
    assert not any(re.search(r"\ban? [aeiou]", caption) for i in range(200) for caption in sounds.captions(i))


def test_equal_captions_are_of_equal_attributes_and_the_first_captions_of_those_are_equal():
    sounds = tones()
    by_caption, by_combination = defaultdict(set), defaultdict(set)
    for i in range(len(sounds)):
        tone = sounds.tone(i)
        attributes = (tone.waveform, tone.pitch, tone.tempo, tone.envelope)
        for caption in sounds.captions(i):
            by_caption[caption].add(attributes)
        by_combination[attributes].add(sounds.captions(i)[0])
    assert all(len(attributes) == 1 for attributes in by_caption.values())
    assert len(by_combination) == 5 * 3 * 3 * 3
    assert all(len(captions) == 1 for captions in by_combination.values())


def test_augmentation_changes_the_sound_by_epoch_and_no_caption():
    sounds = tones()
    plain = sounds.load(3)
    assert torch.equal(plain, sounds.load(3, 5))
    first, second = sounds.load(3, 0, True), sounds.load(3, 1, True)
    assert torch.equal(first, sounds.load(3, 0, True))
    assert not torch.equal(first, second) and not torch.equal(first, plain)


def test_sound_takes_less_than_two_milliseconds():
    sounds = tones()
    sounds.load(0)
    times = []
    for i in range(60):
        start = time.process_time()
        sounds.load(i)
        times.append(time.process_time() - start)
    assert sorted(times)[30] < 0.002


def test_sample_rate_of_8000_holds_what_tells_the_waveforms_apart():
    sounds = open_sounds("demo:tones", sample_rate=8000, clip_seconds=2)
    for i in range(60):
        tone = sounds.tone(i)
        if tone.waveform in ("square", "sawtooth"):
            assert tone.hertz * 3 < 4000
            sound = sounds.load(i).numpy()
            amplitudes = np.abs(np.fft.rfft(sound * np.hanning(len(sound))))
            frequencies = np.fft.rfftfreq(len(sound), 1 / 8000)
            assert near(amplitudes, frequencies, 3 * tone.hertz) > 0.2 * amplitudes.max()


@pytest.mark.parametrize("sample_rate, seconds", [(4000, 2), (16000, 0.25)])
def test_clip_in_which_attributes_cannot_be_heard_is_refused(sample_rate, seconds):
    with pytest.raises(ValueError, match="8000 Hz"):
        open_sounds("demo:tones", sample_rate=sample_rate, clip_seconds=seconds)


def test_index_beyond_the_end_is_an_error():
    with pytest.raises(IndexError):
        tones(10).load(10)
