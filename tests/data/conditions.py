"""Sets of captioned images with embeddings, small ones, as the tests of conditioned images need them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from tests.data.helpers import write_tar
from tests.data.source_table import encoded, npy

WIDTH, TOKENS, TEXT_WIDTH = 6, 5, 4
Array = np.ndarray


def picture(number: int, size: tuple[int, int] = (12, 12)) -> bytes:
    return encoded(Image.new("RGB", size, (number % 256, number * 7 % 256, 255 - number % 256)), "png")


def embedding(number: int) -> Array:
    return np.random.default_rng(number).standard_normal(WIDTH).astype(np.float16)


def encodings(number: int, tokens: int | None = None) -> Array:
    """Of a caption with 1 to 5 tokens."""
    noise = np.random.default_rng((1, number)).standard_normal((1 + number % TOKENS, TEXT_WIDTH))
    return noise[:tokens].astype(np.float32)


def padded(rows: Array) -> Array:
    return np.pad(rows, ((0, TOKENS - len(rows)), (0, 0)))


def members(number: int, *kinds: str) -> dict[str, bytes]:
    """An image and what stands beside it."""
    all_of_them = {
        "txt": f"image  {number}\n".encode(), "json": b"{}", "img_emb.npy": npy(embedding(number)),
        "npy": npy(embedding(number)), "text_emb.npy": npy(encodings(number)), "text.npy": npy(encodings(number)),
        "depth.npy": npy(np.ones((3, 3), np.float32)), "mask.png": picture(0),
    }  # fmt: skip
    return {"png": picture(number), **{kind: all_of_them[kind] for kind in kinds}}


def write_tars(
    folder: Path, *kinds: str, shards: int = 3, each: int = 4, but: Mapping[int, dict] | None = None
) -> Path:
    """Tars 00000.tar, ... of images 0, 1, ..., with keys such as 000010003. `but`: other members of some images."""
    for shard in range(shards):
        numbers = range(shard * each, (shard + 1) * each)
        samples = {f"{shard:05d}{n % each:04d}": (but or {}).get(n, members(n, *kinds)) for n in numbers}
        write_tar(folder / f"{shard:05d}.tar", samples)
    return folder


def write_rows(folder: Path, shards: int = 3, each: int = 4, prefix: str = "img_emb_") -> Path:
    """The embeddings of `write_tars`, as files of rows."""
    folder.mkdir(exist_ok=True)
    for shard in range(shards):
        numbers = range(shard * each, (shard + 1) * each)
        rows = [padded(encodings(n)) if prefix.startswith("text") else embedding(n) for n in numbers]
        np.save(folder / f"{prefix}{shard:04d}.npy", np.stack(rows))
    return folder
