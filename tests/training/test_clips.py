"""What is drawn at random about the clips of an update."""

from __future__ import annotations

from collections import Counter

import torch

from tandem.training import ClipDraws

CPU = torch.device("cpu")


def test_each_length_is_drawn_equally_often_as_a_function_of_seed_and_update() -> None:
    draws, again = (ClipDraws(3, (5, 9, 17), CPU) for _ in range(2))
    lengths = [draws.length(step) for step in range(600)]
    assert [again.length(step) for step in reversed(range(600))] == lengths[::-1]
    counts = Counter(lengths)
    assert set(counts) == {5, 9, 17} and min(counts.values()) > 160  # of 200; the deviation is 11.5
    assert [ClipDraws(4, (5, 9, 17), CPU).length(step) for step in range(600)] != lengths


def test_a_dry_run_draws_the_longest_clips() -> None:
    assert {ClipDraws(3, (5, 17, 9), CPU, only_longest=True).length(step) for step in range(20)} == {17}


def test_clips_are_cut_to_their_length_and_images_stay_images() -> None:
    draws = ClipDraws(0, (5,), CPU)
    clips, images = torch.rand(2, 3, 9, 4, 4), torch.rand(2, 3, 1, 4, 4)
    cut = draws.cut({"videos": clips, "positions": [0, 1]}, 7)
    assert torch.equal(cut["videos"], clips[:, :, :5]) and cut["positions"] == [0, 1]
    assert torch.equal(draws.cut({"videos": images}, 7)["videos"], images)


def test_the_frames_that_are_judged_alone_lie_in_the_clip_and_depend_on_the_place_in_the_batch() -> None:
    draws = ClipDraws(0, (9,), CPU)
    videos = torch.zeros(400, 3, 5, 1, 1)
    frames = draws.frames({"videos": videos, "positions": range(400)}, 2)["frames"]
    assert sorted(set(frames.tolist())) == [0, 1, 2, 3, 4]
    assert torch.equal(draws.frames({"videos": videos[:3], "positions": [7, 8, 9]}, 2)["frames"], frames[7:10])
