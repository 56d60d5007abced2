"""A folder of sounds, each with a text file beside it; and what such texts may look like."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..listing import list_files
from ..packed import PackedStrings
from .decoding import ENDINGS, ClipDecoder, Source

TEXT_ENDINGS = (".json", ".txt")  # where there are both, the first is read
_LONGEST_TEXT = 1 << 20  # bytes
NO_CAPTION = "it has no caption"
_MANIFESTS = (".csv", ".tsv", ".jsonl", ".ndjson")


class Texts(NamedTuple):
    """What is written of a sound: captions, not empty nor twice the same, and its class."""

    captions: list[str]
    label: str | None


class SoundFolder:
    """Every sound below a folder that a .txt (a caption per line) or a .json (see `texts_of_object`) of the same name
    describes, numbered in the order of the relative path. See `Sounds` for the methods.

    Args:
        folder: Its path.
        listed: Relative paths of its sounds and texts (`list_sounds`).
        clips: Decodes.
    """

    def __init__(self, folder: str, listed: list[str], clips: ClipDecoder) -> None:
        self._folder, self._clips = folder, clips
        self.sample_rate, self.clip_samples = clips.sample_rate, clips.clip_samples
        texts = {
            ending: {os.path.splitext(name)[0]: name for name in listed if name.lower().endswith(ending)}
            for ending in TEXT_ENDINGS
        }
        self._sounds = PackedStrings(name for name in listed if name.lower().endswith(ENDINGS))
        self._texts = PackedStrings()
        for index in range(len(self._sounds)):
            stem = os.path.splitext(self._sounds[index])[0]
            self._texts.append(next((texts[ending][stem] for ending in TEXT_ENDINGS if stem in texts[ending]), ""))
        if not any(self._texts[index] for index in range(len(self._texts))):
            manifests = sorted(name for name in os.listdir(folder) if name.lower().endswith(_MANIFESTS))
            instead = f"; or give the manifest, {os.path.join(folder, manifests[0])!r}" if manifests else ""
            raise ValueError(
                f"no sound of the {len(self._sounds)} in {folder!r} has a caption: beside {self._sounds[0]!r} there "
                f"has to be {os.path.splitext(self._sounds[0])[0] + '.txt'!r} (a caption per line) or a .json{instead}"
            )
        self._last: tuple[int, Texts] | None = None

    def __len__(self) -> int:
        return len(self._sounds)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        return self._clips.load(Source(self.describe(index)), index, epoch, augment)

    def captions(self, index: int) -> list[str]:
        captions = self._read(index).captions
        if not captions:
            raise ValueError(NO_CAPTION)
        return captions

    def label(self, index: int) -> str | None:
        return self._read(index).label

    def describe(self, index: int) -> str:
        return os.path.join(self._folder, self._sounds[index])

    def _read(self, index: int) -> Texts:
        if self._last is None or self._last[0] != index:
            name = self._texts[index]
            if not name:
                raise ValueError(f"{NO_CAPTION}: there is neither a .txt nor a .json beside it")
            with open(os.path.join(self._folder, name), "rb") as file:
                content = file.read(_LONGEST_TEXT)
            self._last = index, texts_of_file(content, name)
        return self._last[1]


def list_sounds(folder: str) -> list[str]:
    """Relative paths of the sounds, texts and tars below a folder, sorted; no file is opened.

    Raises ValueError, in one line, where the folder cannot be read or holds neither sounds nor tars.
    """
    kinds = (*ENDINGS, ".tar")
    listed, n_others = list_files(folder, (*kinds, *TEXT_ENDINGS), "sounds", "demo:tones")
    n_texts = sum(name.lower().endswith(TEXT_ENDINGS) for name in listed)
    if n_texts == len(listed):
        n = n_texts + n_others
        raise ValueError(
            f"no sound in {folder!r}, which holds {n} other file{'' if n == 1 else 's'}: files that end in "
            f"{' '.join(kinds)} are read, in the folder and in those below it"
        )
    # Texts in a folder of tars describe the tars, if anything.
    is_tars = not any(name.lower().endswith(ENDINGS) for name in listed)
    return [name for name in listed if name.lower().endswith(".tar")] if is_tars else listed


def texts_of_file(content: bytes, name: str) -> Texts:
    """Content of a .txt or .json -> its texts. Raises ValueError, in one line, where it is no such content."""
    try:
        text = content.decode("utf-8-sig")
        is_json = name.lower().endswith(".json")
        return texts_of_object(json.loads(text)) if is_json else Texts(cleaned(text.splitlines()), None)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its caption file {os.path.basename(name)} cannot be read: {error}") from None


def texts_of_object(value: Any) -> Texts:
    """{"caption": "..."}, or "text", or "captions" -> captions; "label" -> class.

    "caption" and "text" are a string or a list of them; "captions" a list, or a string in which | parts them.
    Raises ValueError where it is something else.
    """
    if not isinstance(value, Mapping):
        raise ValueError('it holds no JSON object: write {"caption": "..."}')
    captions: list[str] = []
    for key in ("caption", "captions", "text"):
        entry = value.get(key)
        parts = (
            parted(entry)
            if key == "captions" and isinstance(entry, str)
            else [entry]
            if isinstance(entry, str)
            else entry
        )
        if parts is None:
            continue
        if not (isinstance(parts, list) and all(isinstance(part, str) for part in parts)):
            raise ValueError(f"its {key} is neither a string nor a list of strings")
        captions += parts
    label = value.get("label")
    return Texts(cleaned(captions), None if label is None or label == "" else " ".join(cleaned([str(label)])) or None)


def parted(text: str) -> list[str]:
    """A list of captions in one string: as JSON, or with | between them."""
    if text.lstrip().startswith("["):
        try:
            parts = json.loads(text)
            if isinstance(parts, list) and all(isinstance(part, str) for part in parts):
                return parts
        except (ValueError, RecursionError):
            pass  # such as "[music] | [applause]"
    return text.split("|")


def cleaned(captions: Iterable[str]) -> list[str]:
    """Captions with single spaces, without empty ones and repetitions, and without what UTF-8 cannot hold."""
    texts = (" ".join(caption.encode("utf-8", "replace").decode().split()) for caption in captions)
    return list(dict.fromkeys(text for text in texts if text))
