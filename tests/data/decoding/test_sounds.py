"""Clips out of sound files: what is heard is what was written, and no more is read than that."""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
import torch

from tandem.data.decoding.sounds import ClipDecoder, clip_starts
from tandem.data.sources.record import FileRef
from tests.data.helpers import one_line

RATE = 16000


def sine(hertz: float, seconds: float, rate: int, amplitude: float = 0.5) -> np.ndarray:
    return amplitude * np.sin(2 * math.pi * hertz * np.arange(round(seconds * rate)) / rate)


def written(path: Path, samples: np.ndarray, rate: int = RATE, **options) -> FileRef:
    with soundfile.SoundFile(path, "w", rate, 1 if samples.ndim == 1 else samples.shape[1], **options) as file:
        for start in range(0, len(samples), rate):  # libsndfile crashes on long writes of Vorbis
            file.write(samples[start : start + rate])
    return FileRef(str(path))


def ramp(path: Path, seconds: float, rate: int = RATE) -> FileRef:
    """Sample i is i / 2^20, which says where a clip was cut."""
    return written(path, np.arange(round(seconds * rate)) / 2**20, rate, subtype="FLOAT")


def part(source: FileRef, start_seconds: float, end_seconds: float = math.inf) -> FileRef:
    return source._replace(start_seconds=start_seconds, end_seconds=end_seconds)


def place(clip: torch.Tensor) -> int:
    start = round(float(clip[0]) * 2**20)
    assert torch.equal(clip, (start + torch.arange(len(clip))) / 2**20), "not one piece"
    return start


def found(clip: np.ndarray, whole: np.ndarray) -> int:
    """Where a clip is in a file: the maximum of their correlation."""
    n = 1 << (2 * len(whole)).bit_length()
    correlation = np.fft.irfft(np.fft.rfft(whole, n) * np.fft.rfft(clip, n).conj(), n)
    return int(np.argmax(correlation[: len(whole) - len(clip) + 1]))


FORMATS = [
    ("wav", "PCM_U8", 0.01), ("wav", "PCM_16", 1e-4), ("wav", "PCM_24", 1e-4), ("wav", "PCM_32", 1e-4),
    ("wav", "FLOAT", 1e-4), ("wav", "DOUBLE", 1e-4), ("aiff", "PCM_16", 1e-4), ("flac", "PCM_16", 1e-4),
    ("flac", "PCM_24", 1e-4), ("ogg", "VORBIS", 0.02), ("opus", "OPUS", 0.05), ("mp3", "MPEG_LAYER_III", 0.02),
]  # fmt: skip


