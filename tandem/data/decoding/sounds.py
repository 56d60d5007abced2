"""Decoding of a sound file to a clip of fixed length, reading no more of the file than the clip needs.

In WAV, AIFF and FLAC files only the frames of the clip are read. Ogg (Vorbis and Opus) is searched by bisection, which
reads about 150 kB more. MP3 has no table of contents: everything before the clip is read, though not decoded. If the
header of an MP3 file of variable bit rate does not state the length, libsndfile estimates it, and sound behind the
estimate is never read. A FLAC file whose header does not state the length, as after writing to a pipe, is first decoded
as a whole, to count its samples. A truncated Ogg file is read without an error; a truncated file of another format
raises an error if a part of the clip is missing. A chained Ogg file is refused, because libsndfile reads its first part
only.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from tandem.data.sources.files import FileWindow, LocalFile, MemoryFile, RandomAccessFile
from tandem.data.sources.record import FileRef, open_range
from tandem.hashing import Draws
from tandem.io.installed import require_packages
from tandem.io.reading import LONGEST_BEGINNING, open_regular, wrong_kind_text

from .arrays import Array

ENDINGS = (".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".aif", ".aiff")
# Further formats of libsndfile.
FURTHER_ENDINGS = (".aifc", ".au", ".snd", ".caf", ".w64", ".rf64", ".voc", ".sph", ".nist")
SAMPLE_RATES = (1_000, 1_000_000)  # in Hz; a file that states another rate is damaged

_MARGIN = 256  # samples at the lower rate that soxr's "HQ" filter needs on both sides
_MAX_AMPLITUDE = 10.0  # largest sample accepted in a file of floats, which should stay in [-1, 1]
# In frames: the largest error of a length that libsndfile estimates from the file's size; and how many frames the
# decoder returns wrong after a seek, because a packet (of 1152 frames) uses bits of up to 9 packets before it.
_MP3_LENGTH_ERROR, _MP3_RUN_UP = 4 * 1152, 12 * 1152
_TRUNCATED_CHUNK = re.compile(r"^\s*(?:data|SSND)\s*: (\d+) \(should be (\d+)\)", re.MULTILINE)  # from libsndfile's log
_UNKNOWN_FRAMES = 1 << 62  # libsndfile's number of frames of a FLAC file that does not state it is 2^63 - 1
# Of a FLAC file (RFC 9639, section 8.2): the distance from the mark "fLaC" to the 64 bits whose last 36 are the length.
_FLAC_LENGTH_OFFSET, _FLAC_LENGTH_BITS = 18, 36
_COUNTED_FRAMES = 1 << 16  # that are decoded at a time
_MAX_OGG_PAGE_BYTES = 1 << 16  # rounded up (RFC 3533)
_UNKNOWN_SIZE = 0x7FFF0000  # programs that write to a pipe do not know the size and state 2^31 - 1, 2^32 - 1 or similar


@dataclass(frozen=True)
class ClipDecoder:
    """Cuts clips of `clip_samples` samples at `sample_rate` Hz out of sound files; in training `seed` places them."""

    sample_rate: int
    clip_samples: int
    seed: int = 0

    def load(self, ref: FileRef, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        """Sound -> float32 (clip_samples,) in [-1, 1]: channels averaged, resampled, cut between start_seconds and
        end_seconds. With `augment`, (seed, epoch, index) determine the place of the clip; else it is the middle. A
        shorter sound is repeated until it fills the clip. Floats beyond [-1, 1] are clipped.

        Raises OSError if the file cannot be opened and ValueError, in one line, if it cannot be decoded there.
        """
        choose = Draws("crop", self.seed, epoch, index).below if augment else lambda n: (n - 1) // 2
        with _open_sound(ref) as sound:
            return torch.from_numpy(self._cut_clip(sound, choose, ref))

    def load_clips(self, ref: FileRef, max_clips: int) -> Tensor:
        """Sound -> (k, clip_samples): the clips that cover it, at most `max_clips`, spread evenly from its beginning to
        its end, see `clip_starts`. Only the clips are decoded. Raises what `load` raises."""
        with _open_sound(ref) as sound:
            (first, last), rate = _find_part(sound, ref), sound.samplerate
        size = math.ceil(self.clip_samples * rate / self.sample_rate)
        starts = [first + start for start in clip_starts(last - first, size, max_clips)]
        clips = [ref._replace(start_seconds=begin / rate, end_seconds=(begin + size) / rate) for begin in starts]
        return torch.stack([self.load(clip, 0) for clip in (clips if len(clips) > 1 else [ref])])

    def _cut_clip(self, sound: Any, choose: Callable[[int], int], ref: FileRef) -> Array:
        """`choose` takes the number of possible starts, n, and returns one of 0 .. n - 1."""
        (first, last), rate = _find_part(sound, ref), sound.samplerate
        clip_frames = -(-self.clip_samples * rate // self.sample_rate)
        step = _clip_step(rate, self.sample_rate)
        begin = first + step * choose(max(0, last - first - clip_frames) // step + 1)
        n = min(clip_frames, last - first)
        margin = 0 if rate == self.sample_rate else math.ceil(_MARGIN * max(1.0, rate / self.sample_rate))
        run_up = max(margin, _MP3_RUN_UP if sound.format == "MP3" else 0)
        before = min(-(-run_up // step), begin // step) * step
        after = min(margin, sound.frames - begin - n)
        samples = _read_mono(sound, begin - before, before + n + after)
        return self._fit_clip(samples, rate, before, n)

    def _fit_clip(self, samples: Array, rate: int, before: int, n: int) -> Array:
        """Samples at `rate`, of which the n from `before` on are the clip -> (clip_samples,) in [-1, 1]."""
        length = min(self.clip_samples, max(1, n * self.sample_rate // rate))
        if rate != self.sample_rate:
            import soxr

            samples = soxr.resample(samples, rate, self.sample_rate, quality="HQ")
        start = round(before * self.sample_rate / rate)
        clip = samples[start : start + length]
        if len(clip) < length:  # at the end of a file, by rounding, or because an MP3 is shorter than its estimate
            clip = np.pad(clip, (0, length - len(clip)))
        if length < self.clip_samples:
            clip = np.resize(clip, self.clip_samples)  # repeats it
        return np.ascontiguousarray(np.clip(clip, -1, 1), np.float32)


def require_decoders() -> None:
    """Import the packages that decode sounds, see `require_packages`."""
    require_packages("reading sound files", "soundfile", "soxr")


def clip_starts(frames: int, clip_frames: int, max_clips: int) -> list[int]:
    """The first frames of the clips of a sound: as many clips as cover it, but at most `max_clips`, spread evenly from
    its beginning to its end. Clips that cover it overlap a little. A single clip of a longer sound is its middle."""
    spare = frames - clip_frames
    if spare <= 0:
        return [0]
    count = min(max_clips, math.ceil(frames / clip_frames))
    return [spare // 2] if count == 1 else [i * spare // (count - 1) for i in range(count)]


@contextlib.contextmanager
def _open_sound(ref: FileRef) -> Iterator[Any]:
    """An open soundfile.SoundFile. Errors of libsndfile inside the context become ValueErrors of one line."""
    import soundfile

    is_local = ref.is_local_file
    try:
        with open_regular(ref.path) if is_local else open_range(ref) as file, _silenced_worker():
            content = file if isinstance(file, FileWindow | MemoryFile) else LocalFile(file)
            if not content.size:
                raise ValueError("the file is empty")
            # By descriptor, because file names need not be valid text.
            with soundfile.SoundFile(file.fileno() if is_local else file, closefd=False) as sound:
                if sound.format != "FLAC" or sound.frames < _UNKNOWN_FRAMES:
                    if sound.format == "OGG":
                        _check_not_chained(sound, content)
                    yield sound
                    return
            with soundfile.SoundFile(_state_flac_length(content)) as sound:
                yield sound
    except RuntimeError as error:  # raised by libsndfile
        reason = f"libsndfile cannot read it: {' '.join(str(getattr(error, 'error_string', error)).split())}"
        raise ValueError(wrong_kind_text(ref.read(LONGEST_BEGINNING)) or reason) from None


def _check_not_chained(sound: Any, file: RandomAccessFile) -> None:
    """Raise ValueError, in one line, if an Ogg file holds a stream of another serial number behind the first."""
    if "Junk after the last page" not in sound.extra_info:  # libsndfile reports what follows the first stream
        return
    tail = file.pread(2 * _MAX_OGG_PAGE_BYTES, max(0, file.size - 2 * _MAX_OGG_PAGE_BYTES))
    serials = set(re.findall(rb"OggS\0.{9}(.{4})", tail, re.DOTALL))
    if serials - {file.pread(4, 14)}:
        raise ValueError("it holds several streams one after the other: write them as one (ffmpeg -i OLD NEW.flac)")


def _state_flac_length(file: RandomAccessFile) -> io.BytesIO:
    """A copy of a FLAC file whose header states its length, which is counted by decoding it: up to where it is cut off
    or damaged. Raises ValueError, in one line, if no sample can be decoded."""
    import soundfile

    class ForwardSound(soundfile.SoundFile):
        def seekable(self) -> bool:  # else each read seeks, which libsndfile refuses at an end that it does not know
            return False

    content = bytearray(file.pread(file.size, 0))
    length, n = 0, _COUNTED_FRAMES
    with ForwardSound(io.BytesIO(content)) as sound:
        while n == _COUNTED_FRAMES:
            samples = np.full((_COUNTED_FRAMES, sound.channels), np.nan)
            with contextlib.suppress(soundfile.LibsndfileError):  # of a frame that is cut off, or no frame but a tag
                sound.read(out=samples)
            n = int(np.isfinite(samples[:, 0]).sum())
            length += n
    if not 0 < length < 1 << _FLAC_LENGTH_BITS:
        raise ValueError("its header does not state its length, and it holds no whole frame")
    begin = content.index(b"fLaC") + _FLAC_LENGTH_OFFSET  # an ID3 tag may precede it
    field = int.from_bytes(content[begin : begin + 8], "big") >> _FLAC_LENGTH_BITS << _FLAC_LENGTH_BITS | length
    content[begin : begin + 8] = field.to_bytes(8, "big")
    return io.BytesIO(content)


@contextlib.contextmanager
def _silenced_worker() -> Iterator[None]:
    """Silence stderr in a loader worker, because the MP3 decoder prints a warning at every seek. The main process is
    not silenced, because other threads may write to its stderr."""
    if get_worker_info() is None:
        yield
        return
    stderr, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)


def _clip_step(rate: int, target: int) -> int:
    """Distance in frames between possible starts of a clip. A clip starts where the resampled file has a sample too, so
    that it is a part of the resampled file, unless such samples are more than 1/20 s apart."""
    step = rate // math.gcd(rate, target)
    return step if step <= rate // 20 else 1


def _find_part(sound: Any, ref: FileRef) -> tuple[int, int]:
    """The first frame of the requested part, and the one behind its last. Raises ValueError, in one line, if there is
    no such part, or the header is impossible."""
    if not SAMPLE_RATES[0] <= sound.samplerate <= SAMPLE_RATES[1]:
        raise ValueError(f"it states a sample rate of {sound.samplerate} Hz")
    if sound.frames <= 0:
        raise ValueError("it holds no sound")
    stated, actual = map(int, match.groups()) if (match := _TRUNCATED_CHUNK.search(sound.extra_info)) else (0, 0)
    if actual < stated < _UNKNOWN_SIZE:
        raise ValueError(f"it is cut off: {actual} bytes of sound, where its header states {stated}")
    rate = sound.samplerate
    first = min(round(ref.start_seconds * rate), sound.frames)
    last = round(min(ref.end_seconds * rate, sound.frames))
    if first >= last:
        raise ValueError(f"it lasts {sound.frames / rate:g} s, and its clip begins at {ref.start_seconds:g} s")
    return first, last


def _read_mono(sound: Any, first: int, n: int) -> Array:
    """Frames first .. first + n - 1, (n,), the mean of all channels; an MP3 file may give a few less."""
    sound.seek(first)
    frames = sound.read(n, dtype="float32", always_2d=True)
    if len(frames) < max(n - (_MP3_LENGTH_ERROR if sound.format == "MP3" else 0), 1):
        end, stated_end = (first + len(frames)) / sound.samplerate, sound.frames / sound.samplerate
        raise ValueError(f"it is cut off: it ends after {end:g} s, where its header states {stated_end:g} s")
    mono: Array = frames[:, 0] if frames.shape[1] == 1 else frames.mean(axis=1)
    amplitude = float(np.abs(mono).max())
    if not math.isfinite(amplitude):
        raise ValueError("it holds samples that are no numbers (NaN or infinite)")
    if amplitude > _MAX_AMPLITUDE:
        raise ValueError(f"its samples reach {amplitude:g}, where those of a file of floats are in [-1, 1]")
    return mono
