"""The discriminators: sizes, and what each head of the one of videos sees. What is true of other models too is in
test_every_model.py; their layers are those of reference/, as tests/test_references.py shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tandem.models import Discriminator, VideoDiscriminator
from tests.models.helpers import refused, some_images, some_videos

FRAMES = torch.tensor([1, 4])


def small(**overrides: int) -> Discriminator:
    torch.manual_seed(0)
    return Discriminator.from_dict({"dim": 4, "layers": 2, **overrides})


def of_videos(**overrides: Any) -> VideoDiscriminator:
    torch.manual_seed(0)
    return VideoDiscriminator.from_dict({"dim": 4, "layers": 2, **overrides})


@pytest.mark.parametrize(("dim", "groups"), [(16, [16, 16, 16]), (24, [8, 16, 16]), (10, [2, 4, 8]), (7, [1, 2, 4])])
def test_groups_that_do_not_divide_the_channels_become_their_common_divisor(dim: int, groups: list[int]) -> None:
    model = small(dim=dim, layers=3)
    assert [module.num_groups for module in model.modules() if isinstance(module, nn.GroupNorm)] == groups


def test_the_smallest_image_gives_one_logit_and_a_smaller_one_is_an_error_with_the_sizes() -> None:
    model = small()
    assert model(some_images()).shape == (2, 1, 1, 1)
    for images in (some_images()[:, :, 1:], some_images()[..., 1:]):
        said = refused(model, images)
        assert "15 pixels" in said and "2 layers (--discr_layers), which needs 16" in said
        assert "or lower --discr_layers to 1" in said and small(layers=1)(images).shape[0] == 2
    assert "15 pixels" in refused(of_videos(), some_videos(2, 5, 15, 15), FRAMES)


def sees(logits: Tensor, videos: Tensor) -> list[list[int]]:
    """The frames of each clip on which all logits together depend."""
    (gradient,) = torch.autograd.grad(logits.square().sum(), videos, retain_graph=True)
    return [clip.nonzero().flatten().tolist() for clip in gradient.abs().sum((1, 3, 4))]


def test_the_frame_head_sees_the_given_frame_and_each_clip_head_every_frame_of_its_stride() -> None:
    model, videos = of_videos(), some_videos(2, 5, 16, 16).requires_grad_()
    frame, every, second = model(videos, FRAMES)
    assert sees(frame, videos) == [[1], [4]]
    assert sees(every, videos) == [[0, 1, 2, 3, 4]] * 2 and sees(second, videos) == [[0, 2, 4]] * 2
    assert torch.equal(frame, model.frame_head(torch.stack([videos[0, :, 1], videos[1, :, 4]])))
    for backwards, forwards in zip(model(videos.flip(2), 4 - FRAMES)[1:], (every, second), strict=True):
        assert (backwards - forwards).abs().max() > 1e-3


@pytest.mark.parametrize(("frames", "side", "shapes"), [
    (1, 16, [(1, 1)]), (2, 16, [(1, 1), (1, 1, 1)]), (3, 16, [(1, 1), (2, 1, 1), (1, 1, 1)]),
    (17, 16, [(1, 1), (9, 1, 1), (5, 1, 1)]), (40, 16, [(1, 1), (20, 1, 1), (10, 1, 1)]),
    (17, 80, [(2, 2), (5, 2, 2), (3, 2, 2)]),
])  # fmt: skip
def test_clip_heads_take_any_number_of_frames_above_their_stride_and_images_idle_them(
    frames: int, side: int, shapes: list[tuple[int, ...]]
) -> None:
    """With two halvings of the side, the time is halved once; with four, of 80 pixels, twice."""
    model = of_videos(layers=4 if side == 80 else 2)
    logits = model(some_videos(2, frames, side, side), torch.zeros(2, dtype=torch.int64))
    assert [tuple(of_head.shape[2:]) for of_head in logits] == shapes and model.num_heads == 3
