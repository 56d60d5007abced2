"""The length of a FLAC file that was written into a pipe, whose header does not state it (RFC 9639): that of its last
frame says where it ends. No other part of the file is read."""

from __future__ import annotations

import functools
import io
import os
from typing import Any

_MOST_AT_START = 1 << 20  # bytes, of an ID3 tag before the stream
_LEAST_AT_END, _MOST_AT_END = 1 << 16, 1 << 23  # bytes; a frame has at most 65535 samples of 8 channels
_STREAM_INFO = 8  # bytes from "fLaC" to what it says
_LENGTH_BITS = 36  # of the 64 that begin with the sample rate
_CRC_8, _CRC_16 = (8, 0x07), (16, 0x8005)


def with_length(file: Any) -> io.RawIOBase:
    """A FLAC file whose header states its length. Of a last frame that is cut off nothing counts.

    Raises ValueError, in one line, if no frames are found at its end.
    """
    file.seek(0)
    start = file.read(_MOST_AT_START)
    info = start.find(b"fLaC") + _STREAM_INFO
    total = _length(file, int.from_bytes(start[info + 2 : info + 4], "big"))
    if not 0 < total < 1 << _LENGTH_BITS:
        raise ValueError("its header does not state its length, and no whole frame of a FLAC file is at its end")
    stated = (
        int.from_bytes(start[info + 10 : info + 18], "big") >> _LENGTH_BITS << _LENGTH_BITS
    )  # rate, channels and bits of a sample
    file.seek(0)
    return _Patched(file, start[: info + 10] + (stated | total).to_bytes(8, "big"))


class _Patched(io.RawIOBase):
    """A file that begins with other bytes than are in it."""

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
        changed = self._start[at : at + n]
        memoryview(buffer).cast("B")[: len(changed)] = changed
        return n


def _length(file: Any, block: int) -> int:
    """Samples per channel, 0 if no frame is found. `block`: those of a frame, where all but the last have as many."""
    size, n = file.seek(0, os.SEEK_END), _LEAST_AT_END
    while n <= _MOST_AT_END:
        begin = max(0, size - n)
        file.seek(begin)
        content = file.read(n)
        frames = _frames(content, block)
        ends = {first + samples for _, first, samples in frames}
        for at, first, samples in reversed(frames):
            if first in ends or (first == 0 and begin == 0):  # bytes that look like a frame by chance follow none
                return first + (samples if _remainder(content[at:], *_CRC_16) == 0 else 0)
        if begin == 0:
            break
        n *= 4
    return 0


def _frames(content: bytes, block: int) -> list[tuple[int, int, int]]:
    """What looks like the beginning of a frame: its place, the number of its first sample, and how many it has."""
    frames, at = [], content.find(b"\xff")
    while at >= 0:
        if content[at + 1 : at + 2] in (b"\xf8", b"\xf9") and (found := _frame(content[at : at + 16], block)):
            frames.append((at, *found))
        at = content.find(b"\xff", at + 1)
    return frames


def _frame(header: bytes, block: int) -> tuple[int, int] | None:
    """The number of the first sample of a frame and how many it has; None if this is no header of one."""
    if len(header) < 16:
        header += bytes(16 - len(header))
    kind, code, rate, ones = header[1] & 1, header[2] >> 4, header[2] & 15, 8 - (header[4] ^ 0xFF).bit_length()
    if code == 0 or rate == 15 or header[3] & 1 or ones in (1, 8):
        return None
    end = 4 + max(1, ones)
    number = header[4] & (0x7F >> ones)
    for byte in header[5:end]:  # as UTF-8 writes it
        number = number << 6 | byte & 0x3F
    samples = 192 if code == 1 else 576 << (code - 2) if code < 6 else 256 << (code - 8) if code > 7 else 0
    if not samples:
        width = code - 5
        samples, end = int.from_bytes(header[end : end + width], "big") + 1, end + width
    end += {12: 1, 13: 2, 14: 2}.get(rate, 0)
    if _remainder(header[: end + 1], *_CRC_8):
        return None
    return (number if kind else number * block), samples


def _remainder(content: bytes, bits: int, polynomial: int) -> int:
    """The cyclic redundancy check of bytes; 0 of those that end with theirs."""
    table, remainder, mask = _table(bits, polynomial), 0, (1 << bits) - 1
    for byte in content:
        remainder = (remainder << 8 & mask) ^ table[remainder >> (bits - 8) ^ byte]
    return remainder


@functools.cache
def _table(bits: int, polynomial: int) -> list[int]:
    table = [value << (bits - 8) for value in range(256)]
    for _ in range(8):
        table = [(value << 1) ^ (polynomial | 1 << bits if value >> (bits - 1) else 0) for value in table]
    return table
