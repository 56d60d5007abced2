"""The last frame of a FLAC file (RFC 9639), which gives the length of the stream where the header does not state it, as
after writing to a pipe, or where another file was appended. No other part of the file is read."""

from __future__ import annotations

import functools
import io
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

_MOST_AT_START = 1 << 20  # bytes; an ID3 tag may precede the stream
_LEAST_AT_END, _MOST_AT_END = 1 << 16, 1 << 23  # bytes; a frame has at most 65535 samples of 8 channels
_STREAM_INFO = 8  # bytes from "fLaC" to its content
_LENGTH_BITS = 36  # of the 64 that begin with the sample rate
_CRC_8, _CRC_16 = (8, 0x07), (16, 0x8005)
_TAGS = re.compile(rb"TAG|APETAGEX|ID3")  # tags that programs write behind the last frame

Read = Callable[[int, int], bytes]  # offset, size -> bytes


def with_length(file: Any) -> io.RawIOBase:
    """A FLAC file with its length written into its header. A truncated last frame is not counted.

    Raises ValueError, in one line, if no frames are found at its end.
    """
    file.seek(0)
    start = file.read(_MOST_AT_START)
    info = start.find(b"fLaC") + _STREAM_INFO
    last = _find_last(_make_reader(file), file.seek(0, os.SEEK_END), int.from_bytes(start[info + 2 : info + 4], "big"))
    total = last.first + (last.samples if last.is_whole else 0) if last else 0
    if not 0 < total < 1 << _LENGTH_BITS:
        raise ValueError("its header does not state its length, and no whole frame of a FLAC file is at its end")
    # The sample rate, the number of channels and the bits of a sample.
    format_bits = int.from_bytes(start[info + 10 : info + 18], "big") >> _LENGTH_BITS << _LENGTH_BITS
    file.seek(0)
    return _PatchedFile(file, start[: info + 10] + (format_bits | total).to_bytes(8, "big"))


class _PatchedFile(io.RawIOBase):
    """A file whose first bytes are replaced."""

    def __init__(self, file: Any, start: bytes) -> None:
        self._file, self._start = file, start

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position: int = self._file.seek(offset, whence)
        return position

    def tell(self) -> int:
        position: int = self._file.tell()
        return position

    def readinto(self, buffer: Any) -> int:
        at = self.tell()
        n: int = self._file.readinto(buffer)
        patch = self._start[at : at + n]
        memoryview(buffer).cast("B")[: len(patch)] = patch
        return n


class _LastFrame(NamedTuple):
    """The number of its first sample, how many it has, and whether the file holds all of it."""

    first: int
    samples: int
    is_whole: bool


def ends_elsewhere(read: Read, n_bytes: int, frames: int) -> bool:
    """Whether a file of n_bytes ends with a whole frame other than the last one by the length in its header, because
    another file was appended. An appended file of the same length is not detected."""
    info = read(0, _STREAM_INFO + 4)
    if not info.startswith(b"fLaC"):  # but begins with a tag
        return False
    block = int.from_bytes(info[-2:], "big")
    begin = max(0, n_bytes - 3 * n_bytes * block // max(2 * frames, 1) - 16)  # 1.5 times the mean size of a frame
    if any(first + samples == frames for _, first, samples in _find_frames(read(begin, n_bytes - begin), block)):
        return False  # the usual case
    last = _find_last(read, n_bytes, block)
    return last is not None and last.is_whole and last.first + last.samples != frames


def _make_reader(file: Any) -> Read:
    def read(offset: int, size: int) -> bytes:
        file.seek(offset)
        content: bytes = file.read(size)
        return content

    return read


def _find_last(read: Read, n_bytes: int, block: int) -> _LastFrame | None:
    """The last frame of a file; None if none is found. `block`: the samples of each frame but the last."""
    n = _LEAST_AT_END
    while n <= _MOST_AT_END:
        begin = max(0, n_bytes - n)
        content = read(begin, n)
        frames = _find_frames(content, block)
        ends = {first + samples for _, first, samples in frames}
        for at, first, samples in reversed(frames):
            if first in ends or (first == 0 and begin == 0):  # a chance match does not follow another frame
                return _LastFrame(first, samples, _is_whole(content[at:]))
        if begin == 0:
            break
        n *= 4
    return None


def _is_whole(content: bytes) -> bool:
    """Whether the frame at the start of `content` ends with a right checksum, at the end or before a tag."""
    ends = [*(tag.start() for tag in _TAGS.finditer(content)), len(content)]
    return any(_compute_remainder(content[:end], *_CRC_16) == 0 for end in ends)


def _find_frames(content: bytes, block: int) -> list[tuple[int, int, int]]:
    """Candidates for frames: the position, the number of the first sample, and the number of samples."""
    frames, at = [], content.find(b"\xff")
    while at >= 0:
        if content[at + 1 : at + 2] in (b"\xf8", b"\xf9") and (header := _parse_frame(content[at : at + 16], block)):
            frames.append((at, *header))
        at = content.find(b"\xff", at + 1)
    return frames


def _parse_frame(header: bytes, block: int) -> tuple[int, int] | None:
    """The number of a frame's first sample and its number of samples; None if this is no frame header."""
    if len(header) < 16:
        header += bytes(16 - len(header))
    kind, code, rate, ones = header[1] & 1, header[2] >> 4, header[2] & 15, 8 - (header[4] ^ 0xFF).bit_length()
    if code == 0 or rate == 15 or header[3] & 1 or ones in (1, 8):
        return None
    end = 4 + max(1, ones)
    number = header[4] & (0x7F >> ones)
    for byte in header[5:end]:  # coded as in UTF-8
        number = number << 6 | byte & 0x3F
    samples = 192 if code == 1 else 576 << (code - 2) if code < 6 else 256 << (code - 8) if code > 7 else 0
    if not samples:
        width = code - 5
        samples, end = int.from_bytes(header[end : end + width], "big") + 1, end + width
    end += {12: 1, 13: 2, 14: 2}.get(rate, 0)
    if _compute_remainder(header[: end + 1], *_CRC_8):
        return None
    return (number if kind else number * block), samples


def _compute_remainder(content: bytes, bits: int, polynomial: int) -> int:
    """The cyclic redundancy check of bytes; 0 if they end with their own."""
    table, remainder, mask = _build_table(bits, polynomial), 0, (1 << bits) - 1
    for byte in content:
        remainder = (remainder << 8 & mask) ^ table[remainder >> (bits - 8) ^ byte]
    return remainder


@functools.cache
def _build_table(bits: int, polynomial: int) -> list[int]:
    table = [value << (bits - 8) for value in range(256)]
    for _ in range(8):
        table = [(value << 1) ^ (polynomial | 1 << bits if value >> (bits - 1) else 0) for value in table]
    return table
