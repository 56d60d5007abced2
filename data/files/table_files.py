"""Which Arrow and parquet files make up a table, as the library datasets of Hugging Face and its hub lay them out."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tandem.files.reading import read_json

from ..bad_samples import reason_of
from .opening import NothingFoundError, list_files, said_of_skipped

ENDINGS = (".arrow", ".parquet")
# The words by which the hub tells splits apart in the paths of files.
_SPLITS = {"train": "train", "training": "train", "validation": "validation", "valid": "validation",
           "val": "validation", "dev": "validation", "test": "test", "testing": "test", "eval": "test",
           "evaluation": "test"}  # fmt: skip
_WORD = re.compile(r"[A-Za-z]+")


class TableFiles(NamedTuple):
    """Arrow or parquet files whose rows are samples, in order; `folder` is what the paths in rows are relative to, and
    `skipped` a line about other files there."""

    paths: list[str]
    folder: str = ""
    skipped: str = ""


def saved_files(folder: str) -> TableFiles | None:
    """The files of a folder that `save_to_disk` has written, None if it is none.

    Raises ValueError, in one line, if it is damaged, holds several splits, or names rows of the files.
    """
    if os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        splits = _read(folder, "dataset_dict.json").get("splits")
        names = ", ".join(map(str, splits)) if isinstance(splits, list) else "nothing"
        example = os.path.join(folder, str(splits[0])) if isinstance(splits, list) and splits else folder
        raise ValueError(f"{folder!r} holds the splits {names}: give the folder of one, such as {example!r}")
    if not os.path.isfile(os.path.join(folder, "state.json")):
        return None
    state = _read(folder, "state.json")
    files = state.get("_data_files")
    files = [file.get("filename") for file in files if isinstance(file, Mapping)] if isinstance(files, list) else []
    if not files or not all(isinstance(name, str) for name in files):
        raise ValueError(f"{os.path.join(folder, 'state.json')!r} names no files: save the dataset again")
    if state.get("_indices_data_files"):
        raise ValueError(
            f"{folder!r} holds a selection of the rows of its files: call flatten_indices() and save it again"
        )
    if outside := [name for name in files if os.path.basename(name) != name or name in ("", "..")]:
        raise ValueError(f"{os.path.join(folder, 'state.json')!r} names {outside[0]!r}, which is no file of its folder")
    return TableFiles([os.path.join(folder, name) for name in files], folder)


def tables_below(folder: str) -> TableFiles | None:
    """The Arrow or parquet files below a folder, in the order of their relative paths; None if there are none.

    Raises ValueError, in one line, if they are of both kinds, or of several splits.
    """
    try:
        listing = list_files(folder, ENDINGS, "tables", "")
    except NothingFoundError:
        return None
    names = list(listing.samples)
    if not names:
        return None
    if len({os.path.splitext(name)[1].lower() for name in names}) > 1:
        raise ValueError(f"{folder!r} holds Arrow and parquet files: give those of one kind, as a pattern")
    splits = {split: name for name in reversed(names) if (split := _split_of(name))}
    if len(splits) > 1:
        raise ValueError(
            f"{folder!r} holds the splits {', '.join(sorted(splits))}, such as {', '.join(sorted(splits.values()))}: "
            "give the folder or a pattern of one"
        )
    return TableFiles([os.path.join(folder, name) for name in names], folder, said_of_skipped(folder, listing.skipped))


def _split_of(name: str) -> str | None:
    """The split that the path of a file names, its last word of this kind."""
    words = [_SPLITS[word.lower()] for word in _WORD.findall(name) if word.lower() in _SPLITS]
    return words[-1] if words else None


def _read(folder: str, name: str) -> Mapping[str, Any]:
    path = os.path.join(folder, name)
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path!r}: {reason_of(error)}") from None
