"""The discriminators: sizes, and what each head of the one of videos sees. What is true of other models too is in
test_every_model.py; their layers are those of reference/, as tests/test_references.py shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.models import Discriminator, MaskBitDiscriminator, VideoDiscriminator
from tandem.models.autoencoders.discriminator import Blur, MaxPool
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
    # MaskBit's has a padded head: 2 x 2 places are enough, but not for the heads of clips.
    maskbit = MaskBitDiscriminator.from_dict({"dim": 4, "layers": 2})
    for images in (some_images(size=8), some_images(size=8)[:1]):
        logits = maskbit(images)
        assert logits.shape == (len(images), 1, 2, 2) and logits.std() > 0
    assert "7 pixels" in refused(maskbit, some_images(size=7))
    assert "15 pixels" in refused(of_videos(frame_head="maskbit"), some_videos(2, 5, 15, 15), FRAMES)


def test_maskbits_has_the_layers_of_the_paper_and_7_4_million_weights() -> None:
    """5 x 5, four times 3 x 3 without bias of a norm before it, 1 x 1, 5 x 5: 7,431,297 of its authors' code."""
    with torch.device("meta"):
        model = MaskBitDiscriminator.from_dict({"dim": 128})
    assert sum(weight.numel() for weight in model.parameters()) == 7_431_297
    assert [m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)] == [32] * 4
    shapes = [tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert shapes == [(128, 3, 5, 5), (128, 128, 3, 3), (256, 128, 3, 3), (512, 256, 3, 3), (1024, 512, 3, 3),
                      (1024, 1024, 1, 1), (1, 1024, 5, 5)]  # fmt: skip
    assert model(torch.empty(2, 3, 256, 256, device="meta")).shape == (2, 1, 16, 16)


def test_the_blur_keeps_a_constant_spreads_an_impulse_and_is_a_convolution_with_an_outer_product() -> None:
    blur = Blur()
    inside = blur(torch.ones(1, 2, 8, 8))
    assert inside.shape == (1, 2, 4, 4) and torch.equal(inside[..., 1:-1, 1:-1], torch.ones(1, 2, 2, 2))
    assert inside[0, 0, 0, 0] == (7 / 8) ** 2 and inside[0, 0, 0, 1] == 7 / 8  # a row and a column of zeros outside
    impulse = torch.zeros(1, 1, 8, 8)
    impulse[0, 0, 3, 4] = 64
    spread = torch.zeros(4, 4)  # each of two rows and two columns: with weights 3 and 1, and 1 and 3
    spread[1:3, 1:3] = torch.tensor([[3.0 * 1, 3 * 3], [1 * 1, 1 * 3]])
    assert torch.equal(blur(impulse)[0, 0], spread)
    x, kernel = torch.randn(2, 3, 10, 14), torch.tensor([1.0, 3, 3, 1]).outer(torch.tensor([1.0, 3, 3, 1])) / 64
    expected = [F.conv2d(x[:, c : c + 1], kernel[None, None], stride=2, padding=1) for c in range(3)]
    torch.testing.assert_close(blur(x), torch.cat(expected, 1))


@pytest.mark.parametrize("size", [(5, 16), (32, 17), (33, 40)])
def test_the_largest_of_each_window_is_that_of_adaptive_pooling_and_small_maps_stay(size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *size).requires_grad_()
    expected = F.adaptive_max_pool2d(x, tuple(min(side, 16) for side in size))
    found = MaxPool(16)(x)
    assert torch.equal(found, expected)
    weights = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad((each * weights).sum(), x)[0] for each in (found, expected))
    torch.testing.assert_close(ours, theirs)


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
