"""A folder of sounds, each with a text file beside it; and the formats of such texts."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from tandem.files.reading import open_regular, parse_json

from ..files.find import Folder
from ..files.opening import Listing, list_files
from .decoding import ENDINGS, ClipDecoder

TEXT_ENDINGS = (".json", ".txt")  # if a sound has both, the first is read
# .json, ..., .JSON, .txt, ..., .TXT: of two that differ in their case only, the last one in order is read
_TEXT_ENDINGS_IN_ANY_CASE = [
    "".join(signs)
    for ending in TEXT_ENDINGS
    for signs in itertools.product(*(sorted({c, c.upper()}, reverse=True) for c in ending))
]
_LONGEST_TEXT = 1 << 20  # bytes
NUMBERED_CAPTIONS = tuple(f"caption_{number}" for number in range(1, 6))
TEXT_KEYS = ("caption", "captions", *NUMBERED_CAPTIONS, "text")
NO_CAPTION = "it has no caption"
_MANIFESTS = (".csv", ".tsv", ".jsonl", ".ndjson")


class Texts(NamedTuple):
    """The texts of a sound: its captions, neither empty nor repeated, and its class."""

    captions: list[str]
    label: str | None


class SoundFolder:
    """Every sound below a folder that a .txt (a caption per line) or a .json (see `texts_of_object`) of the same name
    describes, numbered in the order of the relative path. `files` are the sounds and the texts that may stand beside
    them (`list_sounds`). See `Sounds` for the methods.
    """

    def __init__(self, files: Folder, clips: ClipDecoder) -> None:
        self._files, self._clips = files, clips
        self.describe, self.fingerprint, self.skipped = files.describe, files.fingerprint, files.skipped
        if not files.has_any_beside(_TEXT_ENDINGS_IN_ANY_CASE):
            manifests = sorted(name for name in os.listdir(files.folder) if name.lower().endswith(_MANIFESTS))
            instead = f"; or give the manifest, {os.path.join(files.folder, manifests[0])!r}" if manifests else ""
            first = files.name(0)
            raise ValueError(
                f"no sound of the {len(files)} in {files.folder!r} has a caption: beside {first!r} there has to be "
                f"{os.path.splitext(first)[0] + '.txt'!r} (a caption per line) or a .json{instead}"
            )

    def __len__(self) -> int:
        return len(self._files)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        return self._clips.load(self._files.source(index), index, epoch, augment)

    def texts(self, index: int) -> Texts:
        path = self._files.beside(index, _TEXT_ENDINGS_IN_ANY_CASE)
        if path is None:
            raise ValueError(f"{NO_CAPTION}: there is neither a .txt nor a .json beside it")
        return read_texts(path, path)


def list_sounds(folder: str) -> Listing:
    """The sounds, texts and tars below a folder; no file is opened.

    Raises ValueError, in one line, if the folder cannot be read or holds neither sounds nor tars.
    """
    return list_files(folder, ENDINGS, "sounds", "demo:tones", beside=TEXT_ENDINGS)


def read_texts(path: str, name: str, offset: int = 0, size: int = _LONGEST_TEXT) -> Texts:
    """The texts in a .txt or .json, or in a part of another file (offset and size in bytes), which is called `name`; at
    most 1 MiB is read.

    Raises OSError if the file cannot be read and ValueError, in one line, if it holds no caption.
    """
    with open_regular(path) as file:
        content = os.pread(file.fileno(), min(size, _LONGEST_TEXT), offset)
    try:
        text = content.decode("utf-8-sig")
        is_json = name.lower().endswith(".json")
        texts = texts_of_object(parse_json(text.encode())) if is_json else Texts(cleaned(text.splitlines()), None)
    except ValueError as error:
        raise ValueError(f"its caption file {os.path.basename(name)} cannot be read: {error}") from None
    if not texts.captions:
        raise ValueError(NO_CAPTION)
    return texts


def texts_of_object(value: Any) -> Texts:
    """{"caption": "..."}, or "text", "captions", "caption_1", ..., "caption_5" -> captions; "label" -> class.

    "captions" is a list, or a string with | between the captions; the others are a string or a list of strings.
    Raises ValueError if `value` has another form.
    """
    if not isinstance(value, Mapping):
        raise ValueError('it holds no JSON object: write {"caption": "..."}')
    captions: list[str] = []
    for key in TEXT_KEYS:
        entry = value.get(key)
        if isinstance(entry, str):
            entry = split_captions(entry) if key == "captions" else [entry]
        if not (entry is None or _is_list_of_strings(entry)):
            raise ValueError(f"its {key} is neither a string nor a list of strings")
        captions += entry or []
    label = value.get("label")
    words = cleaned([] if label is None else [str(label)])
    return Texts(cleaned(captions), words[0] if words else None)


def texts_of_row(entry: Mapping[str, Any]) -> Texts:
    """`texts_of_object` of a row of a table, where a text beside captions is something else, such as what is spoken."""
    texts = texts_of_object({key: value for key, value in entry.items() if key != "text"})
    return texts if texts.captions else texts_of_object(entry)


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


def cleaned(captions: Iterable[str]) -> list[str]:
    """Captions with single spaces, without empty ones, repetitions and characters that UTF-8 cannot hold."""
    texts = (" ".join(caption.encode("utf-8", "replace").decode().split()) for caption in captions)
    return list(dict.fromkeys(text for text in texts if text))