@pytest.mark.parametrize("ending, subtype, tolerance", FORMATS)
def test_sine_of_every_format_is_that_sine(tmp_path, ending, subtype, tolerance):
    """The middle of it: after a jump a decoder of MP3 is silent for some frames, which must not be heard."""
    container = {"opus": "OGG"}.get(ending, ending.upper())
    rate = 48000 if ending == "opus" else 44100
    source = written(tmp_path / f"a.{ending}", sine(440, 5, rate), rate, format=container, subtype=subtype)
    clip = ClipDecoder(RATE, RATE).load(source, 0)
    assert clip.shape == (RATE,) and clip.dtype == torch.float32 and clip.is_contiguous()
    expected = sine(440, 5, RATE)[2 * RATE : 3 * RATE]  # the middle second of five
    assert np.abs(clip.numpy() - expected).max() < tolerance


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 32000, 44100, 48000, 96000])
@pytest.mark.parametrize("ending", ["wav", "flac"])
def test_clip_is_a_part_of_the_whole_file_resampled(tmp_path, rate, ending):
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 3 * rate)
    source = written(tmp_path / f"a.{ending}", noise, rate)
    whole = soxr.resample(soundfile.read(source.path, dtype="float32")[0], rate, RATE, quality="HQ")
    decoder = ClipDecoder(RATE, RATE // 4)
    for epoch in range(5):
        clip = decoder.load(source, 0, epoch, augment=True).numpy()
        at = found(clip, whole)
        assert np.abs(whole[at : at + len(clip)] - clip).max() < 1e-3


@pytest.mark.parametrize("ending, options", [
    ("ogg", {}), ("mp3", {}), ("mp3", {"bitrate_mode": "VARIABLE", "compression_level": 0.3})
], ids=str)  # fmt: skip
def test_clip_of_a_lossy_file_is_a_part_of_the_whole_file(tmp_path, ending, options):
    rate = 44100
    noise = np.random.default_rng(0).normal(0, 0.003, 3 * rate).cumsum().clip(-0.9, 0.9)
    source = written(tmp_path / f"a.{ending}", noise, rate, **options)
    whole = soundfile.read(source.path, dtype="float32")[0].clip(-1, 1)
    for epoch in range(4):
        clip = ClipDecoder(rate, 6000).load(source, 0, epoch, augment=True).numpy()
        at = found(np.diff(clip), np.diff(whole))  # their slow waves are alike everywhere
        assert np.abs(whole[at : at + 6000] - clip).max() < 1e-4


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 44101, 48000, 15999, 16001])
@pytest.mark.parametrize("seconds", [0.01, 0.999, 1.0, 1.001, 2.5])
def test_clip_has_its_exact_length_whatever_the_rates(tmp_path, rate, seconds):
    source = written(tmp_path / "a.wav", sine(300, seconds, rate), rate)
    for clip_samples in (RATE, 15999, 7):
        decoder = ClipDecoder(RATE, clip_samples)
        assert decoder.load(source, 0).shape == (clip_samples,)
        assert decoder.load(source, 0, 1, augment=True).shape == (clip_samples,)


@pytest.mark.parametrize("n_channels", [2, 6])
def test_channels_are_mixed_down_not_stacked(tmp_path, n_channels):
    channels = np.stack([sine(300 + 100 * i, 1, RATE) for i in range(n_channels)], 1)
    clip = ClipDecoder(RATE, RATE).load(written(tmp_path / "a.wav", channels, subtype="FLOAT"), 0)
    assert clip.shape == (RATE,)
    assert np.abs(clip.numpy() - channels.mean(1)).max() < 1e-6


def test_clips_of_training_are_drawn_by_seed_epoch_and_index_from_all_of_the_file(tmp_path):
    source = ramp(tmp_path / "a.wav", 10)

    def places(seed: int, index: int = 0) -> list[int]:
        return [place(ClipDecoder(RATE, RATE, seed).load(source, index, epoch, True)) for epoch in range(60)]

    drawn = places(0)
    assert drawn == places(0)
    assert len({tuple(drawn), tuple(places(1)), tuple(places(0, index=1))}) == 3
    assert 0 <= min(drawn) < RATE and 8 * RATE < max(drawn) <= 9 * RATE
    assert len(set(drawn)) > 50


def test_last_place_of_a_file_can_be_drawn(tmp_path):
    source = written(tmp_path / "a.wav", np.arange(6) / 8, subtype="FLOAT")
    firsts = {float(ClipDecoder(RATE, 4).load(source, 0, epoch, True)[0]) for epoch in range(40)}
    assert firsts == {0.0, 0.125, 0.25}


def test_clip_of_a_part_stays_in_that_part(tmp_path):
    source = ramp(tmp_path / "a.wav", 20)
    decoder = ClipDecoder(RATE, RATE)
    drawn = [place(decoder.load(part(source, 10.0, 12.5), 0, epoch, True)) for epoch in range(30)]
    assert min(drawn) >= 10 * RATE and max(drawn) <= 11.5 * RATE and len(set(drawn)) > 20
    assert place(decoder.load(part(source, 10.0, 12.0), 0)) == 10.5 * RATE
    assert place(decoder.load(part(source, 18.0, 99.0), 0)) == 18.5 * RATE


