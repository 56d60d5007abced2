"""Film strips and films show the frames that they were given, in order and in their place."""

from __future__ import annotations

import io
from collections.abc import Iterator

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tandem.training.visuals.videos import film_strips, side_by_side, to_mp4


def grey(clips: int, frames: int, side: int = 8, channels: int = 3) -> Tensor:
    """Videos whose frames are grey: clip c, frame f has the value (40 c + 5 f) / 255."""
    values = (40 * torch.arange(clips)[:, None] + 5 * torch.arange(frames)) / 255
    return values[:, None, :, None, None].expand(-1, channels, -1, side, side).contiguous()


def noise(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def blocks(picture: Image.Image, side: int) -> list[list[int]]:
    """The grey in the middle of each frame of a strip, in its rows and columns."""
    pixels = np.asarray(picture.convert("L")).astype(int)
    left = pixels.shape[1] % (side + 2)  # the margin of the labels
    rows = [pixels[top : top + side] for top in tops(pixels, side)]
    return [row[side // 2, left + side // 2 :: side + 2].tolist() for row in rows]


def tops(pixels: np.ndarray, side: int) -> Iterator[int]:
    """The first row of pixels of each row of frames."""
    is_frame = (pixels[:, -2 - side // 2] != 255).astype(int)
    yield from np.flatnonzero(np.diff(is_frame, prepend=0) == 1)


@pytest.mark.parametrize(("frames", "shown"), [(1, [0]), (5, [0, 1, 2, 3, 4]), (17, [0, 2, 4, 6, 8, 10, 12, 14, 16])])
@pytest.mark.parametrize("channels", [1, 3])
def test_strips_show_evenly_spread_frames_of_each_clip_in_labelled_rows(
    frames: int, shown: list[int], channels: int
) -> None:
    originals = grey(4, frames, channels=channels)
    models = {"online": originals + 0.2, "ema": (originals - 10 / 255).clamp(0, 1)}
    rows = blocks(film_strips(originals, models), side=64)
    assert len(rows) == 4 * 4
    for clip in range(4):
        first = [40 * clip + 5 * frame for frame in shown]
        expected = [first, [v + 51 for v in first], [max(v - 10, 0) for v in first], [4 * min(v, 10) for v in first]]
        assert rows[4 * clip : 4 * clip + 4] == expected


def test_the_film_has_original_and_reconstructions_side_by_side_and_a_row_for_each_clip() -> None:
    originals = noise(2, 3, 5, 6, 4)
    frames = side_by_side(originals, {"online": originals.flip(1), "ema": 1 - originals})
    factor, gap = 32, 4  # of 4 pixels, 128
    height, width = 6 * factor + gap, 4 * factor + gap
    assert frames.shape == (5, 2 * height - gap, 3 * width - gap, 3) and frames.dtype == np.uint8
    for clip in range(2):
        for column, video in enumerate((originals, originals.flip(1), 1 - originals)):
            found = frames[:, clip * height :, column * width :][:, : 6 * factor : factor, : 4 * factor : factor]
            expected = (video[clip] * 255).round().byte().permute(1, 2, 3, 0).numpy()
            assert np.array_equal(found, expected)
    assert (frames[:, :, 4 * factor : 4 * factor + gap] == 255).all()


def test_the_mp4_has_every_frame_almost_without_loss_and_the_same_bytes_each_time() -> None:
    frames = side_by_side(noise(1, 3, 5, 16, 16), {"ema": noise(1, 3, 5, 16, 16).flip(1)})
    content = to_mp4(frames, fps=7.6)
    for size in range(20):  # the encoder's defaults read memory that something else has left behind
        left_behind = [np.full(1000 + 20_000 * size, size, np.uint8) for _ in range(30)]
        del left_behind
        assert to_mp4(frames, fps=7.6) == content
    with av.open(io.BytesIO(content)) as container:
        shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert container.streams.video[0].average_rate == 8
    assert len(shown) == 5
    for ours, expected in zip(shown, frames, strict=True):
        assert np.abs(ours.astype(int) - expected).mean() < 4  # of 255; colours that are swapped differ by 85
