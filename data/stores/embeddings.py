"""An index of embeddings on the disk: shards of a fixed number of files, what is in which row, and search.

    index/embeddings-00000.safetensors    "embeddings" float32 (n, d), of length 1
    index/embeddings-00000.json           rows, checksum, and what could not be read; written when the shard is
    index/index.jsonl                     {"path": "dogs/1.wav", "shard": 0, "row": 0}, a line per row, in order
    index/bad.jsonl                       {"path": ..., "reason": ...}, a line per file that could not be read
    index/index.json                      settings and checksums; written last: where it is, all is complete
    index/codes/codes-00000.safetensors   "codes" (n, q) of the same rows, and an index.json of its own

Loading needs nothing of this repository:

    embeddings = safetensors.numpy.load_file("index/embeddings-00000.safetensors")["embeddings"]
    paths = [json.loads(line)["path"] for line in open("index/index.jsonl")]  # row by row, shard after shard
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as safetensors_load
from safetensors.numpy import save as safetensors_save

from ..bad_samples import BadSample
from ..order import Permutation
from .codes import stays_inside
from .resumable import WriteFile, json_bytes, sha256_of
from .search import Match, TopRows

EMBEDDINGS, CODES = "embeddings", "codes"
INDEX_FILE, LINES_FILE, BAD_FILE = "index.json", "index.jsonl", "bad.jsonl"
_OF_A_DAMAGED_INDEX = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError)

Array = npt.NDArray[Any]
Vectors = npt.NDArray[np.float32]


class ShardFolder:
    """Shards and their records, in any order and by any number of processes.

    Args:
        folder: Claimed for its settings (`claim_folder`).
        name: Of the tensor in each file, and the beginning of the file's name.
        sizes: Of each shard, how many items it is of, readable or not.
        write: Writes a file whole or not at all.
    """

    def __init__(self, folder: Path, name: str, sizes: Sequence[int], write: WriteFile) -> None:
        self.folder, self._name, self._sizes, self._write = folder, name, sizes, write

    def write(self, shard: int, rows: Array, bad: Iterable[BadSample] = ()) -> None:
        """Rows (n, ...) of the items that could be read, in order, and those that could not."""
        content = safetensors_save({self._name: np.ascontiguousarray(rows)})
        unreadable = [[sample.index, sample.path, sample.reason] for sample in bad]
        assert len(rows) + len(unreadable) == self._sizes[shard], (len(rows), unreadable, shard)
        record = {"rows": len(rows), "sha256": hashlib.sha256(content).hexdigest(), "bad": unreadable}
        self._write(self._path(shard, "safetensors"), content)
        self._write(self._path(shard, "json"), json_bytes(record))

    def unfinished(self) -> list[int]:
        """Shards without a record, or whose file is not what the record says. Reads all that there is."""
        return [shard for shard in range(len(self._sizes)) if not self._is_finished(shard)]

    def bad(self, shard: int) -> list[BadSample]:
        """What could not be read for a finished shard."""
        return [BadSample(*sample) for sample in self._record(shard)["bad"]]

    def write_index(self, head: Mapping[str, Any]) -> None:
        """index.json: `head`, and file, rows and checksum of each shard. All are finished."""
        records = [self._record(shard) for shard in range(len(self._sizes))]
        files = [self._path(shard, "safetensors").name for shard in range(len(self._sizes))]
        shards = [
            {"file": file, "rows": record["rows"], "sha256": record["sha256"]}
            for file, record in zip(files, records, strict=True)
        ]
        self._write(self.folder / INDEX_FILE, json_bytes({**head, "shards": shards}))

    def _is_finished(self, shard: int) -> bool:
        try:
            record = self._record(shard)
            is_whole = record["rows"] + len(record["bad"]) == self._sizes[shard]
            return is_whole and record["sha256"] == sha256_of([self._path(shard, "safetensors")])
        except _OF_A_DAMAGED_INDEX:
            return False

    def _record(self, shard: int) -> Any:
        return json.loads(self._path(shard, "json").read_text())

    def _path(self, shard: int, ending: str) -> Path:
        return self.folder / f"{self._name}-{shard:05d}.{ending}"


class EmbeddingWriter:
    """Fills an index, a shard at a time. Shard k is of the files k x files_per_shard and on.

    Args:
        folder: Claimed for these settings.
        names: Paths of all files, relative and in order.
        settings: Become the head of the index. Among them "dim" and "files_per_shard".
        write: Writes a file whole or not at all.
    """

    def __init__(self, folder: Path, names: Sequence[str], settings: Mapping[str, Any], write: WriteFile) -> None:
        self._names, self._settings, self._write = names, settings, write
        self._size = int(settings["files_per_shard"])
        self.n_shards = -(-len(names) // self._size)
        self.shards = ShardFolder(folder, EMBEDDINGS, [len(self.files_of(k)) for k in range(self.n_shards)], write)

    def files_of(self, shard: int) -> range:
        """Indices of a shard's files."""
        return range(shard * self._size, min((shard + 1) * self._size, len(self._names)))

    def write_shard(self, shard: int, vectors: Vectors, bad: Iterable[BadSample]) -> None:
        """Embeddings (n, d) of the files of a shard that could be read, in order, and those that could not."""
        relative = [BadSample(sample.index, self._names[sample.index], sample.reason) for sample in bad]
        rows = vectors if len(vectors) else np.zeros((0, self._settings["dim"]), np.float32)
        self.shards.write(shard, rows, relative)

    def write_index(self) -> None:
        """index.jsonl and bad.jsonl, then index.json, which makes the index complete. All shards are finished."""
        lines: list[dict[str, Any]] = []
        bad: list[dict[str, Any]] = []
        for shard in range(self.n_shards):
            unreadable = {sample.index: sample for sample in self.shards.bad(shard)}
            paths = [self._names[index] for index in self.files_of(shard) if index not in unreadable]
            lines += [{"path": path, "shard": shard, "row": row} for row, path in enumerate(paths)]
            bad += [{"path": self._names[index], "reason": sample.reason} for index, sample in unreadable.items()]
        head = {
            **self._settings, "rows": len(lines), "bad": len(bad), "lines_sha256": self._write_lines(LINES_FILE, lines),
            "bad_sha256": self._write_lines(BAD_FILE, bad),
        }  # fmt: skip
        self.shards.write_index(head)

    def _write_lines(self, file: str, objects: Iterable[Any]) -> str:
        text = "".join(json.dumps(line) + "\n" for line in objects).encode()
        self._write(self.shards.folder / file, text)
        return hashlib.sha256(text).hexdigest()


