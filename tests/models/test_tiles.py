"""Films in tiles: what is mixed, and that it does not depend on the calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.models import StreamState, VideoTokenizer
from tandem.models.layers.video.tiles import Step, apply_in_tiles
from tests.models.helpers import WAN, lively, some, some_videos


def in_tiles(step: Step, side: int, overlap: int, scale: Fraction) -> Callable[[Tensor], Tensor]:
    return functools.partial(apply_in_tiles, step, states={}, side=side, overlap=overlap, scale=scale)


def doubled(x: Tensor, state: StreamState) -> Tensor:
    """Every place twice, plus a constant for each tile: the smallest value in it."""
    return F.interpolate(x[0], scale_factor=2.0)[None] + x.amin()


@pytest.mark.parametrize(
    ("height", "width", "side", "overlap"), [(8, 8, 8, 4), (8, 20, 8, 4), (13, 9, 6, 2), (7, 5, 8, 3)]
)
def test_tiles_that_agree_give_the_whole(height: int, width: int, side: int, overlap: int) -> None:
    """A step that sees no neighbours gives the same in every tile."""
    x = some(2, 3, 2, height, width)
    whole = in_tiles(lambda part, state: 3 * part, side, overlap, Fraction(1))
    torch.testing.assert_close(whole(x), 3 * x)


def test_where_two_tiles_overlap_weights_fall_linearly() -> None:
    x = torch.zeros(1, 1, 1, 4, 12)
    x[..., 8:] = 1
    x[..., :4] = -1
    tiled = in_tiles(lambda part, state: torch.full_like(part, part.mean()), 8, 4, Fraction(1))
    left, right = -0.5, 0.5
    expected = [left] * 4 + [left + (right - left) * step / 5 for step in (1, 2, 3, 4)] + [right] * 4
    torch.testing.assert_close(tiled(x)[0, 0, 0], torch.tensor([expected] * 4))


def test_a_tile_of_the_input_is_a_tile_of_the_output_twice_as_large() -> None:
    x = some(1, 2, 1, 6, 10)
    tiled = in_tiles(doubled, 6, 2, Fraction(2))(x)
    assert tiled.shape == (1, 2, 1, 12, 20)
    torch.testing.assert_close(tiled[..., :8], doubled(x[..., :6], StreamState())[..., :8])


def test_a_stream_of_tiles_has_the_same_bits_however_it_is_cut_and_is_the_whole_away_from_borders() -> None:
    """Without attention the model sees less than 32 pixels to each side, the overlap."""
    torch.manual_seed(0)
    model = lively(
        VideoTokenizer.from_dict({**WAN, "quantizer": "kl", "latent_dim": 3, "init_dim": 4, "image_size": 8})
    )
    model.eval().encoder.mid_block.attentions = torch.nn.ModuleList()
    videos = some_videos(1, 9, 16, 64)
    whole = model.posterior(videos)
    results = []
    for plan in ([9], [1, 4, 4], [2, 3, 4]):
        tiled = in_tiles(model.posterior_next, 48, 32, Fraction(1, 2))
        results.append(torch.cat([tiled(part) for part in videos.split(plan, dim=2)], dim=2))
    assert all(torch.equal(result, results[0]) for result in results)
    for columns in (slice(8), slice(24, None)):  # those of a single tile
        torch.testing.assert_close(results[0][..., columns], whole[..., columns], rtol=1e-5, atol=1e-5)
    assert not torch.equal(results[0], whole)
