"""Detection of sound files to which others were appended, as by `cat`: libsndfile would decode only the first one."""

from __future__ import annotations

import re
from typing import Any, Literal

from tandem.data.sources.files import RandomAccessFile

from .flac import last_frame_ends_elsewhere

_MAX_OGG_PAGE_BYTES = 1 << 16  # rounded up (RFC 3533)
_MAX_MP3_FRAME_BYTES = 1441
_ID3V1_BYTES = 128  # of a tag behind an MP3
# Offsets of the Xing tag in the first frame, by MPEG version and channels, without and with a checksum.
_XING_OFFSETS = (13, 15, 21, 23, 36, 38)
_MAX_CAF_CHUNKS = 100  # that are read


def check_nothing_appended(sound: Any, file: RandomAccessFile) -> None:
    """Raise ValueError, in one line, if the file of an open soundfile.SoundFile holds a second stream behind the first.
    Signs of a second stream: for Ogg, another serial number; for MP3, data behind the length that the Xing tag states
    (without the tag libsndfile reads all); for FLAC, a last frame that does not end at the length in the header; for
    other formats, a second header where the first stream ends. libsndfile itself refuses such WAV and AIFF files."""
    detect = {
        "OGG": lambda: _is_chained_ogg(sound, file),
        "MP3": lambda: _has_more_mp3(file),
        "FLAC": lambda: last_frame_ends_elsewhere(file, sound.frames),
        "AU": lambda: _has_second_header(file, _find_au_end(file)),
        "W64": lambda: _has_second_header(file, int.from_bytes(file.pread(8, 16), "little")),
        "CAF": lambda: _has_second_header(file, _find_caf_end(file)),
    }.get(sound.format)
    if detect and detect():
        raise ValueError(
            "it holds several streams one after the other, of which the first alone would be heard: write them as one, "
            "such as by ffmpeg -i OLD NEW.flac"
        )


def _has_second_header(file: RandomAccessFile, end: int) -> bool:
    return 0 < end < 1 << 62 and file.pread(4, end) == file.pread(4, 0)


def _find_au_end(file: RandomAccessFile) -> int:
    """The end of the samples of an AU file: their offset plus their size."""
    byte_order: Literal["big", "little"] = "big" if file.pread(4, 0) == b".snd" else "little"
    return sum(int.from_bytes(file.pread(4, offset), byte_order) for offset in (4, 8))


def _find_caf_end(file: RandomAccessFile) -> int:
    """The end of the chunks of a CAF file; each is a name of 4 bytes, a length of 8 bytes, and the content."""
    offset = 8
    for _ in range(_MAX_CAF_CHUNKS):
        header = file.pread(12, offset)
        if len(header) < 12 or header[:4] == b"caff":
            break
        offset += 12 + int.from_bytes(header[4:], "big")
    return offset


def _is_chained_ogg(sound: Any, file: RandomAccessFile) -> bool:
    if "Junk after the last page" not in sound.extra_info:  # libsndfile reports what follows this stream
        return False
    tail = file.pread(2 * _MAX_OGG_PAGE_BYTES, max(0, file.size - 2 * _MAX_OGG_PAGE_BYTES))
    serials = {tail[match.start() + 14 : match.start() + 18] for match in re.finditer(b"OggS\0", tail)}
    return any(len(serial) == 4 and serial != file.pread(4, 14) for serial in serials)


def _has_more_mp3(file: RandomAccessFile) -> bool:
    """Whether MP3 frames, or tags before frames, follow the end that the first stream states."""
    head, start = file.pread(10, 0), 0
    if head[:3] == b"ID3":
        start = 10 + sum(byte << 7 * (3 - offset) for offset, byte in enumerate(head[6:10]))
    frame = file.pread(_MAX_MP3_FRAME_BYTES, start)
    offset = next((at + 4 for at in _XING_OFFSETS if frame[at : at + 4] in (b"Xing", b"Info")), 0)
    flags = int.from_bytes(frame[offset : offset + 4], "big") if offset else 0
    if not flags & 2:  # the tag states no number of bytes
        return False
    offset += 8 if flags & 1 else 4  # of the number of bytes; a number of frames may precede it
    end = start + int.from_bytes(frame[offset : offset + 4], "big")
    if end + _ID3V1_BYTES + 2 * _MAX_MP3_FRAME_BYTES > file.size:  # some programs do not count the first frame
        return False
    tail = file.pread(_ID3V1_BYTES + 3, end)
    tail = tail[_ID3V1_BYTES:] if tail[:3] == b"TAG" else tail
    return tail[:2] == frame[:2] or tail[:3] == b"ID3"
