"""A stored index of embeddings: shards of a fixed number of files, the file of each row, and search.

    index/embeddings-00000.safetensors    "embeddings" float32 (n, d), each row of length 1
    index/index.jsonl                     {"path": "dogs/1.wav", "shard": 0, "row": 0}, a line per row, in order;
                                          with "captions": ["..."] where a sound has some, "start_seconds" and
                                          "end_seconds" where a manifest states a part of a file
    index/index.json                      settings, checksums and unreadable files; see shards.py

Loading needs no code of this repository:

    embeddings = safetensors.numpy.load_file("index/embeddings-00000.safetensors")["embeddings"]
    paths = [json.loads(line)["path"] for line in open("index/index.jsonl")]  # row by row, shard after shard
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.io.reading import BYTE_ORDER_MARK, error_text, plain_text, printable, read_bytes, text_lines

from .names import PART_KEYS, part_text
from .shards import INDEX_FILE, LINES_FILE, StoredArrays, explain_errors

EMBEDDINGS = "embeddings"
_MAX_QUERY_BYTES = 1 << 26

Vectors = npt.NDArray[np.float32]


class Match(NamedTuple):
    """A match of a query: its rank from 1 on, its cosine to the query, its path, its first caption, if any, and its
    part of the file, if a manifest states one."""

    rank: int
    cosine: float
    path: str
    caption: str | None = None
    start_seconds: float | None = None
    end_seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """What is known of the match."""
        return {key: value for key, value in self._asdict().items() if value is not None}


class QueryResult(NamedTuple):
    """The matches of a query."""

    query: str
    matches: Sequence[Match]

    def as_table(self) -> str:
        """For people: the query, and a line per match."""
        names = [printable(match.path) + part_text(match.to_dict()) for match in self.matches]
        width = max((len(name) for name, match in zip(names, self.matches, strict=True) if match.caption), default=0)
        lines = [self.query, f"rank  cosine  {'path':{width}}  {'caption' if width else ''}".rstrip()]
        for name, match in zip(names, self.matches, strict=True):
            lines.append(f"{match.rank:4d}  {match.cosine:6.3f}  {name:{width}}  {match.caption or ''}".rstrip())
        return "\n".join([*lines, ""])

    def as_json(self) -> str:
        """For programs, in one line. A match has no key for what it lacks, such as a caption."""
        return json.dumps({"query": self.query, "matches": [match.to_dict() for match in self.matches]})


class StoredEmbeddings(StoredArrays):
    """A complete index. The constructor and the methods raise ValueError, in one line, if there is none, or it is
    incomplete, damaged or empty."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder, EMBEDDINGS)
        index = self.index
        with explain_errors(self.folder / INDEX_FILE):
            if index["task"] != "embed":
                raise ValueError("it is an index of something else")
            self.rows = [entry["rows"] for entry in index["shards"]]
            numbers = (*self.rows, index["dim"] - 1, index["max_clips"] - 1, index["batch_size"] - 1)
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise ValueError("one of its numbers is too small or not an integer")
            if sum(self.rows) != index["rows"]:
                raise ValueError("its numbers of rows do not agree")
            n_bad = len(index["bad"])
        if not index["rows"]:
            raise ValueError(f"the index in {folder} is empty: none of its {n_bad} files could be read")

    def load(self, shard: int) -> Vectors:
        """Embeddings (n, d) of a shard, checked against its checksum and the index."""
        rows = self.open_rows(shard, [self.index["dim"]], ["float32"])
        with self.explain_errors(shard):
            vectors: Vectors = rows[:].numpy()
            if not np.isfinite(vectors).all():
                raise ValueError("not all of its numbers are finite")
            return vectors

    def nearest(self, queries: Vectors, count: int, heartbeat: Callable[[], None] = lambda: None) -> list[list[Match]]:
        """For each of the queries (m, d), unit vectors, the `count` rows with the largest cosines, or all rows if there
        are fewer; among equal cosines, the first rows. The search is exhaustive. One shard is in memory at a time;
        `heartbeat` is called before each shard.

        Cosines are computed in fp64 and rounded to fp32, so that they depend neither on the shards nor on other
        queries, and equal rows have equal cosines.
        """
        queries_fp64, first_row = queries.astype(np.float64), 0
        cosines, rows = (np.zeros((len(queries), 0), dtype) for dtype in (np.float32, np.int64))
        for shard, size in enumerate(self.rows):
            heartbeat()
            shard_cosines = (queries_fp64 @ self.load(shard).astype(np.float64).T).astype(np.float32)
            shard_rows = np.broadcast_to(np.arange(first_row, first_row + size), shard_cosines.shape)
            cosines, rows = np.hstack([cosines, shard_cosines]), np.hstack([rows, shard_rows])
            first_row += size
            # A stable sort keeps the order of rows with equal cosines.
            order = np.argsort(-cosines, axis=1, kind="stable")[:, :count]
            cosines, rows = (np.take_along_axis(array, order, axis=1) for array in (cosines, rows))
        files = self._read_files(set(rows.ravel().tolist()))
        return [
            [Match(rank, float(cosine), *files[row]) for rank, (row, cosine) in enumerate(zip(*best, strict=True), 1)]
            for best in zip(rows.tolist(), cosines, strict=True)
        ]

    def _read_files(self, rows: Collection[int]) -> dict[int, tuple[Any, ...]]:
        """What the `Match` of each of these rows has from the path on."""
        files: dict[int, tuple[Any, ...]] = {}
        with explain_errors(self.folder / LINES_FILE):
            for row, line in enumerate(self.lines()):
                if row in rows:
                    part = (float(line[key]) if key in line else None for key in PART_KEYS)
                    files[row] = str(line["path"]), next(map(str, line.get("captions", [])), None), *part
            if len(files) != len(rows):
                raise ValueError("its number of lines is not that of the index")
        return files


def read_queries(texts: Sequence[str], path: str | None) -> list[str]:
    """The queries of the command line, then those of a file, one per line, without empty ones. Raises ValueError, in
    one line, if the file cannot be read or there is no query."""
    queries = [text for query in texts if (text := query.replace(BYTE_ORDER_MARK, "").strip())]
    if path is not None:
        try:
            queries += text_lines(plain_text(read_bytes(path, _MAX_QUERY_BYTES)))
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read the queries in {path}: {error_text(error)}") from None
    if not queries:
        raise ValueError("there is no query: what was given is empty")
    return queries
