"""Whole videos in pieces, through models that take them so: memory does not depend on the length of a video."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from ..bad_samples import BadSample, reason_of
from ..files.source import parts_of
from .moving import FRAMES_PER_SECOND, Moving
from .sets import VideoFiles

DEMO_FRAMES = 41  # of a clip that is drawn
PIECE_FRAMES = 16


class Piece(NamedTuple):
    """The next frames of a video, uint8 (3, f, h, w); and the frames per second up to here, None for an image."""

    frames: Tensor
    fps: float | None


def names_of(videos: Moving | VideoFiles) -> tuple[list[str], list[str]]:
    """The names of all videos; and, if a manifest asks for parts of them, what parts these are."""
    numbers = range(len(videos))
    names = [videos.name(index) for index in numbers]
    if isinstance(videos, Moving):
        return names, []
    return names, parts_of(map(videos.source, numbers))


def pieces(videos: Moving | VideoFiles, index: int) -> Iterator[Piece]:
    """All frames of a video, in order, a few at a time. Raises OSError, and ValueError, in one line, if they cannot be
    read."""
    if isinstance(videos, Moving):
        yield Piece(videos.load(index), FRAMES_PER_SECOND / videos.frames_per_step)
        return
    frames = videos.clips.frames(videos.source(index))
    while piece := list(itertools.islice(frames, PIECE_FRAMES)):
        yield Piece(torch.stack([frame for frame, _ in piece], dim=1), piece[-1][1])


def encode_films(
    videos: Moving | VideoFiles,
    indices: range,
    open_stream: Callable[[], Callable[[Tensor], npt.NDArray[Any]]],
    *,
    frames_per_code: int,
    num_threads: int,
) -> tuple[list[npt.NDArray[Any]], list[BadSample], list[dict[str, Any]]]:
    """Codes of the videos with these indices, one after the other.

    Args:
        open_stream: Begins a video. It returns a function that is called, in the main thread, with the next frames,
            uint8 (3, f, h, w), and returns the codes (f', h', w') that they complete; no other stream may change them.
        frames_per_code: 1 + n times as many frames have 1 + n frames of codes. The last frame of other videos is held
            until they do.
        num_threads: As many videos are decoded at once, each by a thread that is at most one piece ahead.

    Returns:
        Codes of the readable videos, in parts; the unreadable videos; and of each readable one the number of frames of
        codes, the number of its own frames, and how many of them are shown in a second (None: an image).
    """
    films: dict[int, _Film] = {}
    bad = []
    for index, piece in _in_turn(lambda index: pieces(videos, index), indices, num_threads):
        film = films.setdefault(index, _Film(open_stream()))
        if isinstance(piece, Piece):
            film.add(piece)
        elif piece is None and film.last is not None:
            film.hold((1 - film.frames) % frames_per_code)
        else:
            reason = reason_of(piece) if piece else "it holds no frames"
            bad.append(BadSample(index, videos.describe(index), reason))
            del films[index]
    ordered = [films[index] for index in sorted(films)]
    return (
        [part for film in ordered for part in film.codes],
        sorted(bad, key=lambda sample: sample.index),
        [{"code_frames": sum(map(len, film.codes)), "frames": film.frames, "fps": film.fps} for film in ordered],
    )


class _Film:
    """A video of which some frames have been encoded."""

    def __init__(self, encode: Callable[[Tensor], npt.NDArray[Any]]) -> None:
        self._encode, self.codes, self.frames = encode, list[npt.NDArray[Any]](), 0
        self.fps: float | None = None
        self.last: Tensor | None = None  # the last frame (3, 1, h, w)

    def add(self, piece: Piece) -> None:
        self.codes.append(self._encode(piece.frames))
        self.frames += piece.frames.shape[1]
        self.fps = None if piece.fps is None else round(piece.fps, 6)
        self.last = piece.frames[:, -1:].clone()

    def hold(self, frames: int) -> None:
        """Encode the last frame so many times again."""
        assert self.last is not None
        if frames:
            self.codes.append(self._encode(self.last.expand(-1, frames, -1, -1)))


def _in_turn(
    start: Callable[[int], Iterator[Piece]], indices: Iterable[int], num_threads: int
) -> Iterator[tuple[int, Piece | Exception | None]]:
    """The pieces of several videos, of each in order, as threads finish them: (index, piece); at the end of a video
    (index, None), or (index, what was raised)."""

    def next_of(piece_by_piece: Iterator[Piece]) -> Piece | Exception | None:
        try:
            return next(piece_by_piece, None)
        except (OSError, ValueError) as error:
            return error

    todo = iter(indices)
    running: dict[Future[Piece | Exception | None], tuple[int, Iterator[Piece]]] = {}
    with ThreadPoolExecutor(num_threads) as pool:
        for index in itertools.islice(todo, num_threads):
            video = start(index)
            running[pool.submit(next_of, video)] = (index, video)
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                index, video = running.pop(future)
                piece = future.result()
                following: int | None = index
                if not isinstance(piece, Piece) and (following := next(todo, None)) is not None:
                    video = start(following)
                if following is not None:  # the thread goes on while the model encodes
                    running[pool.submit(next_of, video)] = (following, video)
                yield index, piece
