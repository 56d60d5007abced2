"""Sounds and captions in the rows of Arrow and parquet files."""

from __future__ import annotations

from torch import Tensor

from ..files.table_columns import SOUNDS
from ..files.table_files import TableFiles
from ..files.tables import Tables
from .decoding import ClipDecoder
from .sidecars import NO_CAPTION, TEXT_KEYS, Texts, texts_of_row


class TableSounds:
    """The sounds of a table, with the texts in columns of the names that a manifest has (see `Manifest`), and perhaps a
    label, a text or the number of a class. See `Sounds` for the methods.

    Raises ValueError, in one line, if there is no such table, or it has no column of captions.
    """

    def __init__(self, files: TableFiles, clips: ClipDecoder) -> None:
        self._clips, self._table = clips, Tables(files, SOUNDS, (*TEXT_KEYS, "label"))
        self.describe, self.name = self._table.describe, self._table.name
        self.fingerprint, self.skipped = self._table.fingerprint, self._table.skipped
        if not set(self._table.texts) & set(TEXT_KEYS):
            raise ValueError(f"{self._table} has no column of captions: call it caption, captions, text or caption_1")

    def __len__(self) -> int:
        return len(self._table)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        return self._clips.load(self._table.source(index), index, epoch, augment)

    def texts(self, index: int) -> Texts:
        texts = texts_of_row(self._table.cells(index))
        if not texts.captions:
            raise ValueError(NO_CAPTION)
        return texts
