"""Some of the pictures in samples/, as text for an HTML page."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tandem.files.reading import read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

_NAME = re.compile(r"step_(\d{1,15})(?:_(.{1,100}))?\.png", re.DOTALL)
_LONGEST_SIDE = 1600  # pixels; a larger picture is scaled down, if its file gets smaller by that
_LARGE_BYTES = 200_000  # a larger file becomes WebP, if it gets smaller by that
_WEBP_QUALITY = 85
_MOST_PIXELS = 1 << 26  # of a file: decoding one takes 4 bytes for each
_MOST_BYTES = 1 << 26  # of a file


class Picture(NamedTuple):
    """A picture on the disk; `model` is the name of one of several models, or empty."""

    step: int
    model: str
    path: Path


class Pictures:
    """The pictures of a run folder. What was encoded is kept, so that a page that is made again is made soon.

    Args:
        most: Updates whose pictures are shown: the first, the last, and others evenly between them.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._encoded: dict[tuple[Path, int, int], dict[str, Any]] = {}

    def as_json(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The pictures by update, each {"step", "model"} with what `encoded` gives or an "error"; and notes."""
        try:
            found = sorted(self._found())
        except OSError as error:
            return [], [f"samples/ cannot be read: {error.strerror or error}"]
        steps = sorted({picture.step for picture in found})
        chosen = set(evenly(steps, self._most))
        made, kept = [], {}
        for picture in found:
            if picture.step in chosen:
                key, shown = self._encode(picture.path)
                made.append({"step": picture.step, "model": picture.model, **shown})
                kept[key] = shown
        self._encoded = kept
        some = f"pictures of {len(chosen)} of {len(steps)} updates; --pictures shows more"
        notes = [some] if len(chosen) < len(steps) else []
        broken = [picture for picture in made if "error" in picture]
        if broken:
            notes.append(
                f"{len(broken)} of {len(made)} pictures cannot be shown; the first is of update "
                f"{broken[0]['step']}: {broken[0]['error']}"
            )
        return made, notes

    def _found(self) -> list[Picture]:
        if not self._folder.is_dir():
            return []
        matches = ((_NAME.fullmatch(path.name), path) for path in self._folder.iterdir())
        return [Picture(int(match[1]), match[2] or "", path) for match, path in matches if match]

    def _encode(self, path: Path) -> tuple[tuple[Path, int, int], dict[str, Any]]:
        try:
            status = path.stat()
            key = (path, status.st_mtime_ns, status.st_size)
            return key, self._encoded.get(key) or encoded(path)
        except (OSError, ValueError) as error:
            return (path, 0, 0), {"error": str(getattr(error, "strerror", None) or error)[:200]}


def evenly(items: Sequence[int], most: int) -> list[int]:
    """At most this many of the items: the first, the last, and others evenly between them by position."""
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[-1]]
    return [items[round(n * (len(items) - 1) / (most - 1))] for n in range(most)] if most else []


def encoded(path: Path) -> dict[str, Any]:
    """{"src", "key", "width", "height"} of a PNG: a data: URL, of the file's own bytes unless it is large, and a name
    that no other content has. Raises OSError, and ValueError, in one line, if it is broken or too large."""
    from PIL import Image, features

    content, kind = read_bytes(path, _MOST_BYTES), "png"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
                if image.width * image.height > _MOST_PIXELS:
                    raise ValueError(f"it has {image.width} x {image.height} pixels")
                image.load()
                size = image.size
                if max(size) > _LONGEST_SIDE or len(content) > _LARGE_BYTES:
                    small = image.convert("RGBA" if image.has_transparency_data else "RGB")
                    small.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
                    made = [("png", _saved(small, "png"))]
                    if min(len(content), len(made[0][1])) > _LARGE_BYTES and features.check("webp"):
                        made.append(("webp", _saved(small, "webp", quality=_WEBP_QUALITY)))
                    smallest = min(made, key=lambda each: len(each[1]))
                    if len(smallest[1]) < len(content):
                        (kind, content), size = smallest, small.size
    except Exception as error:  # decoders fail on broken content with SyntaxError, struct.error, KeyError, ...
        is_unknown = type(error).__name__ == "UnidentifiedImageError"
        reason = "it is no PNG" if is_unknown else " ".join(str(error).split()) or type(error).__name__
        raise ValueError(reason) from None
    source = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    key = hashlib.sha256(content).hexdigest()[:32]
    return {"src": source, "key": key, "width": size[0], "height": size[1]}


def _saved(image: Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
