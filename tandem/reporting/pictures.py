"""Reads some of the pictures in samples/, as data: URLs for an HTML page."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.io.reading import counted, error_text, read_bytes

_NAME = re.compile(r"step_(\d{1,15})(?:_(.{1,100}))?\.png", re.DOTALL)
_LARGE_BYTES = 200_000  # a larger file is sent as WebP, if that has fewer bytes
_LONGEST_SIDE = 1600  # pixels of that WebP
_WEBP_QUALITY = 85
_MOST_PIXELS = 1 << 26  # of a file: decoding takes 4 bytes for each pixel
_MOST_BYTES = 1 << 26  # of a file


def read_pictures(folder: Path, max_updates: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The pictures in samples/, sorted by update, and notes about them. A picture is {"step", "model"} and either the
    values of `encode_picture` or "error".

    Args:
        max_updates: Number of updates whose pictures are shown: the first, the last, and others evenly between them.
    """
    try:
        paths = [*folder.iterdir()] if folder.is_dir() else []
    except OSError as error:
        return [], [f"samples/ cannot be read: {error_text(error)}"]
    matches = ((_NAME.fullmatch(path.name), path) for path in paths)
    files = sorted((int(match[1]), match[2] or "", path) for match, path in matches if match)
    steps = sorted({step for step, _, _ in files})
    shown_steps = set(choose_evenly(steps, max_updates))
    pictures = []
    for step, model, path in files:
        if step in shown_steps:
            try:
                status = path.stat()
                content = encode_picture(path, status.st_mtime_ns, status.st_size)
            except (OSError, ValueError) as error:
                content = {"error": error_text(error)[:200]}
            pictures.append({"step": step, "model": model, **content})
    note = f"pictures of {len(shown_steps)} of {counted(len(steps), 'update')}; --pictures shows more"
    notes = [note] if len(shown_steps) < len(steps) else []
    broken = [picture for picture in pictures if "error" in picture]
    if broken:
        notes.append(
            f"{len(broken)} of {len(pictures)} pictures cannot be shown; the first is of update "
            f"{broken[0]['step']}: {broken[0]['error']}"
        )
    return pictures, notes


def choose_evenly(items: Sequence[int], max_count: int) -> list[int]:
    """At most `max_count` of the items: the first, the last, and others at even distances."""
    last = len(items) - 1
    if last < max_count:
        return list(items)
    return [items[round(last * n / (max_count - 1)) if max_count > 1 else last] for n in range(max_count)]


@functools.lru_cache(maxsize=128)  # makes the next page of the same runs faster
def encode_picture(path: Path, mtime_ns: int, size: int) -> dict[str, Any]:
    """{"src", "key", "width", "height"} of a PNG: a data: URL (WebP for a large file), a hash of its content, pixels.
    `mtime_ns` and `size` are keys of the cache. Raises OSError, and ValueError, in one line, if it is broken or too
    large."""
    from PIL import Image

    content, kind = read_bytes(path, _MOST_BYTES), "png"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
                if image.width * image.height > _MOST_PIXELS:
                    raise ValueError(f"it has {image.width} x {image.height} pixels")
                image.load()
                shape = image.size
                if len(content) > _LARGE_BYTES:
                    image.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
                    buffer = io.BytesIO()
                    image.save(buffer, "webp", quality=_WEBP_QUALITY)
                    if buffer.tell() < len(content):
                        content, kind, shape = buffer.getvalue(), "webp", image.size
    except Exception as error:  # decoders fail on broken content with SyntaxError, struct.error, KeyError, ...
        is_other_format = type(error).__name__ == "UnidentifiedImageError"
        raise ValueError("it is no PNG" if is_other_format else error_text(error)) from None
    source = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    key = hashlib.sha256(content).hexdigest()[:32]
    return {"src": source, "key": key, "width": shape[0], "height": shape[1]}
