"""The discriminator of videos: what each head sees, which head takes part, sizes, second derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.video_discriminator import VideoDiscriminator

FRAMES = torch.tensor([1, 4])


def small(**overrides: Any) -> VideoDiscriminator:
    torch.manual_seed(0)
    return VideoDiscriminator(**{"dim": 4, "layers": 2, "groups": 2, **overrides})


def some_videos(frames: int = 5, side: int = 16, batch: int = 2) -> Tensor:
    return torch.rand(batch, 3, frames, side, side, generator=torch.Generator().manual_seed(1))


def sees(logits: Tensor, videos: Tensor) -> list[list[int]]:
    """The frames of each clip on which all logits together depend."""
    (gradient,) = torch.autograd.grad(logits.square().sum(), videos, retain_graph=True)
    return [clip.nonzero().flatten().tolist() for clip in gradient.abs().sum((1, 3, 4))]


def test_the_frame_head_sees_the_given_frame_and_each_clip_head_every_frame_of_its_stride() -> None:
    videos = some_videos().requires_grad_()
    frame, every, second = small()(videos, FRAMES)
    assert sees(frame, videos) == [[1], [4]]
    assert sees(every, videos) == [[0, 1, 2, 3, 4]] * 2
    assert sees(second, videos) == [[0, 2, 4]] * 2


def test_the_frame_head_is_the_discriminator_of_images() -> None:
    model, videos = small(), some_videos()
    expected = model.frame_head(torch.stack([videos[0, :, 1], videos[1, :, 4]]))
    assert torch.equal(model(videos, FRAMES)[0], expected)
    assert torch.equal(model(videos[:, :, :1], torch.zeros(2, dtype=torch.int64))[0], model.frame_head(videos[:, :, 0]))


@pytest.mark.parametrize(
    ("frames", "shapes"),
    [(1, [(1, 1)]), (2, [(1, 1), (1, 1, 1)]), (3, [(1, 1), (2, 1, 1), (1, 1, 1)]),
     (17, [(1, 1), (9, 1, 1), (5, 1, 1)]), (40, [(1, 1), (20, 1, 1), (10, 1, 1)])],
)  # fmt: skip
def test_clip_heads_take_any_number_of_frames_above_their_stride_and_images_idle_them(
    frames: int, shapes: list[tuple[int, ...]]
) -> None:
    """With two halvings of the side, the time is halved once."""
    logits = small()(some_videos(frames), torch.zeros(2, dtype=torch.int64))
    assert [tuple(of_head.shape[2:]) for of_head in logits] == shapes
    assert small().num_heads == 3 and all(of_head.dtype == torch.float32 for of_head in logits)


def test_four_halvings_of_the_side_halve_the_time_twice() -> None:
    logits = small(layers=4)(some_videos(17, side=80), FRAMES)
    assert [tuple(of_head.shape[2:]) for of_head in logits] == [(2, 2), (5, 2, 2), (3, 2, 2)]


def test_clips_do_not_influence_one_another_and_reversed_clips_look_different() -> None:
    model, videos = small(), some_videos()
    together = model(videos, FRAMES)
    for clip in range(2):
        alone = model(videos[clip : clip + 1], FRAMES[clip : clip + 1])
        for ours, expected in zip(alone, together, strict=True):
            # Convolutions of one sample may be computed in another order.
            torch.testing.assert_close(ours[0], expected[clip], rtol=1e-5, atol=1e-6)
    for backwards, forwards in zip(model(videos.flip(2), 4 - FRAMES)[1:], together[1:], strict=True):
        assert (backwards - forwards).abs().max() > 1e-3


def test_it_can_be_differentiated_twice() -> None:
    model = small(dim=2, layers=1, groups=1).double()
    videos = some_videos(3, side=8, batch=1).double().requires_grad_()
    for head in model.clip_heads:
        assert torch.autograd.gradgradcheck(head, videos, fast_mode=True)
    frame, *_ = model(videos, torch.tensor([1]))
    (gradient,) = torch.autograd.grad(frame.sum(), videos, create_graph=True)
    assert gradient.square().sum().requires_grad


def test_logits_are_fp32_under_autocast_and_in_a_model_cast_to_bf16() -> None:
    model, videos = small(), some_videos()
    expected = model(videos, FRAMES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(videos, FRAMES)
    for logits in (found, model.bfloat16()(videos, FRAMES)):
        for ours, reference in zip(logits, expected, strict=True):
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours, reference, rtol=0.05, atol=0.05)


def test_mistakes_are_one_line() -> None:
    with pytest.raises(ValueError, match=r"^images of 15 pixels are too small .* which needs 16"):
        small()(some_videos(side=15), FRAMES)
    with pytest.raises(ValueError, match=r"time strides \[2, 1\]: give positive, rising numbers$"):
        small(time_strides=(2, 1))
    with pytest.raises(ValueError, match=r"^clip heads of 0 channels"):
        small(clip_dim=0)
