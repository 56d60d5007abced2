"""Search among embedded sounds: queries, and how to show what they find."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from tandem.files.reading import read_bytes

from ..bad_samples import reason_of
from ..tokenizers import open_tokenizer

_LONGEST_QUERIES = 1 << 26  # bytes


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
