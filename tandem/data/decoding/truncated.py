"""Detection of truncated Matroska and GIF files, which FFmpeg reads as shorter videos."""

from __future__ import annotations

import os
from typing import Any

# The first elements of Matroska (RFC 9559): the header, and the segment, which holds the rest.
_HEADER, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
_START_BYTES, _END_BYTES = 1 << 10, 1 << 6  # that are read
_TRAILER = b"\0;"  # the end of the last block of a GIF, and the end of the file; some programs omit the ;


def check_not_truncated(file: Any) -> None:
    """Raise ValueError, in one line, if an open Matroska, WebM or GIF file is cut off. An unfinished recording of
    Matroska states no length and is accepted."""
    start = file.read(_START_BYTES)
    n_bytes = file.seek(0, os.SEEK_END)
    if start.startswith(_HEADER) and (stated_size := _read_matroska_size(start)) > n_bytes:
        raise ValueError(f"it is cut off: it has {n_bytes} bytes, where its header states {stated_size}")
    if start.startswith(b"GIF8"):
        file.seek(max(0, n_bytes - _END_BYTES))
        end = file.read(_END_BYTES)
        if _TRAILER not in end and not end.endswith(b"\0"):
            raise ValueError("it is cut off: it lacks the mark with which a GIF ends")
    file.seek(0)


def _read_matroska_size(start: bytes) -> int:
    """The size of a file in bytes by its header; 0 if it states none."""
    size, offset = _read_number(start, len(_HEADER))
    offset += size
    if start[offset : offset + len(_SEGMENT)] != _SEGMENT:
        return 0
    size, begin = _read_number(start, offset + len(_SEGMENT))
    is_unknown = size + 1 == 1 << 7 * (begin - offset - len(_SEGMENT))  # all bits are 1
    return 0 if is_unknown else begin + size


def _read_number(content: bytes, offset: int) -> tuple[int, int]:
    """A number of variable length (RFC 8794), whose number of bytes is 1 + that of its leading zero bits; and the
    offset behind it."""
    n = 9 - int.from_bytes(content[offset : offset + 1], "big").bit_length()
    return int.from_bytes(content[offset : offset + n], "big") & (1 << 7 * n) - 1, offset + n
