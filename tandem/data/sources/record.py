"""Records, which hold the content of samples; and references to files: a whole file, a part of a tar, or bytes in
memory."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tandem.io.reading import open_regular

from .files import FileWindow, LocalFile, MemoryFile, RandomAccessFile, is_url

MOST_EXAMPLES = 100


class FieldSpec(NamedTuple):
    """What a field reads from the records of a source. A script has a list of them: every file, member of a tar or row
    with content for the first one is a sample, and content for the others is found beside it.

    Args:
        name: The key in a record.
        noun: What messages call it, in the singular.
        endings: Of its files, in lower case, with the dot; the case of a file's ending does not matter. Of several
            files the one whose ending comes first is taken.
        columns: Names of its columns in tables and manifests, in order of preference; and keys of the items of a user's
            dataset.
        feature: The type of its column in the metadata of the library datasets, such as "Image"; "" for any.
        as_cells: For texts: a record holds the row's cells of all these columns, by column. Otherwise it holds the
            content of the first existing column, a file or an array of numbers, and the source's index stores the size
            of each file, for `examples`.
        further: Further endings; in a tar, only where no file of `endings` has the same name.
    """

    name: str
    noun: str
    endings: tuple[str, ...]
    columns: tuple[str, ...] = ()
    feature: str = ""
    as_cells: bool = False
    further: tuple[str, ...] = ()

    @property
    def all_endings(self) -> tuple[str, ...]:
        """`endings`, then `further`."""
        return self.endings + self.further


class FileRef(NamedTuple):
    """A file, or a byte range of one; and, for a sound or video, the time range from which clips are cut. `member` is
    the name of the file inside a tar. `content` is set if the file is in memory (see `in_memory`). `beside` is the file
    of the last of several endings of texts, which are read from it if this file has no caption."""

    path: str
    offset: int = 0
    size: int | None = None
    start_seconds: float = 0.0
    end_seconds: float = math.inf
    member: str = ""
    content: Any = None
    beside: Any = None

    @classmethod
    def in_memory(cls, content: Any, path: str, member: str = "") -> FileRef:
        """A file in memory: `content` has the buffer protocol; `path` is the name in messages."""
        return cls(path, 0, len(content), member=member, content=content)

    @property
    def name(self) -> str:
        """The name of the file, whose ending gives its kind."""
        return self.member or self.path

    @property
    def is_local_file(self) -> bool:
        """Whether it is a whole file on this machine, which libraries may open by themselves."""
        return self.content is None and self.size is None and "://" not in self.path

    def read(self, limit: int) -> bytes:
        """At most the first `limit` bytes. Raises OSError and ValueError."""
        with open_range(self, ahead=0) as file:
            return file.pread(limit, 0)


class Files(NamedTuple):
    """Tars, tables or a manifest, in order; paths in the rows of tables are relative to `folder`, and `skipped` is a
    line about other files there."""

    paths: list[str]
    folder: str = ""
    skipped: str = ""


# The content of a sample by `FieldSpec.name`; a name is missing where the sample lacks it. A value is a `FileRef`; in
# tables and manifests also a mapping of cells (`as_cells`) or an array of numbers; in a user's dataset the item; in a
# demonstration a function that generates the content.
Record = Mapping[str, Any]


class RecordSource(Protocol):
    """Numbered records. Sources with equal `fingerprint` have the same names in the same order; `skipped` is a line
    about files that are no samples, or ""; `shards` are the indices of the records of each tar (or file of a table),
    None where there are none."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def skipped(self) -> str: ...
    @property
    def shards(self) -> Sequence[range] | None: ...
    def __len__(self) -> int: ...
    def record(self, index: int, epoch: int = 0, augment: bool = False) -> Record:
        """Raises OSError or ValueError, in one line, if the record cannot be read. Only items of a user's dataset are
        random, by the seed and these arguments. The main process calls it, too, before and after it forks the loader's
        workers: a handle that may not cross a fork is closed by `os.register_at_fork(before=...)`."""
        ...

    def name(self, index: int) -> str:
        """The name of a sample in a store: its path relative to the folder or in its tar, with '/' between parts."""
        ...

    def describe(self, index: int) -> str:
        """The name by which a user finds the sample: its path."""
        ...

    def examples(self, name: str) -> Sequence[int]:
        """The indices of at most `MOST_EXAMPLES` records with content of this name; of a field that is not `as_cells`
        those with the largest files, the largest first, if the sizes are known. Empty if there are none."""
        ...


@contextlib.contextmanager
def open_range(
    ref: FileRef, is_part: bool | None = None, ahead: int | None = None
) -> Iterator[FileWindow | MemoryFile]:
    """Open what a `FileRef` refers to, on this machine, on a server or in memory, for random access.

    Args:
        is_part: Whether one of many samples in the file is read, by default whether `ref` is a byte range. Then a
            file on a server is fetched into the cache as a whole, if there is a cache.
        ahead: How many bytes will be read in small steps, by default all: from a server, they are requested in larger
            ones. 0: each read requests only its own bytes.

    Raises OSError, and ValueError, in one line, if it is a pipe or a device. At the end of the context it raises an
    error of the file system that C code took for the end of the file.
    """
    if ref.content is not None:
        yield MemoryFile(ref.content)
        return
    with contextlib.ExitStack() as stack:
        file: RandomAccessFile
        if is_url(ref.path):
            from .remote import open_remote

            size = sys.maxsize if ref.size is None else ref.size
            is_part = ref.size is not None if is_part is None else is_part
            file = stack.enter_context(open_remote(ref.path, is_part, size if ahead is None else ahead))
        else:
            file = LocalFile(stack.enter_context(open_regular(ref.path)))
        # The size of a file on a server costs a request, which a single read may not need.
        window = FileWindow(file, ref.offset, file.size if ref.size is None and ahead != 0 else ref.size)
        try:
            yield window
        finally:
            if window.error:
                raise window.error from None
