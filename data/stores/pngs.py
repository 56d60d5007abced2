"""A folder of PNG images, decoded from codes, at the relative paths of the originals."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import torch
from PIL import Image
from torch import Tensor

from tandem.files.reading import open_regular
from tandem.files.writing import create, replacing

from .codes import StoredCodes
from .output import explained_write
from .shards import stays_inside

_END_OF_A_PNG = b"\0\0\0\0IEND\xaeB`\x82"


def png_files(folder: Path, paths: Sequence[Sequence[str]]) -> list[list[Path]]:
    """Relative paths of the originals, by shard and row -> files below the folder, see `output_names`."""
    names = iter(output_names([path for shard in paths for path in shard]))
    return [[folder / next(names) for _ in shard] for shard in paths]


def decode_shard(
    codes: StoredCodes,
    shard: int,
    files: Sequence[Path],
    function: Callable[[Tensor], Tensor],
    *,
    batch_size: int,
    num_threads: int,
) -> None:
    """Write those images of a shard that do not exist or are incomplete; `num_threads` threads compress them.

    `function` maps codes int64 (batch_size, h', w'), padded with 0, to images (batch_size, c, h, w) in [0, 1], on any
    device. Raises ValueError, in one line, if the codes are damaged.
    """
    for rows, batch in codes.batches(shard, batch_size):
        if missing := [row for row in rows if not is_complete(files[row])]:
            images = to_pixels(function(torch.from_numpy(batch)))
            with ThreadPoolExecutor(num_threads) as pool:
                list(pool.map(save, [files[row] for row in missing], images[[r - rows[0] for r in missing]]))


def save(path: Path, pixels: Tensor) -> None:
    """Write an image whole or not at all, even if the process is killed. The file is not synced, which would take most
    of the time; after a power cut, the next start finds incomplete files by `is_complete`."""
    content = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(content, "png")
    with explained_write(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, is_synced=False) as temporary, create(temporary) as file:
            file.write(content.getbuffer())


def to_pixels(images: Tensor) -> Tensor:
    """Images (b, c, h, w) in [0, 1], c = 3 (RGB) or 4 (RGBA) -> uint8 (b, h, w, c): round(255 x) after clamping."""
    return (images.float().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).contiguous().cpu()


def output_names(paths: Sequence[str], endings: Sequence[str] | None = None) -> list[str]:
    """The file name for what is made of each path: its ending becomes the one given (.png if none are). If two would
    get one name (a.jpg and a.webp), the new ending is appended instead, and if need be, as for two parts of one file,
    the place in the list before it; no two names are equal. Raises ValueError, in one line, if a path would leave the
    folder."""
    if outside := [path for path in paths if not stays_inside(path)]:
        raise ValueError(f"the index names {outside[0]!r}, which is no path below a folder")
    items = list(zip(paths, endings or [".png"] * len(paths), strict=True))
    names = [str(PurePosixPath(path).with_suffix(ending)) for path, ending in items]
    counts = Counter(names)
    names = [
        name if counts[name] == 1 else f"{path}{ending}" for name, (path, ending) in zip(names, items, strict=True)
    ]
    if len(set(names)) < len(names):
        names = [f"{path}{ending}" for path, ending in items]
    if len(set(names)) < len(names):
        names = [f"{path}-{place}{ending}" for place, (path, ending) in enumerate(items)]
    return names


def is_complete(path: Path) -> bool:
    """Whether a PNG exists and has its end mark as its last bytes."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(max(0, size - len(_END_OF_A_PNG)))
            return file.read() == _END_OF_A_PNG
    except (FileNotFoundError, ValueError):  # none, or a pipe, which the picture then replaces
        return False