def test_short_sound_of_another_rate_is_repeated_at_its_true_length(tmp_path):
    source = written(tmp_path / "a.wav", sine(440, 0.5, 44100), 44100, subtype="FLOAT")
    clip = ClipDecoder(RATE, 2 * RATE).load(source, 0).numpy()
    assert np.array_equal(clip[:8000], clip[8000:16000]) and np.array_equal(clip[:8000], clip[24000:])
    assert np.abs(clip[500:7500] - sine(440, 0.5, RATE)[500:7500]).max() < 1e-4


def test_samples_stay_within_one_those_of_a_resampled_square_wave_too(tmp_path):
    source = written(tmp_path / "a.wav", np.array([0.5, 1.7, -3.0, -0.25]), subtype="FLOAT")
    assert ClipDecoder(RATE, 4).load(source, 0).tolist() == [0.5, 1.0, -1.0, -0.25]
    source = written(tmp_path / "a.wav", np.sign(sine(100, 1, 44100) + 1e-9) * 0.999, 44100)
    assert ClipDecoder(RATE, RATE).load(source, 0).abs().max() <= 1


def reason(source: FileRef) -> str:
    return one_line(ClipDecoder(RATE, RATE).load, source, 0)


def test_float_file_with_a_value_that_is_no_number_or_was_not_scaled_is_bad(tmp_path):
    for value in (np.nan, np.inf, -np.inf, 16000):
        samples = sine(440, 1, RATE)
        samples[5000] = value
        expected = "reach 16000" if value == 16000 else "no numbers"
        assert expected in reason(written(tmp_path / "a.wav", samples, subtype="FLOAT"))


