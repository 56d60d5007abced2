"""The last frame of a FLAC file (RFC 9639). It gives the length of the stream if the header states none, as after
writing to a pipe, or a wrong one, as where another file was appended. No other part of the file is read."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from tandem.data.sources.files import FileWindow, RandomAccessFile, SeekableFile

_START_BYTES = 1 << 20  # of the file's start that are read: an ID3 tag may precede the stream
# Bytes of the file's end in which the last frame is searched. A frame has at most 65535 samples of 8 channels.
_MIN_END_BYTES, _MAX_END_BYTES = 1 << 16, 1 << 23
# Bytes from "fLaC" to the content of the block STREAMINFO. In it, bytes 2 and 3 are the largest block size, and bytes
# 10 to 17 the sample rate, the number of channels, the bits of a sample and the length.
_STREAM_INFO_OFFSET = 8
_LENGTH_BITS = 36  # the last ones of bytes 10 to 17
_CRC_8, _CRC_16 = (8, 0x07), (16, 0x8005)
_TAG_MARKS = re.compile(rb"TAG|APETAGEX|ID3")  # tags that programs write behind the last frame


def restore_length(file: RandomAccessFile) -> FileWindow:
    """The FLAC file with a header that states its length, which is found from its last frame. A truncated last frame is
    not counted.

    Raises ValueError, in one line, if no frames are found at its end.
    """
    start = file.pread(_START_BYTES, 0)
    info_offset = start.find(b"fLaC") + _STREAM_INFO_OFFSET
    last = _find_last_frame(file, int.from_bytes(start[info_offset + 2 : info_offset + 4], "big"))
    total = last.first + (last.samples if last.is_whole else 0) if last else 0
    if not 0 < total < 1 << _LENGTH_BITS:
        raise ValueError("its header does not state its length, and no whole frame of a FLAC file is at its end")
    # The sample rate, the number of channels and the bits of a sample.
    format_bits = int.from_bytes(start[info_offset + 10 : info_offset + 18], "big") >> _LENGTH_BITS << _LENGTH_BITS
    header = start[: info_offset + 10] + (format_bits | total).to_bytes(8, "big")
    return FileWindow(_PatchedFile(file, header))


class _PatchedFile(SeekableFile):
    """A file whose first bytes are replaced."""

    def __init__(self, file: RandomAccessFile, header: bytes) -> None:
        self._file, self._header = file, header

    @property
    def size(self) -> int:
        return self._file.size

    def pread(self, size: int, offset: int) -> bytes:
        replaced = self._header[offset : offset + size]
        return replaced + self._file.pread(size - len(replaced), offset + len(replaced))


class _LastFrame(NamedTuple):
    """A frame: the index of its first sample, the count of its samples, and whether the file holds all of it."""

    first: int
    samples: int
    is_whole: bool


def last_frame_ends_elsewhere(file: RandomAccessFile, n_samples: int) -> bool:
    """Whether the last frame ends at another sample than `n_samples`, the length per channel in the header. Then
    another file was appended. An appended file of the same length is not detected."""
    info, n_bytes = file.pread(_STREAM_INFO_OFFSET + 4, 0), file.size
    if not info.startswith(b"fLaC"):  # it begins with a tag
        return False
    block_size = int.from_bytes(info[-2:], "big")
    # The usual case: the last frame is in the last bytes, 1.5 times the mean size of a frame, and ends where it should.
    begin = max(0, n_bytes - 3 * n_bytes * block_size // max(2 * n_samples, 1) - 16)
    frames = _find_frames(file.pread(n_bytes - begin, begin), block_size)
    if any(first + samples == n_samples for _, first, samples in frames):
        return False
    last = _find_last_frame(file, block_size)
    return last is not None and last.is_whole and last.first + last.samples != n_samples


def _find_last_frame(file: RandomAccessFile, block_size: int) -> _LastFrame | None:
    """The last frame of a file; None if none is found. `block_size`: the samples of each frame but the last."""
    n = _MIN_END_BYTES
    while n <= _MAX_END_BYTES:
        begin = max(0, file.size - n)
        content = file.pread(n, begin)
        frames = _find_frames(content, block_size)
        ends = {first + samples for _, first, samples in frames}
        for position, first, samples in reversed(frames):
            if first in ends or (first == 0 and begin == 0):  # a chance match does not follow another frame
                return _LastFrame(first, samples, _is_whole(content[position:]))
        if begin == 0:
            break
        n *= 4
    return None


def _is_whole(content: bytes) -> bool:
    """Whether the frame at the start of `content` ends with a right checksum, at the end or before a tag."""
    ends = [*(tag.start() for tag in _TAG_MARKS.finditer(content)), len(content)]
    return any(_compute_remainder(content[:end], *_CRC_16) == 0 for end in ends)


def _find_frames(content: bytes, block_size: int) -> list[tuple[int, int, int]]:
    """Candidates for frames: the position, the index of the first sample, and the count of samples."""
    frames, position = [], content.find(b"\xff")
    while position >= 0:
        is_sync = content[position + 1 : position + 2] in (b"\xf8", b"\xf9")
        if is_sync and (header := _parse_frame(content[position : position + 16], block_size)):
            frames.append((position, *header))
        position = content.find(b"\xff", position + 1)
    return frames


def _parse_frame(header: bytes, block_size: int) -> tuple[int, int] | None:
    """The index of a frame's first sample and the count of its samples; None if this is no frame header."""
    if len(header) < 16:
        header += bytes(16 - len(header))
    is_variable, size_code, rate_code = header[1] & 1, header[2] >> 4, header[2] & 15
    # The number of the frame, or of its first sample if frames vary in size, is coded as in UTF-8: the first byte has
    # as many leading ones as the number has bytes; it has none if that is one byte.
    ones = 8 - (header[4] ^ 0xFF).bit_length()
    if size_code == 0 or rate_code == 15 or header[3] & 1 or ones in (1, 8):
        return None
    end = 4 + max(1, ones)
    number = header[4] & (0x7F >> ones)
    for byte in header[5:end]:
        number = number << 6 | byte & 0x3F
    if size_code in (6, 7):  # the size follows, in one byte or two
        width = size_code - 5
        samples, end = int.from_bytes(header[end : end + width], "big") + 1, end + width
    else:
        samples = 192 if size_code == 1 else 576 << (size_code - 2) if size_code < 6 else 256 << (size_code - 8)
    end += {12: 1, 13: 2, 14: 2}.get(rate_code, 0)
    if _compute_remainder(header[: end + 1], *_CRC_8):
        return None
    return (number if is_variable else number * block_size), samples


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
