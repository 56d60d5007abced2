"""demo:shapes for models that are conditioned: pictures of one shape, each with a caption, and with what the caption
says as numbers, an embedding that nobody has to learn.

One in ten combinations of shape, colour and place is held out: no picture of the set has it, though every pair out of
the three occurs. Pictures of these captions show whether a model combines what it has only seen apart.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..hashing import Draws
from .decoding import randomly_flipped
from .embeddings import IMAGE, Kind
from .shapes import COLOURS, PLACES, SHAPES, SIZES, Item, draw_scene, is_dark, placed

TOKENS, TOKEN_DIM = 9, 32  # of an encoded caption: "a small red circle on the left, on dark" has 9 words

_SHAPES, _COLOURS, _SIZES, _PLACES = (list(table) for table in (SHAPES, COLOURS, SIZES, PLACES))
_BACKGROUNDS = ["dark", "light"]
_TABLES = (_PLACES, _SHAPES, _COLOURS, _SIZES, _BACKGROUNDS)
WIDTH = sum(map(len, _TABLES))  # 30


class Triple(NamedTuple):
    shape: str
    colour: str
    place: str


TRIPLES = [Triple(*triple) for triple in itertools.product(_SHAPES, _COLOURS, _PLACES)]


def is_held_out(triple: Triple) -> bool:
    """True for 58 of the 576 triples, of which no two have two attributes in common."""
    shape, colour, place = _SHAPES.index(triple.shape), _COLOURS.index(triple.colour), _PLACES.index(triple.place)
    return (shape + 3 * colour + 7 * place) % 10 == 0


_SEEN = [triple for triple in TRIPLES if not is_held_out(triple)]


def attributes(item: Item, background: str) -> Tensor:
    """A shape and "dark" or "light" -> float32 (30,) of zeros and five ones: which of the 9 places, 8 shapes, 8 colours
    and 3 sizes the shape has, and which of the 2 backgrounds the picture.

    What a shape looks like has the same numbers wherever it is, so that it need not be learned at each place anew.
    """
    has = (item.place, item.shape, item.colour, item.size, background)
    return torch.cat([torch.eye(len(table))[table.index(name)] for table, name in zip(_TABLES, has, strict=True)])


def _caption(item: Item, background: str) -> str:
    return f"{item}, on {background}"


def encoded(caption: str) -> Tensor:
    """A caption as a text encoder might give it, without one: float32 (9, 32), for each word a fixed random vector plus
    one of its place in the sentence, with variance 1; zeros after the end."""
    rows = [
        [(a + b) / 2**0.5 for a, b in zip(_vector("word", word), _vector("position", place), strict=True)]
        for place, word in enumerate(caption.replace(",", "").split())
    ]
    return torch.tensor(rows + [[0.0] * TOKEN_DIM] * (TOKENS - len(rows)))


def condition_of(text: str) -> dict[str, Tensor]:
    """A sentence as the captions of scenes are, "a small red circle on the left, on dark" -> its "image_embed" (30,)
    and "text_encodings" (9, 32). Without a background it is light. Raises ValueError, in one line, if it is none."""
    words = text.lower().strip().rstrip(".").removeprefix("an ").removeprefix("a ")
    words, _, background = words.partition(", on ")
    for place, colour, shape, size in itertools.product(_PLACES, _COLOURS, _SHAPES, _SIZES):
        if words == " ".join(word for word in (size, colour, shape, place) if word):
            item = Item(shape, colour, size, place, x=0.5, y=0.5, radius=SIZES[size], angle=0.0)
            if (background := background or "light") in _BACKGROUNDS:
                return {
                    IMAGE.key: attributes(item, background), "text_encodings": encoded(_caption(item, background))
                }  # fmt: skip
    raise ValueError(
        f"{text!r} is no caption of demo:shapes: write 'a', perhaps small or large, then one of "
        f"{', '.join(_COLOURS)}, one of {', '.join(_SHAPES)}, and one of {', '.join(_PLACES)}; then perhaps ', on dark'"
    )


@functools.lru_cache(maxsize=256)
def _vector(*key: int | str) -> list[float]:
    """Uniform numbers with mean 0 and variance 1."""
    draws = Draws("caption", *key)
    return [draws.uniform(-(3**0.5), 3**0.5) for _ in range(TOKEN_DIM)]


class Scenes:
    """`n` pictures of one shape each, with captions and embeddings; each depends only on (seed, index). Methods: see
    `Captioned`."""

    shards: Sequence[range] | None = None
    has_captions = True
    fingerprint = ""

    def __init__(self, n: int, *, image_size: int, flip: bool = False, seed: int = 0) -> None:
        self.n, self.image_size, self.flip, self.seed = n, image_size, flip, seed

    def __len__(self) -> int:
        return self.n

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
        image = draw_scene(self.image_size, [self.item(index)], self._background_draws(index))
        return randomly_flipped(image, self.seed, epoch, index) if self.flip and augment else image

    def item(self, index: int) -> Item:
        """The shape of scene `index`."""
        if not 0 <= index < self.n:
            raise IndexError(index)
        draws = Draws("scene", "seen", self.seed, index)
        shape, colour, place = _SEEN[draws.below(len(_SEEN))]
        return placed(shape, colour, _SIZES[draws.below(len(_SIZES))], place, draws)

    def background(self, index: int) -> str:
        """The background of scene `index`, "dark" or "light"."""
        return "dark" if is_dark(self._background_draws(index)) else "light"

    def _background_draws(self, index: int) -> Draws:
        return Draws("scene background", "seen", self.seed, index)

    def caption(self, index: int) -> str:
        return _caption(self.item(index), self.background(index))

    def embeddings(self, kind: Kind) -> _OfScenes:
        return _OfScenes(self, kind)

    def describe(self, index: int) -> str:
        return f"demo:shapes[{index}]"

    name = describe


class _OfScenes:
    """`Embeddings` of scenes: of images their attributes, of texts their encoded captions."""

    fingerprint = ""

    def __init__(self, scenes: Scenes, kind: Kind) -> None:
        self._scenes, self._is_of_images = scenes, kind == IMAGE
        self.shape: tuple[int, ...] = (WIDTH,) if self._is_of_images else (TOKENS, TOKEN_DIM)

    def load(self, index: int) -> Tensor:
        if self._is_of_images:
            return attributes(self._scenes.item(index), self._scenes.background(index))
        return encoded(self._scenes.caption(index))