@pytest.mark.parametrize("ending", ["wav", "mp3", "flac", "ogg", "aiff"])
def test_file_that_is_no_sound_or_holds_none_is_bad(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    for content in (b"", b"no sound but words " * 100, bytes(5000)):
        path.write_bytes(content)
        text = reason(FileRef(str(path)))
        assert text == "the file is empty" if not content else text.startswith("libsndfile cannot read it: ")
    assert reason(written(path, np.zeros(0)))


@pytest.mark.parametrize("ending", ["wav", "aiff", "flac", "mp3"])
def test_file_that_is_cut_off_is_bad_where_the_clip_is_missing(tmp_path, ending):
    source = written(tmp_path / f"a.{ending}", np.random.default_rng(0).uniform(-0.5, 0.5, 10 * RATE))
    content = Path(source.path).read_bytes()
    Path(source.path).write_bytes(content[: len(content) // 3])
    text = reason(source)
    assert "cut off" in text or text.startswith("libsndfile cannot read it: ")


def test_part_beyond_the_end_is_bad(tmp_path):
    assert reason(part(ramp(tmp_path / "a.wav", 5), 7.5)) == "it lasts 5 s, and its clip begins at 7.5 s"


@pytest.mark.parametrize("stated", [0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000])
def test_wav_that_was_written_into_a_pipe_states_no_size_and_is_good(tmp_path, stated):
    source = written(tmp_path / "a.wav", sine(440, 1, RATE))
    content = bytearray(Path(source.path).read_bytes())
    at = content.index(b"data") + 4
    content[at : at + 4] = struct.pack("<I", stated)
    Path(source.path).write_bytes(content)
    assert np.abs(ClipDecoder(RATE, RATE).load(source, 0).numpy() - sine(440, 1, RATE)).max() < 1e-3


def without_length(flac: bytes) -> bytes:
    """As an encoder that writes into a pipe leaves it: neither length nor checksum of the samples are known."""
    at = 8 + 13
    return flac[:at] + bytes([flac[at] & 0xF0]) + bytes(4 + 16) + flac[at + 21 :]


def clips_of(source: FileRef) -> list[torch.Tensor]:
    decoder = ClipDecoder(RATE, RATE)
    drawn = [decoder.load(source, 0, epoch, augment=True) for epoch in range(20)]
    return [decoder.load(source, 0), *drawn, *decoder.load_clips(source, 9), decoder.load(part(source, 4.5), 0)]


@pytest.mark.parametrize("rate, channels, subtype", [(RATE, 1, "PCM_16"), (44100, 2, "PCM_24"), (8000, 6, "PCM_S8")])
def test_flac_that_was_written_into_a_pipe_sounds_as_one_that_states_its_length(tmp_path, rate, channels, subtype):
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (5 * rate + 77, channels))
    source = written(tmp_path / "a.flac", noise, rate, subtype=subtype)
    content = Path(source.path).read_bytes()
    expected = clips_of(source)
    (tmp_path / "b.flac").write_bytes(without_length(content))
    (tmp_path / "c.tar").write_bytes(b"x" * 700 + without_length(content) + b"y" * 700)
    inside = FileRef(str(tmp_path / "c.tar"), 700, len(content))
    for other in (FileRef(str(tmp_path / "b.flac")), inside, FileRef.in_memory(without_length(content), "d")):
        assert all(map(torch.equal, clips_of(other), expected))


@pytest.mark.parametrize("tags", ["id3v1", "apev2", "apev2 and id3v1", "id3v2"])
def test_flac_without_length_in_front_of_a_tag_has_its_last_frame(tmp_path, tags):
    source = written(tmp_path / "a.flac", np.random.default_rng(0).uniform(-0.5, 0.5, 5 * RATE + 77))
    content = without_length(Path(source.path).read_bytes())
    apev2 = (
        b"APETAGEX" + struct.pack("<4I8x", 2000, 32, 0, 0xA0000000) + b"APETAGEX" + struct.pack("<4I8x", 2000, 32, 0, 0)
    )
    behind = {"id3v1": ID3V1, "apev2": apev2, "apev2 and id3v1": apev2 + ID3V1, "id3v2": ID3V2}[tags]
    (tmp_path / "b.flac").write_bytes(content + behind)
    assert all(map(torch.equal, clips_of(FileRef(str(tmp_path / "b.flac"))), clips_of(source)))
    (tmp_path / "c.flac").write_bytes(content[:-30] + behind)
    assert not torch.equal(clips_of(FileRef(str(tmp_path / "c.flac")))[-1], clips_of(source)[-1])


def test_flac_without_length_that_is_cut_off_ends_with_its_last_whole_frame(tmp_path):
    ramp_of_16_bits = np.arange(5 * RATE) % 30000 / 32768
    content = without_length(Path(written(tmp_path / "a.flac", ramp_of_16_bits).path).read_bytes())
    for size in (len(content) - 1, len(content) // 2):
        clips = ClipDecoder(RATE, 4096).load_clips(FileRef.in_memory(content[:size], "b"), 99)
        assert torch.equal(clips.flatten(), torch.from_numpy(ramp_of_16_bits[: clips.numel()]).float())
        assert 0.4 * RATE * 5 < clips.numel() < 5 * RATE
    first = content.index(b"\xff\xf8")
    assert "does not state its length" in reason(FileRef.in_memory(content[: first + 50] + bytes(99_999), "b"))


def test_mp3_without_a_header_of_its_length_is_read_to_its_end(tmp_path):
    """Its length is then an estimate, which may be too long by a part of a frame or two."""
    path = tmp_path / "a.mp3"
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 3 * 44100)
    soundfile.write(path, noise, 44100, bitrate_mode="CONSTANT", compression_level=0.2)
    content = path.read_bytes()
    second = content.index(content[:2], 100)
    path.write_bytes(content[second:])
    with soundfile.SoundFile(path) as file:
        assert len(file.read()) < file.frames
    clip = ClipDecoder(44100, 4 * 44100).load(FileRef(str(path)), 0)
    assert clip[10000:100000].std() > 0.2 and clip[-40000:].std() > 0.2


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts the bytes")
@pytest.mark.parametrize("inside", [False, True], ids=["file", "part of a file"])
@pytest.mark.parametrize("ending", ["wav", "flac"])
def test_clip_of_a_long_file_reads_little_more_than_the_clip(tmp_path, ending, inside):
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 200 * RATE)
    source = written(tmp_path / f"a.{ending}", noise)
    content = Path(source.path).read_bytes()
    if inside:
        path = tmp_path / "b.tar"
        path.write_bytes(b"x" * 12345 + content + b"y" * 54321)
        source = FileRef(str(path), 12345, len(content))
    decoder = ClipDecoder(RATE, 10 * RATE)
    expected = decoder.load(source, 0)
    before = bytes_read()
    clip = decoder.load(source, 0)
    read = bytes_read() - before
    assert torch.equal(clip, expected)
    clip_bytes = len(content) / 20
    assert clip_bytes * 0.9 < read < clip_bytes + 60_000 < len(content) / 10


ID3V1, ID3V2 = b"TAG" + bytes(125), b"ID3\x04" + bytes(5) + b"\x0a" + bytes(10)


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_an_ogg_file_of_several_streams_is_refused_wherever_it_lies(tmp_path, subtype):
    """Remains of a page alone are no sound. The second stream is longer."""
    first, second = (
        Path(
            written(tmp_path / f"{hertz}.ogg", sine(hertz, hertz / 150, 48000), 48000, subtype=subtype).path
        ).read_bytes()
        for hertz in (300, 900)
    )
    decoder = ClipDecoder(RATE, RATE)
    alone = decoder.load(FileRef.in_memory(first, "a"), 0)
    for content in (first + second, first + b"rest"):
        (tmp_path / "whole").write_bytes(content)
        (tmp_path / "part").write_bytes(b"1234567" + content + b"123")
        places = (
            FileRef(str(tmp_path / "whole")), FileRef.in_memory(content, "a"),
            FileRef(str(tmp_path / "part"), 7, len(content)),
        )  # fmt: skip
        for ref in places:
            if content.startswith(first + second):
                assert "several streams one after the other" in one_line(decoder.load, ref, 0)
            else:
                assert torch.equal(decoder.load(ref, 0), alone)


def test_a_w64_that_states_no_size_is_heard(tmp_path):
    source = written(tmp_path / "a.w64", sine(440, 2, RATE), RATE, format="W64", subtype="PCM_16")
    content = bytearray(Path(source.path).read_bytes())
    content[16:24] = bytes(8)  # as of a recording that was not closed
    decoder = ClipDecoder(RATE, RATE)
    assert torch.equal(decoder.load(FileRef.in_memory(bytes(content), "a"), 0), decoder.load(source, 0))


# Long sounds are heard by clips that are spread over them.


@pytest.mark.parametrize(
    ("frames", "max_clips", "starts"),
    [
        (50, 6, [0]), (100, 6, [0]), (101, 6, [0, 1]), (200, 6, [0, 100]), (250, 6, [0, 75, 150]), (101, 1, [0]),
        (301, 1, [100]), (10_100, 6, [0, 2000, 4000, 6000, 8000, 10_000]), (1_000, 3, [0, 450, 900]),
    ],
)  # fmt: skip
def test_clips_hear_all_of_a_sound_or_are_spread_evenly(frames, max_clips, starts):
    assert clip_starts(frames, 100, max_clips) == starts


def test_clips_of_another_sample_rate_are_whole_and_stand_where_they_should(tmp_path):
    louder, expected = (sine(440, 3, rate) * np.linspace(0, 1, 3 * rate) for rate in (44100, RATE))
    clips = ClipDecoder(RATE, RATE).load_clips(written(tmp_path / "x.wav", louder, 44100), 6)
    assert clips.shape == (3, RATE)
    assert np.abs(clips.numpy() - expected.reshape(3, RATE))[:, 100:-100].max() < 1e-3
