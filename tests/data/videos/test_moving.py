"""demo:moving: scenes that do not depend on the size or the length of the clip."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from data import open_videos


def opened(**changed):
    return open_videos("demo:moving:50", **{"image_size": 32, "num_frames": 9, **changed})


def test_a_longer_clip_begins_with_a_shorter_one():
    long, short, image = opened(num_frames=41), opened(), opened(num_frames=1)
    for i in range(10):
        assert torch.equal(long.load(i)[:, :9], short.load(i))
        assert torch.equal(long.load(i)[:, :1], image.load(i))


def test_every_size_shows_the_same_scene():
    small, large = opened(), opened(image_size=128)
    for i in range(10):
        reduced = F.avg_pool2d(large.load(i).float().transpose(0, 1), 4).transpose(0, 1)
        assert (small.load(i).float() - reduced).abs().mean() < 3  # edges are one pixel of either size wide


def test_shapes_move_steadily_and_stay_in_the_picture():
    for i in range(50):
        for mover in opened().movers(i):
            speed = math.hypot(mover.speed_x, mover.speed_y)
            for frame in range(300):
                now, next_ = mover.at(frame), mover.at(frame + 1)
                assert 0.2 < now.x < 0.8 and 0.2 < now.y < 0.8
                assert math.hypot(next_.x - now.x, next_.y - now.y) <= speed + 1e-9
            start = mover.at(0)
            assert (start.x, start.y) == pytest.approx((mover.item.x, mover.item.y)) and start.angle == mover.item.angle


@pytest.mark.parametrize(("speed", "step"), [({"frame_stride": 3}, 3), ({"fps": 12.0}, 2), ({"fps": 6.0}, 4)])
def test_clips_may_be_faster(speed, step):
    all_frames = opened(num_frames=1 + 8 * step)
    assert torch.equal(opened(**speed).load(4), all_frames.load(4)[:, ::step])
