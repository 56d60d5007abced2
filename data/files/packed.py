"""Many strings in little memory, which forked loader workers share."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator


class PackedStrings:
    """Strings in two flat buffers. Reading a list of str would change reference counts, and so make every forked worker
    copy the memory pages of the list."""

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self._bytes, self._ends = bytearray(), array("q", [0])
        for string in strings:
            self.append(string)

    def append(self, string: str) -> None:
        """Add a string. A string that is no valid UTF-8 must come from `os.fsdecode`."""
        self._bytes += os.fsencode(string)
        self._ends.append(len(self._bytes))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return os.fsdecode(bytes(self._bytes[self._ends[index] : self._ends[index + 1]]))
