"""Classes of images: numbers that stand beside them, or the folders that they lie in."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, ClassVar

from .decoding.texts import cleaned
from .fields import Field, ImageField, read_sentence
from .records.record import Entry, Record, Wanted
from .records.rows import Rows
from .samples import Samples
from .sets import has, open_records

_CLASS = re.compile("[0-9]{1,9}")
_LONGEST_QUOTE = 40


@dataclass(frozen=True)
class LabelField(Field):
    """ "label": the class of an image, 0, 1, ...

    Args:
        is_said: Whether the number, or one of the names, stands in a .cls beside the image, or in a column cls or label
            of its row. Else an image has the number of the first folder of its name, and `len(names)`, which trainers
            of diffusion transformers take for no class, if it lies in none.
        names: Of the classes, in order; of classes that are said, empty if they have none.
        name_of: index -> the name of the image, as of a `Source`.
    """

    is_said: bool
    names: Sequence[str]
    name_of: Callable[[int], str]

    wanted: ClassVar[Wanted] = Wanted("class", "class", (".cls",), ("cls", "label"), as_cells=True)

    def load(self, record: Record, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        if not self.is_said:
            folder = _folder(self.name_of(index))
            return {"label": self.names.index(folder) if folder else len(self.names)}
        found = record.get(self.wanted.name)
        value = read_sentence(found) if isinstance(found, Entry) else next(iter((found or {}).values()), None)
        if value is None:
            raise ValueError("it has no class, and others have: there is no .cls beside it, or no cls in its row")
        (text,) = cleaned([str(value)]) or [""]
        if text in self.names:
            return {"label": self.names.index(text)}
        if not _CLASS.fullmatch(text):
            raise ValueError(f"its class is {text[:_LONGEST_QUOTE]!r}: give a whole number from 0 on")
        return {"label": int(text)}


def _folder(name: str) -> str:
    """The first folder of a name; "" if there is none."""
    first, *rest = PurePosixPath(name).parts
    return first if rest else ""


def open_labelled(spec: str, *, image_size: int, channels: int) -> tuple[Samples, Sequence[str]]:
    """A set of images with their "label", and the names of the classes: those of a table's column; or, if no class is
    said beside an image, the folders of a folder or of the members of tars, sorted, as torchvision's ImageFolder
    numbers them. See `open_records` for `spec` and what is raised."""
    image = ImageField(image_size, channels)
    source = open_records(spec, [image.wanted, LabelField.wanted], "shapes", image.seed)
    is_said, names = has(source, LabelField.wanted.name), list[str]()
    if isinstance(source, Rows):
        names = [*next(iter(source.classes.values()), [])]
    elif not is_said:
        names = sorted({_folder(source.name(index)) for index in range(len(source))} - {""})
    return Samples(source, [image, LabelField(is_said, names, source.name)]), names
