"""Encodes samples into the shards of a store. A sample consists of pieces (an image, the clips of a sound, some frames
of a video), each of which the model encodes as a row. Samples that cannot be read are left out."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tandem.data.bad_samples import collect_partial_reads
from tandem.data.sampling.workers import Loader
from tandem.devices import on_host
from tandem.io.reading import error_text

from .films import StreamedShard
from .shards import COUNT, GRID, PARTIAL
from .writer import EncodedShard

PIECE_FRAMES = 16  # frames of a video that are in memory at once

IndexEntry = dict[str, Any]  # what the index holds about a sample, beside its name
Load = Callable[[int], tuple[Tensor, IndexEntry]]  # index -> pieces and entry of a sample
LoadFrames = Callable[[int], Iterator[tuple[Tensor, float | None]]]  # index -> frames, each with the frames per second


def encode_batches(
    load: Load,
    shards: Sequence[range],
    encode: Callable[[Tensor], Tensor],
    *,
    batch_size: int,
    samples_per_request: int,
    num_workers: int,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[EncodedShard]:
    """The encoded samples of each shard, in the order of the shards; an array of rows for each sample that can be read.

    Args:
        load: index -> the pieces of a sample (n, ...), n > 0, of one shape for all samples, and its index entry. Raises
            OSError or ValueError, in one line, if it cannot be read. `num_workers` loader processes call it, each for
            `samples_per_request` samples at a time; it is pickled if they are not forked.
        encode: Pieces (batch_size, ...), padded with 0 -> rows (batch_size, ...) on any device. All batches have one
            size, so that the bits of a row depend only on its own piece.
        waiting: See `Loader`.
    """
    groups = [
        [indices[i : i + samples_per_request] for i in range(0, len(indices), samples_per_request)]
        for indices in shards
    ]
    load_request = functools.partial(load_samples, load)
    batches = iter(Loader(load_request, list(itertools.chain(*groups)), num_workers, waiting=waiting))
    return (_encode_shard(itertools.islice(batches, len(group)), encode, batch_size) for group in groups)


def load_samples(load: Load, indices: range) -> tuple[Tensor, list[tuple[int, IndexEntry]], dict[int, str]]:
    """The concatenated pieces (n, ...) of the samples; for each sample the number of its pieces and its index entry, in
    which PARTIAL is the reason if a file was read only in part; and by index, why others cannot be read."""
    pieces, entries, bad = list[Tensor](), list[tuple[int, IndexEntry]](), dict[int, str]()
    for index in indices:
        try:
            with collect_partial_reads() as reasons:
                sample_pieces, entry = load(index)
        except (OSError, ValueError) as error:
            bad[index] = error_text(error)
        else:
            pieces.append(sample_pieces)
            entries.append((len(sample_pieces), {**entry, PARTIAL: reasons[0]} if reasons else entry))
    return torch.cat(pieces) if pieces else torch.zeros(0), entries, bad


def _encode_shard(batches: Iterable[Any], encode: Callable[[Tensor], Tensor], batch_size: int) -> EncodedShard:
    counts: list[int] = []
    encoded = EncodedShard([], [], {})

    def all_pieces() -> Iterator[Tensor]:
        for sample_pieces, entries, bad in batches:
            counts.extend(count for count, _ in entries)
            encoded.entries.extend(entry for _, entry in entries)
            encoded.bad.update(bad)
            yield from sample_pieces

    rows = encode_in_batches(all_pieces(), encode, batch_size)
    return encoded._replace(parts=rows.split(counts) if counts else [])


def encode_in_batches(pieces: Iterable[Tensor], encode: Callable[[Tensor], Tensor], batch_size: int) -> Tensor:
    """`encode` of the pieces, in batches of one size, padded with 0 -> rows (n, ...) on the host."""
    remaining = iter(pieces)

    def encoded_batches() -> Iterator[tuple[int, Tensor]]:
        while batch_pieces := list(itertools.islice(remaining, batch_size)):
            batch = batch_pieces[0].new_zeros(batch_size, *batch_pieces[0].shape)
            torch.stack(batch_pieces, out=batch[: len(batch_pieces)])
            yield len(batch_pieces), encode(batch)

    rows = [batch_rows[:count] for count, batch_rows in on_host(encoded_batches())]
    return torch.cat(rows) if rows else torch.zeros(0)


def encode_streams(
    load_frames: LoadFrames,
    shards: Sequence[range],
    open_stream: Callable[[], Callable[[Tensor], Tensor]],
    *,
    frames_per_code: int,
    num_threads: int,
    keep_aspect: bool = False,
) -> Iterator[StreamedShard]:
    """Codes or latents of the videos of each shard, in the order of the shards; the pieces of one have to be taken
    before the next. The memory does not depend on the length of a video.

    Args:
        load_frames: index -> the frames of a video, uint8 (3, h, w), in order, each with the frames per second up to
            there (None: an image). Raises OSError, and ValueError, in one line, if they cannot be read.
        open_stream: Begins a video. Returns a function that is called, in the main thread, with the next frames, uint8
            (3, f, h, w), and returns the codes (f', h', w'), or moments (f', 2 d, h', w'), that they complete, on any
            device; other streams must not affect them.
        frames_per_code: 1 + n * frames_per_code frames have 1 + n frames of codes. Other videos are padded by repeating
            the last frame.
        num_threads: The number of videos that are decoded at once, each by a thread, at most one piece ahead.
        keep_aspect: Whether each video has its own (h', w'); then its index entry holds them as GRID.
    """
    for indices in shards:
        entries, bad = dict[int, IndexEntry](), dict[int, str]()
        pieces = _round_robin(lambda index: _split_frames(load_frames, index, frames_per_code), indices, num_threads)
        yield StreamedShard(on_host(_encode_pieces(pieces, open_stream, entries, bad, keep_aspect)), entries, bad)


def _encode_pieces(
    pieces: Iterable[tuple[int, Tensor | IndexEntry | Exception]],
    open_stream: Callable[[], Callable[[Tensor], Tensor]],
    entries: dict[int, IndexEntry],
    bad: dict[int, str],
    keep_aspect: bool,
) -> Iterator[tuple[int, Tensor]]:
    """The codes of each piece, with the index of its video. Adds, by index, the entry of each video to `entries`, and
    why a video cannot be read to `bad`."""
    encoders, grids = defaultdict[int, Any](open_stream), dict[int, list[int]]()
    for index, piece in pieces:
        if isinstance(piece, Tensor):
            codes = encoders[index](piece)
            grids[index] = [*codes.shape[-2:]]
            yield index, codes
            continue
        encoders.pop(index, None)  # free the model's state of the video
        if isinstance(piece, Exception):
            bad[index] = error_text(piece)
        else:
            entries[index] = {**piece, GRID: grids[index]} if keep_aspect else piece


def _split_frames(load_frames: LoadFrames, index: int, frames_per_code: int) -> Iterator[Tensor | IndexEntry]:
    """All frames of a video, in order, a few at a time (3, f, h, w); the repeated last frame; and its index entry."""
    frames, count = load_frames(index), 0
    while chunk := list(itertools.islice(frames, PIECE_FRAMES)):
        yield torch.stack([frame for frame, _ in chunk], dim=1)
        count += len(chunk)
        last, fps = chunk[-1]
    if not count:
        raise ValueError("it holds no frames")
    if n_repeated := (1 - count) % frames_per_code:
        yield last[:, None].repeat(1, n_repeated, 1, 1)
    code_frames = 1 + (count - 1 + n_repeated) // frames_per_code
    yield {COUNT: code_frames, "frames": count, "fps": None if fps is None else round(fps, 6)}


def _round_robin(
    start: Callable[[int], Iterator[Tensor | IndexEntry]], indices: Iterable[int], num_threads: int
) -> Iterator[tuple[int, Tensor | IndexEntry | Exception]]:
    """The items of several videos in round-robin order; an error of a video is yielded and ends the video."""
    videos = ((index, start(index)) for index in indices)  # the items of a video end with its index entry
    with ThreadPoolExecutor(num_threads) as pool:
        first_videos = itertools.islice(videos, num_threads)
        queue = deque((index, items, pool.submit(next, items)) for index, items in first_videos)
        while queue:
            index, items, future = queue.popleft()
            piece: Any
            try:
                piece = future.result()
            except (OSError, ValueError) as error:
                piece = error
            # While the model encodes this piece, the thread decodes the next piece, or the first one of the next video.
            next_video = (index, items) if isinstance(piece, Tensor) else next(videos, None)
            if next_video is not None:
                queue.append((*next_video, pool.submit(next, next_video[1])))
            yield index, piece
