"""PNGs that are written whole, and the names of the files that are made of others."""

from __future__ import annotations

import io
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image
from torch import Tensor

from tandem.files.reading import open_regular
from tandem.files.writing import create, replacing

from .output import explained_write
from .shards import stays_inside

_END_OF_A_PNG = b"\0\0\0\0IEND\xaeB`\x82"


def save_missing(paths: Sequence[Path], pictures: Iterable[Tensor], num_threads: int) -> None:
    """Write those PNGs of pictures uint8 (h, w, c) that do not exist or are incomplete; `num_threads` threads compress
    them. If none is missing, no picture is asked for; there may be more of them than paths."""
    missing = [not is_complete(path) for path in paths]
    if any(missing):
        with ThreadPoolExecutor(num_threads) as pool:
            todo = itertools.compress(zip(paths, pictures, strict=False), missing)
            while some := list(itertools.islice(todo, 4 * num_threads)):
                list(pool.map(_save, *zip(*some, strict=True)))


def _save(path: Path, pixels: Tensor) -> None:
    """Write an image whole or not at all, even if the process is killed. The file is not synced, which would take most
    of the time; after a power cut, the next start finds incomplete files by `is_complete`."""
    content = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(content, "png")
    with explained_write(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, is_synced=False) as temporary, create(temporary) as file:
            file.write(content.getbuffer())


def pixels_of(pieces: Iterable[Any], draw: Callable[[Any], Tensor]) -> Iterator[Tensor]:
    """The pictures uint8 (h, w, c) that a function draws of pieces, for each some in [0, 1], (b, c, h, w), c = 3 (RGB)
    or 4 (RGBA): round(255 x) after clamping. A piece is drawn when its first picture is asked for."""
    for piece in pieces:
        images = (draw(piece).float().clamp(0, 1) * 255).round().byte()
        yield from images.permute(0, 2, 3, 1).contiguous().cpu()


def output_names(paths: Sequence[str], endings: Sequence[str]) -> list[str]:
    """The file name for what is made of each path: its ending becomes the one given. If two would get one name (a.jpg
    and a.webp), the new ending is appended instead, and if need be, as for two parts of one file, the place in the list
    before it; no two names are equal. Raises ValueError, in one line, if a path would leave the folder."""
    if outside := [path for path in paths if not stays_inside(path)]:
        raise ValueError(f"the index names {outside[0]!r}, which is no path below a folder")
    replaced = [str(PurePosixPath(path).with_suffix(ending)) for path, ending in zip(paths, endings, strict=True)]
    appended = [f"{path}{ending}" for path, ending in zip(paths, endings, strict=True)]
    counts = Counter(replaced)
    mixed = [name if counts[name] == 1 else longer for name, longer in zip(replaced, appended, strict=True)]
    numbered = [f"{path}-{place}{ending}" for place, (path, ending) in enumerate(zip(paths, endings, strict=True))]
    return next((names for names in (mixed, appended) if len(set(names)) == len(names)), numbered)


def is_complete(path: Path) -> bool:
    """Whether a PNG exists and has its end mark as its last bytes."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(max(0, size - len(_END_OF_A_PNG)))
            return file.read() == _END_OF_A_PNG
    except (FileNotFoundError, ValueError):  # none, or a pipe, which the picture then replaces
        return False