@dataclass(frozen=True)
class StoredEmbeddings:
    """A complete index. Its methods raise ValueError, in one line, where a file is not what the index says.

    Args:
        folder: Where it is.
        index: Content of index.json.
        sha256: Of index.json, which holds the checksums of everything else.
    """

    folder: Path
    index: Mapping[str, Any]
    sha256: str

    @property
    def rows(self) -> list[int]:
        """Rows of each shard."""
        return [entry["rows"] for entry in self.index["shards"]]

    def load(self, shard: int) -> Vectors:
        """Embeddings (n, d) of a shard, checked against its checksum and the index."""
        entry = self.index["shards"][shard]
        path = self.folder / entry["file"]
        try:
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() != entry["sha256"]:
                raise ValueError("its checksum is not that of the index")
            vectors = safetensors_load(content)[EMBEDDINGS]
            expected = (entry["rows"], self.index["dim"])
            if vectors.shape != expected or vectors.dtype != np.float32:
                raise ValueError(f"it holds {vectors.dtype} {vectors.shape}, not float32 {expected}")
            return vectors
        except _OF_A_DAMAGED_INDEX as error:
            raise ValueError(f"cannot read the embeddings in {path}: {_reason(error)}; make the index again") from None

    def nearest(self, queries: Vectors, count: int, mark: Callable[[], None] = lambda: None) -> list[list[Match]]:
        """For each of the queries (m, d), unit vectors, its `count` rows of the largest cosine, or all where there are
        fewer; see `TopRows`. One shard is in memory at a time; `mark` is called for each, as a sign of life."""
        top = TopRows(queries, count)
        for shard in range(len(self.rows)):
            mark()
            top.add(self.load(shard))
        paths = self._paths(set(top.rows.ravel().tolist()))
        return [
            [Match(rank, float(cosine), paths[row]) for rank, (row, cosine) in enumerate(zip(*pair, strict=True), 1)]
            for pair in zip(top.rows.tolist(), top.cosines, strict=True)
        ]

    def sample(self, count: int, seed: int) -> Vectors:
        """`count` rows (n, d), or all where there are fewer, drawn without replacement by (seed, number of rows)
        alone, in the order drawn."""
        total = sum(self.rows)
        shuffle = Permutation(total, "embeddings", seed)
        drawn = np.array([shuffle(place) for place in range(min(count, total))])
        vectors = np.zeros((len(drawn), self.index["dim"]), np.float32)
        first = 0
        for shard, size in enumerate(self.rows):
            places = np.flatnonzero((drawn >= first) & (drawn < first + size))
            if len(places):
                vectors[places] = self.load(shard)[drawn[places] - first]
            first += size
        return vectors

    def _paths(self, rows: Collection[int]) -> dict[int, str]:
        """The paths of some rows. Reads index.jsonl once, a line at a time."""
        found, digest, path = {}, hashlib.sha256(), self.folder / LINES_FILE
        try:
            with path.open("rb") as file:
                for row, line in enumerate(file):
                    digest.update(line)
                    if row in rows:
                        found[row] = str(json.loads(line)["path"])
            if digest.hexdigest() != self.index["lines_sha256"] or len(found) != len(rows):
                raise ValueError(f"its checksum is not that of {INDEX_FILE}")
            return found
        except _OF_A_DAMAGED_INDEX as error:
            raise ValueError(f"cannot read {path}: {_reason(error)}; make the index again") from None


def read_embeddings(folder: str | Path) -> StoredEmbeddings:
    """Open an index.

    Raises:
        ValueError: one line, where there is none, or not all of it yet, or it is damaged or empty.
    """
    folder = Path(folder)
    path = folder / INDEX_FILE
    if not path.exists():
        unfinished = any(folder.glob(f"{EMBEDDINGS}-*"))
        what = "it was not finished: start embed.py --audio again" if unfinished else "it holds no index of embeddings"
        raise ValueError(
            f"there is no {INDEX_FILE} in {str(folder)!r}: {what if folder.is_dir() else 'no such folder'}"
        )
    try:
        content = path.read_bytes()
        index = json.loads(content)
        if index["task"] != "embed":
            raise ValueError("it is of something else")
        for entry in index["shards"]:
            if not stays_inside(entry["file"], parts=1):
                raise ValueError(f"it names {str(entry['file'])!r}, which is no file in the folder")
        if sum(entry["rows"] for entry in index["shards"]) != index["rows"] or index["dim"] < 1:
            raise ValueError("its numbers of rows do not agree")
    except _OF_A_DAMAGED_INDEX as error:
        raise ValueError(f"cannot read {path}: {_reason(error)}; make the index again") from None
    if index["rows"] == 0:
        raise ValueError(f"the index in {folder} is empty: none of its {index['bad']} files could be read")
    return StoredEmbeddings(folder, index, hashlib.sha256(content).hexdigest())


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:200] or type(error).__name__
