"""Tokenizers of sentences: CLIP's, or one of Hugging Face from a file."""

from __future__ import annotations

import codecs
import contextlib
import functools
import hashlib
import importlib.util
import os
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.io.installed import missing_package, require_packages
from tandem.io.reading import LONGEST_BEGINNING, error_text, read_bytes, wrong_kind_text
from tandem.io.writing import write_atomically

_CLIP_NAME = "clip"
TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """Sentences -> tokens (b, max_text_tokens) and their lengths; see `open_tokenizer`.

    A pickle holds only the arguments of `open_tokenizer`, so that another process reads the file again. `vocab_size` is
    the largest token + 1. `to_ids` maps a sentence to at most max_text_tokens tokens, including the start and end
    tokens. `content` is that of the tokenizer's file; empty for CLIP's tokenizer, which is in a package. For
    `add_special_tokens` see `open_tokenizer`.
    """

    def __init__(
        self, name: str, vocab_size: int, max_text_tokens: int, to_ids: Callable[[str], list[int]],
        content: bytes = b"", add_special_tokens: bool = True,
    ) -> None:  # fmt: skip
        self.name, self.vocab_size, self.max_text_tokens = name, vocab_size, max_text_tokens
        self._to_ids, self._content, self._add_special_tokens = to_ids, content, add_special_tokens

    def encode(self, texts: Sequence[str]) -> tuple[Tensor, list[int]]:
        """b sentences -> (int64 (b, max_text_tokens), padded with 0; the length of each without the padding, > 0).

        A longer sentence is cut to max_text_tokens; its last token is the end token, if the tokenizer has one. Raises
        ValueError if a sentence has no token.
        """
        tokens = torch.zeros(len(texts), self.max_text_tokens, dtype=torch.int64)
        lengths = []
        for row, text in zip(tokens, texts, strict=True):
            ids = self._to_ids(text)
            if not ids:
                raise ValueError(f"the tokenizer {self.name!r} makes no token of the text {text[:60]!r}")
            row[: len(ids)] = torch.tensor(ids)
            lengths.append(len(ids))
        return tokens, lengths

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the tokenizer's file into the folder of a model or a run, as tokenizer.json; the tokenizer of CLIP has
        none. Raises OSError."""
        if self._content:
            write_atomically(Path(folder, TOKENIZER_FILE), self._content)

    def require_same(self, model: str, path: Path | None) -> None:
        """Raise ValueError, in one line, if the model named `model` has another tokenizer: that of the file at `path`,
        or CLIP's if `path` is None."""
        if (b"" if path is None else read_bytes(path)) != self._content:
            raise ValueError(
                f"the model in {model} was trained with another tokenizer than {self.name}: give --tokenizer "
                f"{path or _CLIP_NAME}"
            )

    def state_dict(self) -> dict[str, str]:
        """The state for a checkpoint: the digest of the file, and its path."""
        return {"sha256": sha256_of_tokenizer(self.name, self._content), "name": self.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError, in one line, if a checkpoint was trained with another tokenizer."""
        if state["sha256"] != self.state_dict()["sha256"]:
            raise ValueError(
                f"the checkpoint was trained with another tokenizer than --tokenizer {self.name}: its words would mean "
                "something else; give the old one, another --output_dir, or --fresh to start over"
            )

    def __reduce__(self) -> tuple[Callable[..., Tokenizer], tuple[str, int, bool]]:
        return open_tokenizer, (self.name, self.max_text_tokens, self._add_special_tokens)


def sha256_of_tokenizer(name: str, content: bytes) -> str:
    """The SHA-256 of a tokenizer's file, or of its name if it has no file."""
    return hashlib.sha256(content or name.encode()).hexdigest()


def open_tokenizer(spec: str, max_text_tokens: int, add_special_tokens: bool = True) -> Tokenizer:
    """Open "clip" (49408 tokens; Radford et al. 2021, from the package open_clip) or a Hugging Face tokenizer.json.

    Args:
        add_special_tokens: Whether "clip" puts start and end tokens around a text; musiclm-pytorch's tokenizer, that of
            x-clip, does not. A tokenizer.json defines its own.

    Raises ValueError, in one line, if a package or the file is missing, or max_text_tokens leaves no room for a token
    beside the start and end tokens.
    """
    if spec == _CLIP_NAME:
        return _open_clip(max_text_tokens, add_special_tokens)
    return _open_hugging_face(os.path.expanduser(spec), max_text_tokens)


def _open_clip(max_text_tokens: int, add_special_tokens: bool) -> Tokenizer:
    if add_special_tokens and max_text_tokens < 3:
        reason = f"--max_text_tokens {max_text_tokens} leaves no room for a token between the start and end tokens"
        raise ValueError(f"{reason}: use 3 or more")
    tokenizer = _load_clip_tokenizer()
    prefix, suffix = ([tokenizer.sot_token_id], [tokenizer.eot_token_id]) if add_special_tokens else ([], [])

    def to_ids(text: str) -> list[int]:
        return [*prefix, *tokenizer.encode(text)[: max_text_tokens - 2 * add_special_tokens], *suffix]

    return Tokenizer(_CLIP_NAME, tokenizer.vocab_size, max_text_tokens, to_ids, add_special_tokens=add_special_tokens)


@functools.lru_cache(maxsize=1)
def _load_clip_tokenizer() -> Any:
    """open_clip's tokenizer, imported from its file alone: importing the package takes seconds and needs torchvision
    and timm, which the tokenizer does not use."""
    package = importlib.util.find_spec("open_clip")
    folders = package.submodule_search_locations if package else None
    path = os.path.join(folders[0], "tokenizer.py") if folders else ""
    if not os.path.isfile(path):
        raise missing_package("the tokenizer clip", "open_clip_torch")
    try:
        return runpy.run_path(path)["SimpleTokenizer"]()
    except ImportError as error:
        raise missing_package("the tokenizer clip", error.name or "open_clip_torch") from None


def _open_hugging_face(path: str, max_text_tokens: int) -> Tokenizer:
    if not os.path.isfile(path):
        raise ValueError(f"there is no tokenizer {path!r}: give clip, or the path of a Hugging Face tokenizer.json")
    require_packages("a tokenizer.json", "tokenizers")
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    with _rust_errors(f"cannot read the tokenizer {path!r}", "; it has to be a Hugging Face tokenizer.json"):
        content = read_bytes(path).removeprefix(codecs.BOM_UTF8)
        if reason := wrong_kind_text(content[:LONGEST_BEGINNING]):
            raise ValueError(reason)
        tokenizer = HuggingFaceTokenizer.from_str(content.decode())
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_text_tokens)  # this keeps the start and end tokens
        n_special = tokenizer.num_special_tokens_to_add(is_pair=False)
        tokenizer.encode("")  # fails where special tokens are missing
    if n_special >= max_text_tokens:
        raise ValueError(f"--max_text_tokens {max_text_tokens} leaves no room beside {n_special} start and end tokens")
    vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1

    def to_ids(text: str) -> list[int]:
        with _rust_errors(f"the tokenizer {path!r} cannot read the text {text[:60]!r}"):
            ids: list[int] = tokenizer.encode(text).ids  # not as a batch, which starts threads that a fork would lose
        return ids

    return Tokenizer(path, vocab_size, max_text_tokens, to_ids, content)


@contextlib.contextmanager
def _rust_errors(problem: str, advice: str = "") -> Iterator[None]:
    """Turn any error into a ValueError of one line: the package raises plain Exception, and its panics of Rust, as for
    a file that contradicts itself, are BaseException."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{problem}: {error_text(error)[:200]}{advice}") from None
