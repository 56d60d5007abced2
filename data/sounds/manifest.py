"""A table of sounds and their captions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..files.manifest import Columns, Parts, part_of, read_rows
from .decoding import ClipDecoder
from .sidecars import NO_CAPTION, NUMBERED_CAPTIONS, Texts, texts_of_object, texts_of_row

_COLUMNS = Columns(
    needed=(("path", "file_name"), ("caption", "captions", "text", *NUMBERED_CAPTIONS)),
    words="path (or file_name) and caption (or captions, text, or caption_1 to caption_5)",
    example='{"path": "...", "caption": "..."}',
    texts="captions",
)


class Manifest:
    """The rows of a manifest, numbered in their order. See `Sounds` for the methods.

    Columns, or keys of the objects:

    - path, or file_name: of the sound, relative to the manifest;
    - caption, or captions: a JSON list, or texts with | between them; or caption_1 to caption_5; or, without any of
      these, text;
    - label (optional): a class;
    - start_seconds, end_seconds, or start_s, end_s (optional): the part of a long file that the captions describe.

    The table is read once; a sound is not looked for before it is loaded. Raises ValueError, in one line, if the
    manifest cannot be understood or has no rows.
    """

    def __init__(self, path: str, clips: ClipDecoder) -> None:
        self._parts, self._clips = Parts(path, read_rows(path, _COLUMNS, _row), "sound"), clips
        self.source, self.describe = self._parts.source, self._parts.describe
        self.fingerprint = self._parts.fingerprint
        if not any(self._texts(index).captions for index in range(len(self))):
            raise ValueError(f"none of the {len(self)} rows of the manifest {path!r} has a caption")

    def __len__(self) -> int:
        return len(self._parts)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        return self._clips.load(self.source(index), index, epoch, augment)

    def texts(self, index: int) -> Texts:
        texts = self._texts(index)
        if not texts.captions:
            raise ValueError(NO_CAPTION)
        return texts

    def _texts(self, index: int) -> Texts:
        return texts_of_object(self._parts.row(index))


def _row(entry: Mapping[str, Any]) -> str:
    return part_of(entry, "sound").row(**texts_of_row(entry)._asdict())
