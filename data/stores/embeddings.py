"""An index of embeddings on the disk: shards of a fixed number of files, the file of each row, and search.

    index/embeddings-00000.safetensors    "embeddings" float32 (n, d), of length 1
    index/index.jsonl                     {"path": "dogs/1.wav", "shard": 0, "row": 0}, a line per row, in order;
                                          with "captions": ["..."] where a sound has some
    index/bad.jsonl                       {"path": ..., "reason": ...}, a line per file that could not be read
    index/index.json                      settings and checksums; for the other files see shards.py

Loading needs no code of this repository:

    embeddings = safetensors.numpy.load_file("index/embeddings-00000.safetensors")["embeddings"]
    paths = [json.loads(line)["path"] for line in open("index/index.jsonl")]  # row by row, shard after shard
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.files.reading import parse_json, read_lines

from .output import OutputFolder
from .search import Match
from .shards import INDEX_FILE, LINES_FILE, ShardWriter, explained, read_index, read_shard, shard_sizes

EMBEDDINGS = "embeddings"
BAD_FILE = "bad.jsonl"

Vectors = npt.NDArray[np.float32]


def embedding_shards(output: OutputFolder, names: Sequence[str]) -> ShardWriter:
    """A writer of the shards of the embeddings (n, d) of sounds; `names` are the relative paths of all files, in order.
    The settings hold "dim" and "files_per_shard"."""
    sizes = shard_sizes(len(names), output.settings["files_per_shard"])
    return ShardWriter(output, np.zeros((0, output.settings["dim"]), np.float32), sizes, names, name=EMBEDDINGS)


def write_embedding_index(shards: ShardWriter, captions: Callable[[int], Sequence[str]]) -> None:
    """Write index.jsonl and bad.jsonl, then index.json, which marks the index as complete. All shards must exist.
    `captions` gives those of a sound by its number."""
    lines = shards.lines(lambda index: {"captions": texts} if (texts := list(captions(index))) else {})
    bad = shards.bad()
    head = {"rows": len(lines), "bad": len(bad), "lines_sha256": shards.write_lines(LINES_FILE, lines)}
    shards.write_index({**head, "bad_sha256": shards.write_lines(BAD_FILE, bad), "shards": shards.entries()})


@dataclass(frozen=True)
class StoredEmbeddings:
    """A complete index. Its methods raise ValueError, in one line, if a file is not what the index says."""

    folder: Path
    index: Mapping[str, Any]  # index.json
    sha256: str  # of index.json, which holds the checksums of everything else

    @property
    def rows(self) -> list[int]:
        """Rows of each shard."""
        return [entry["rows"] for entry in self.index["shards"]]

    def load(self, shard: int) -> Vectors:
        """Embeddings (n, d) of a shard, checked against its checksum and the index."""
        entry = self.index["shards"][shard]
        with explained(self.folder / entry["file"]):
            expected = (entry["rows"], self.index["dim"])
            vectors = read_shard(self.folder, entry, EMBEDDINGS, expected)
            if vectors.shape != expected or vectors.dtype != np.float32:
                raise ValueError(f"it holds {vectors.dtype} {vectors.shape}, not float32 {expected}")
            if not np.isfinite(vectors).all():
                raise ValueError("not all of its numbers are finite")
        return vectors

    def nearest(self, queries: Vectors, count: int, mark: Callable[[], None] = lambda: None) -> list[list[Match]]:
        """For each of the queries (m, d), unit vectors, the `count` rows of the largest cosine, or all rows if there
        are fewer; of equal cosines, the first rows. Every row is compared. One shard is in memory at a time; `mark` is
        called for each, as a sign of life.

        Cosines are summed in fp64 and then rounded to fp32, so that one depends neither on the rows of its shard nor on
        the other queries, and equal rows have equal cosines.
        """
        exact, seen = queries.astype(np.float64), 0
        cosines, rows = (np.zeros((len(queries), 0), dtype) for dtype in (np.float32, np.int64))
        for shard, size in enumerate(self.rows):
            mark()
            found = (exact @ self.load(shard).astype(np.float64).T).astype(np.float32)
            numbers = np.broadcast_to(np.arange(seen, seen + size), found.shape)
            cosines, rows, seen = np.hstack([cosines, found]), np.hstack([rows, numbers]), seen + size
            # Rows of equal cosines are in order here, and a stable sort keeps that order.
            best = np.argsort(-cosines, axis=1, kind="stable")[:, :count]
            cosines, rows = (np.take_along_axis(each, best, axis=1) for each in (cosines, rows))
        lines = self._lines(set(rows.ravel().tolist()))
        return [
            [Match(rank, float(cosine), *lines[row]) for rank, (row, cosine) in enumerate(zip(*pair, strict=True), 1)]
            for pair in zip(rows.tolist(), cosines, strict=True)
        ]

    def _lines(self, rows: Collection[int]) -> dict[int, tuple[str, str | None]]:
        """Path, and caption if there is one, of some rows. Reads index.jsonl once, a line at a time."""
        found: dict[int, tuple[str, str | None]] = {}
        digest = hashlib.sha256()
        with explained(self.folder / LINES_FILE):
            for row, line in enumerate(read_lines(self.folder / LINES_FILE)):
                digest.update(line)
                if row in rows:
                    entry = parse_json(line)
                    found[row] = str(entry["path"]), next(map(str, entry.get("captions", [])), None)
            if digest.hexdigest() != self.index["lines_sha256"] or len(found) != len(rows):
                raise ValueError("its checksum is not that of the index")
        return found


def read_embeddings(folder: str | Path) -> StoredEmbeddings:
    """Open an index. Raises ValueError, in one line, if there is none, or it is incomplete, damaged or
    empty."""
    folder = Path(folder)
    index, sha256 = read_index(folder, EMBEDDINGS)
    with explained(folder / INDEX_FILE):
        if index["task"] != "embed":
            raise ValueError("it is an index of something else")
        counts = [entry["rows"] for entry in index["shards"]]
        numbers = (*counts, index["rows"], index["dim"] - 1, index["max_clips"] - 1, index["batch_size"] - 1)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("one of its numbers cannot be")
        if sum(counts) != index["rows"]:
            raise ValueError("its numbers of rows do not agree")
    if index["rows"] == 0:
        raise ValueError(f"the index in {folder} is empty: none of its {index['bad']} files could be read")
    return StoredEmbeddings(folder, index, sha256)
