"""Captions: the formats of their files, and the columns of tables that hold them."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tandem.data.sources.record import FileRef
from tandem.io.reading import BYTE_ORDER_MARK, parse_json, plain_text, text_lines

_MAX_TEXTS_BYTES, _MAX_SINGLE_TEXT_BYTES = 1 << 20, 1 << 16
NUMBERED_CAPTIONS = tuple(f"caption_{number}" for number in range(1, 6))
TEXT_KEYS = ("caption", "captions", *NUMBERED_CAPTIONS, "text")


class Texts(NamedTuple):
    """The texts of a sound: its captions, neither empty nor repeated, and its class."""

    captions: list[str]
    label: str | None


def read_texts(ref: FileRef) -> Texts:
    """The texts in a .json (see `texts_of_object`) or .txt (a caption per line); at most 1 MiB is read. If a .json has
    no caption, those of the .txt beside it are taken.

    Raises OSError if the file cannot be read and ValueError, in one line, if its content has neither form.
    """
    content = _read_letters(ref, _MAX_TEXTS_BYTES)
    try:
        if ref.name.lower().endswith(".json"):
            texts, txt = texts_of_object(parse_json(content)), FileRef(f"{os.path.splitext(ref.name)[0]}.txt")
            beside = txt if ref.is_local_file and os.path.exists(txt.path) else ref.beside
            return texts if texts.captions or not beside else texts._replace(captions=read_texts(beside).captions)
        return Texts(clean_captions(text_lines(plain_text(content))), None)
    except ValueError as error:
        raise ValueError(f"its caption file {os.path.basename(ref.name)} cannot be read: {error}") from None


def read_single_text(ref: FileRef) -> str:
    """The whole content of a file as one text, see `normalize_text`; at most 64 KiB are read. Raises what `read_texts`
    raises."""
    try:
        return normalize_text(plain_text(_read_letters(ref, _MAX_SINGLE_TEXT_BYTES)))
    except ValueError as error:
        raise ValueError(f"its file {os.path.basename(ref.name)} cannot be read: {error}") from None


def _read_letters(ref: FileRef, limit: int) -> bytes:
    """At most the first `limit` bytes of a file, without those of a letter that ends after them."""
    content = ref.read(limit)
    return content[: codecs.utf_8_decode(content, "replace", False)[1]] if len(content) == limit else content


def normalize_text(text: str) -> str:
    """A text as one line, with single spaces, without byte order marks and characters that UTF-8 cannot encode."""
    return " ".join(text.replace(BYTE_ORDER_MARK, "").encode("utf-8", "replace").decode().split())


def texts_of_object(json_object: Any) -> Texts:
    """The texts of a JSON object: the captions of its keys `TEXT_KEYS`, and the class of its key "label".

    "captions" is a list, or a string of several captions (see `split_captions`); the others are a string or a list of
    strings.
    Raises ValueError if `json_object` has another form.
    """
    if not isinstance(json_object, Mapping):
        raise ValueError('it holds no JSON object: write {"caption": "..."}')
    captions: list[str] = []
    for key in TEXT_KEYS:
        texts = json_object.get(key)
        if isinstance(texts, str):
            texts = split_captions(texts) if key == "captions" else [texts]
        if not (texts is None or _is_list_of_strings(texts)):
            raise ValueError(f"its {key} is neither a string nor a list of strings")
        captions += texts or []
    label = json_object.get("label")
    labels = clean_captions([] if label is None else [str(label)])
    return Texts(clean_captions(captions), labels[0] if labels else None)


def texts_of_row(row: Mapping[str, Any]) -> Texts:
    """`texts_of_object` for a row of a table. There "text" beside captions is no caption, but e.g. a transcript."""
    texts = texts_of_object({key: value for key, value in row.items() if key != "text"})
    return texts if texts.captions else texts_of_object(row)


def split_captions(text: str) -> list[str]:
    """Several captions in one string: a JSON list, or texts with | between them."""
    if text.lstrip().startswith("["):
        try:
            parts = parse_json(text.encode())
        except ValueError:  # such as "[music] | [applause]"
            parts = None
        if _is_list_of_strings(parts):
            return list(parts)
    return text.split("|")


def _is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


def clean_captions(captions: Iterable[str]) -> list[str]:
    """Captions, each as `normalize_text` returns it, without empty ones and repetitions."""
    return list(dict.fromkeys(text for text in map(normalize_text, captions) if text))
