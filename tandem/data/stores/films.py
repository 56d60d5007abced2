"""Writes the codes or latents of films of any length: what the model gives goes to the disk piece by piece, so that
neither a film nor a shard is ever in memory."""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from .output import explain_write_errors
from .shards import numbers_of, streamed_shard
from .writer import ShardWriter


class StreamedShard(NamedTuple):
    """The films of a shard, under way.

    Args:
        pieces: What the model gives for the next frames of a film (f', ...) on the host, with the film's index. The
            pieces of a film come in order, between those of other films.
        entries: By index, the index entry of each film that could be read; complete after the last piece.
        bad: By index, why the other films could not be read; complete after the last piece.
    """

    pieces: Iterable[tuple[int, Tensor]]
    entries: dict[int, dict[str, Any]]
    bad: dict[int, str]


class FilmWriter(ShardWriter):
    """Shards of codes of films, from `StreamedShard`s. Until a shard is complete, its pieces are in a file without a
    name in the output folder, so that nothing remains of it after a kill; it takes as much room as the shard."""

    def rows(self, codes: Tensor, index: int, first: int) -> Tensor:
        """The rows of a file (n, ...) for what the model gives for frames of a film (f', ...), the first of which has
        the number `first`."""
        return codes.to(self._empty.dtype).reshape(-1, *self._empty.shape[1:])

    def _reasons(self, encoded: Any) -> dict[int, str]:
        deque(encoded.pieces, maxlen=0)
        return super()._reasons(encoded)

    def _write(self, shard: int, encoded: Any) -> None:
        extents = defaultdict[int, list[tuple[int, int]]](list)  # place and length of each piece of a film
        n_frames, path = Counter[int](), self.output.path / self._file_name(shard)
        with explain_write_errors(path), tempfile.TemporaryFile(prefix=f".{path.name}.", dir=path.parent) as spool:
            for index, codes in encoded.pieces:
                numbers = numbers_of(self.rows(codes, index, n_frames[index]))
                n_frames[index] += len(codes)
                extents[index].append((spool.tell(), len(numbers)))
                spool.write(numbers)
            films = sorted(encoded.entries)
            assert len(films) + len(encoded.bad) == len(self._items[shard]), (shard, films, encoded.bad)

            def blocks() -> Iterator[bytes]:
                for offset, length in (extent for film in films for extent in extents[film]):
                    spool.seek(offset)
                    yield spool.read(length)

            metadata = self._metadata([encoded.entries[film] for film in films], encoded.bad)
            self.output.write(path.name, streamed_shard(self._name, self._empty, blocks, **metadata))
