"""Search among embedded sounds: the rows of a matrix that are nearest to queries, and how to show them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tandem.files.reading import read_bytes

from ..bad_samples import reason_of
from ..tokenizers import open_tokenizer

_LONGEST_QUERIES = 1 << 26  # bytes


class TopRows:
    """For each of the queries (m, d), the `count` rows of the largest inner product among all rows that were added; of
    equal products, the first rows. The search is exact: it compares every row.

    Products are summed in fp64 and then rounded to fp32, so that a product depends neither on the rows that are added
    together nor on the other queries, and equal rows have equal products.
    """

    rows: npt.NDArray[np.int64]
    """(m, k) row numbers, the best first; k = count, or the number of rows if that is smaller."""
    cosines: npt.NDArray[np.float32]
    """(m, k), inner products with these rows: cosines if all vectors are unit vectors."""

    def __init__(self, queries: npt.NDArray[np.float32], count: int) -> None:
        self._queries, self._count, self._seen = queries.astype(np.float64), count, 0
        self.rows = np.zeros((len(queries), 0), np.int64)
        self.cosines = np.zeros((len(queries), 0), np.float32)

    def add(self, vectors: npt.NDArray[np.float32]) -> None:
        """Add the next rows (n, d)."""
        found = (self._queries @ vectors.astype(np.float64).T).astype(np.float32)
        numbers = np.broadcast_to(np.arange(self._seen, self._seen + len(vectors)), found.shape)
        cosines, rows = np.hstack([self.cosines, found]), np.hstack([self.rows, numbers])
        # Equal products are in the order of their rows here, and a stable sort keeps that order.
        best = np.argsort(-cosines, axis=1, kind="stable")[:, : self._count]
        self.cosines, self.rows = (np.take_along_axis(each, best, axis=1) for each in (cosines, rows))
        self._seen += len(vectors)


class Match(NamedTuple):
    """A file that was found: its rank from 1 on, its cosine to the query, its path, and its first caption if the index
    knows one."""

    rank: int
    cosine: float
    path: str
    caption: str | None = None


class Answer(NamedTuple):
    """The matches of a query."""

    query: str
    matches: Sequence[Match]

    def as_table(self) -> str:
        """For people: the query, and a line per match. Bytes of a path that are not UTF-8 are escaped."""
        width = max((len(match.path) for match in self.matches if match.caption), default=0)
        lines = [
            f"{match.rank:4d}  {match.cosine:6.3f}  {match.path:{width}}  {match.caption or ''}".rstrip()
            for match in self.matches
        ]
        head = f"rank  cosine  {'path':{width}}  {'caption' if width else ''}".rstrip()
        text = "\n".join([self.query, head, *lines, ""])
        return text.encode(errors="backslashreplace").decode()

    def as_json(self) -> str:
        """For programs, in one line. A match without caption has no such key."""
        matches = [{k: v for k, v in match._asdict().items() if v is not None} for match in self.matches]
        return json.dumps({"query": self.query, "matches": matches})


def read_queries(given: Sequence[str], path: str | None) -> list[str]:
    """The queries of the command line, then those of a file, one per line; empty ones are left out. Raises ValueError,
    in one line, if the file cannot be read or no query is left."""
    queries = list(given)
    if path is not None:
        try:
            queries += read_bytes(path, _LONGEST_QUERIES).decode().splitlines()
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read the queries in {path}: {reason_of(error)}") from None
    queries = [query.strip() for query in queries if query.strip()]
    if not queries:
        raise ValueError("there is no query: what was given is empty")
    return queries


def tokens_of_query(text: str, file: Path | None, max_text_tokens: int, vocab_size: int, marks: bool = True) -> Tensor:
    """The tokens (1, t) of a sentence, by the tokenizer in a file, or by CLIP's (`marks`: see `open_tokenizer`) if
    there is none. Raises ValueError, in one line, if it cannot be read, or its vocabulary has
    another size."""
    tokenizer = open_tokenizer("clip" if file is None else str(file), max_text_tokens, marks)
    if tokenizer.vocab_size != vocab_size:
        raise ValueError(
            f"the model was trained on {vocab_size} tokens, but the tokenizer {tokenizer.name} has "
            f"{tokenizer.vocab_size}: put the tokenizer.json that it was trained with into its folder"
        )
    tokens, (length,) = tokenizer.encode([text])
    return tokens[:, :length]
