"""Numpy arrays of floats in .npy files. Only the header and the requested rows are read."""

from __future__ import annotations

import io
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.data.sources.files import redact
from tandem.data.sources.record import FileRef, open_range
from tandem.io.reading import wrong_kind_text

Array = npt.NDArray[np.float32]

MAX_SAMPLE_BYTES = 1 << 26  # of the array of one sample
_MAX_HEADER_BYTES = 4096  # numpy writes 128 for arrays of plain numbers
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class StoredArray(NamedTuple):
    """An array of floats in a .npy file: the first byte of its numbers, its shape and their type."""

    ref: FileRef
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, limit: int = MAX_SAMPLE_BYTES) -> Array:
        """The whole array as float32. Raises OSError, and ValueError, in one line, if it has more bytes than `limit` or
        is cut off."""
        return self._read_numbers(0, self.shape, limit)

    def row(self, index: int) -> Array:
        """Entry `index` of the first dimension as float32. Raises what `read` raises."""
        assert 0 <= index < self.shape[0], (index, self.shape)
        return self._read_numbers(index, self.shape[1:], MAX_SAMPLE_BYTES)

    def _read_numbers(self, index: int, shape: tuple[int, ...], limit: int) -> Array:
        size = math.prod(shape) * self.dtype.itemsize
        if size > limit:
            raise ValueError(f"{redact(self.ref.path)} holds {size} bytes where at most {limit} are read")
        content, _ = _read_part(self.ref, self.offset + index * size, size)
        if len(content) < size:
            raise ValueError(f"{redact(self.ref.path)} was cut off after it was opened")
        return np.frombuffer(content, self.dtype).reshape(shape).astype(np.float32)


def read_array_header(ref: FileRef) -> StoredArray:
    """The array of a .npy file, or of the part of a file that is one; only the header is read.

    Raises OSError if the file cannot be read and ValueError, in one line, if it holds no array of floats in C order, or
    is cut off.
    """
    content, size = _read_part(ref, 0, _MAX_HEADER_BYTES)
    header = io.BytesIO(content)
    try:
        shape, is_fortran, dtype = _HEADERS[np.lib.format.read_magic(header)](header)
    except Exception:  # numpy parses the header as Python, so a damaged one can raise anything
        raise ValueError(wrong_kind_text(content) or "it is no numpy array (.npy)") from None
    if dtype.kind != "f" or is_fortran:
        kind = "an array in Fortran order" if is_fortran else f"numbers of the type {dtype}"
        raise ValueError(f"it holds {kind}: save it as float16 or float32 in C order")
    n_bytes = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or header.tell() + n_bytes > size:
        raise ValueError(f"it is cut off: an array of shape {shape} takes {n_bytes} bytes")
    if header.tell() + n_bytes < size:
        raise ValueError(f"more follows its array of shape {shape}: give one array per file")
    return StoredArray(ref, header.tell(), shape, dtype)


def _read_part(ref: FileRef, offset: int, size: int) -> tuple[bytes, int]:
    """At most `size` bytes from `offset` of a file, and the size of the file."""
    with open_range(ref) as file:
        if not file.size:
            raise ValueError("the file is empty")
        return file.pread(size, offset), file.size
