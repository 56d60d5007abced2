"""Detection of sound files to which others were appended, as by `cat`: libsndfile decodes only the first one."""

from __future__ import annotations

import re
from typing import Any, Literal

from .flac import Read, ends_elsewhere

_LONGEST_PAGE = 1 << 16  # bytes of a page of Ogg, rounded up (RFC 3533)
_LONGEST_FRAME = 1441  # bytes of a frame of MP3
_ID3V1 = 128  # bytes of a tag behind an MP3
# Offsets of the Xing tag in the first frame, by MPEG version and channels, without and with a checksum.
_XING_OFFSETS = (13, 15, 21, 23, 36, 38)

_MOST_CHUNKS = 100  # of a CAF file that are read


def check_nothing_appended(sound: Any, read: Read, n_bytes: int) -> None:
    """Raise ValueError, in one line, if an open soundfile.SoundFile of n_bytes holds a second stream behind the first.
    Signs of one: in Ogg another serial number; in MP3 data behind the length in the Xing tag (without the tag
    libsndfile reads all); in FLAC the number of the last frame; in others a second header where the first stream ends.
    libsndfile itself refuses such WAV and AIFF files."""
    is_longer = {
        "OGG": lambda: _is_chained_ogg(sound, read, n_bytes),
        "MP3": lambda: _has_more_mp3(read, n_bytes),
        "FLAC": lambda: ends_elsewhere(read, n_bytes, sound.frames),
        "AU": lambda: _has_second_header(read, sum(int.from_bytes(read(at, 4), _au_byte_order(read)) for at in (4, 8))),
        "W64": lambda: _has_second_header(read, int.from_bytes(read(16, 8), "little")),
        "CAF": lambda: _has_second_header(read, _find_caf_end(read)),
    }.get(sound.format)
    if is_longer and is_longer():
        raise ValueError(
            "it holds several streams one after the other, of which the first alone would be heard: write them as one, "
            "such as by ffmpeg -i OLD NEW.flac"
        )


def _has_second_header(read: Read, end: int) -> bool:
    return 0 < end < 1 << 62 and read(end, 4) == read(0, 4)


def _au_byte_order(read: Read) -> Literal["big", "little"]:
    return "big" if read(0, 4) == b".snd" else "little"


def _find_caf_end(read: Read) -> int:
    """The end of the chunks of a CAF file; each is a name of 4 bytes, a length of 8 bytes, and the content."""
    at = 8
    for _ in range(_MOST_CHUNKS):
        header = read(at, 12)
        if len(header) < 12 or header[:4] == b"caff":
            break
        at += 12 + int.from_bytes(header[4:], "big")
    return at


def _is_chained_ogg(sound: Any, read: Read, n_bytes: int) -> bool:
    if "Junk after the last page" not in sound.extra_info:  # libsndfile reports what follows this stream
        return False
    tail = read(max(0, n_bytes - 2 * _LONGEST_PAGE), 2 * _LONGEST_PAGE)
    serials = {tail[match.start() + 14 : match.start() + 18] for match in re.finditer(b"OggS\0", tail)}
    return any(len(serial) == 4 and serial != read(14, 4) for serial in serials)


def _has_more_mp3(read: Read, n_bytes: int) -> bool:
    """Whether MP3 frames, or tags before such, follow the end that the first stream states."""
    head, start = read(0, 10), 0
    if head[:3] == b"ID3":
        start = 10 + sum(byte << 7 * (3 - offset) for offset, byte in enumerate(head[6:10]))
    frame = read(start, _LONGEST_FRAME)
    offset = next((at + 4 for at in _XING_OFFSETS if frame[at : at + 4] in (b"Xing", b"Info")), 0)
    flags = int.from_bytes(frame[offset : offset + 4], "big") if offset else 0
    if not flags & 2:  # no number of bytes
        return False
    offset += 8 if flags & 1 else 4  # behind a number of frames
    end = start + int.from_bytes(frame[offset : offset + 4], "big")
    if end + _ID3V1 + 2 * _LONGEST_FRAME > n_bytes:  # some programs do not count the first frame
        return False
    tail = read(end, _ID3V1 + 3)
    tail = tail[_ID3V1:] if tail[:3] == b"TAG" else tail
    return tail[:2] == frame[:2] or tail[:3] == b"ID3"
