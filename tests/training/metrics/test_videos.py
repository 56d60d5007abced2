"""Measures of videos against closed forms, and pooling over processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.training.metrics.reconstruction import ReconstructedVariance, psnr, ssim
from tandem.training.metrics.videos import VideoQuality, dpsnr, flicker
from tests.processes import on_processes


def some_videos(frames: int = 5, batch: int = 2, seed: int = 0) -> Tensor:
    return torch.rand(batch, 3, frames, 8, 8, generator=torch.Generator().manual_seed(seed)) * 0.6 + 0.2


def errors(kind: str, frames: int = 2000) -> Tensor:
    """(1, 1, f, 2, 2) of size 0.1: the same in every frame, with alternating sign, or with random signs."""
    size = torch.full((1, 1, frames, 2, 2), 0.1)
    if kind == "still":
        return size
    if kind == "alternating":
        return size * (1 - 2 * (torch.arange(frames) % 2))[:, None, None]
    return size * (1 - 2 * torch.randint(2, size.shape, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("kind", "of_flicker", "of_motion"),
    # The differences of neighbouring errors are 0, or 0.2, or 0 and 0.2 equally often.
    [("still", 0, 100), ("alternating", 2, -20 * math.log10(0.2)), ("random", 1, -10 * math.log10(0.02))],
)
def test_flicker_and_psnr_of_the_motion_have_their_closed_forms(kind: str, of_flicker: float, of_motion: float) -> None:
    videos, error = torch.full((1, 1, 2000, 2, 2), 0.5), errors(kind)
    # Of 8000 random signs; rounding of 0.5 + 0.1 shows in "still" as 1e-14 of a square.
    assert flicker(videos, videos + error).item() == pytest.approx(of_flicker, abs=0.05 if kind == "random" else 1e-6)
    tolerance = 0.2 if kind == "random" else 1e-3
    assert dpsnr(videos, videos + error).item() == pytest.approx(of_motion, abs=tolerance)


def measured(*parts: tuple[Tensor, Tensor], num_frames: int = 5, **networks: Any) -> VideoQuality:
    quality = VideoQuality(16, num_frames, losses=["recon_loss"], **networks)
    for x, y in parts:
        codes = torch.arange(len(x))
        quality.add(x, y, codes, recon_loss=(x - y).abs().mean())
    return quality


def test_values_of_frames_are_means_over_frames_and_first_frames_are_apart() -> None:
    x, y = some_videos(), some_videos(seed=1)
    y[:, :, 0] = x[:, :, 0] + 0.01
    lpips: Callable[[Tensor, Tensor], dict[str, Tensor]] = lambda fake, real: {  # noqa: E731
        "perceptual_loss": (fake - real).square().mean()
    }
    values, counts = measured((x, y), lpips=lpips).result()
    of_frames = torch.stack([psnr(x[:, :, t], y[:, :, t]) for t in range(5)])
    assert values["psnr"] == pytest.approx(of_frames.mean().item(), rel=1e-6)
    assert values["psnr_first"] == pytest.approx(40, abs=1e-3)
    assert values["psnr_rest"] == pytest.approx(of_frames[1:].mean().item(), rel=1e-6)
    of_ssim = [ssim(x[:, :, t], y[:, :, t]).mean().item() for t in range(5)]
    assert values["ssim"] == pytest.approx(sum(of_ssim) / 5, rel=1e-6)
    assert values["lpips"] == pytest.approx((x - y).square().mean().item(), rel=1e-5)
    assert values["dpsnr"] == pytest.approx(dpsnr(x, y).mean().item(), rel=1e-6)
    assert values["flicker"] == pytest.approx(flicker(x, y).mean().item(), rel=1e-6)
    assert values["recon_loss"] == pytest.approx((x - y).abs().mean().item(), rel=1e-6)
    kept = ReconstructedVariance()
    kept.add(*(videos.transpose(1, 2).flatten(0, 1) for videos in (x, y)))
    assert {name: values[name] for name in kept.result()} == pytest.approx(kept.result())
    assert values["codes_used"] == 2 and counts.tolist() == [1, 1] + [0] * 14


def test_one_frame_videos_have_the_values_of_images_and_nothing_of_motion() -> None:
    x, y = some_videos(1), some_videos(1, seed=1)
    values, _ = measured((x, y), num_frames=1).result()
    of_codes = {"codes_used", "codes_used_fraction", "perplexity"}
    assert values.keys() - of_codes == {"recon_loss", "psnr", "ssim", "variance_kept", "explained_variance"}
    assert values["psnr"] == pytest.approx(psnr(x[:, :, 0], y[:, :, 0]).mean().item(), rel=1e-6)
    mixed = measured((x, y), (some_videos(), some_videos(seed=1))).result()[0]
    assert mixed["dpsnr"] == pytest.approx(dpsnr(some_videos(), some_videos(seed=1)).mean().item(), rel=1e-6)


def i3d(videos: Tensor) -> Tensor:
    """Stands in for it: 400 numbers of each clip."""
    weight = torch.randn(400, videos[0].numel(), generator=torch.Generator().manual_seed(0))
    return videos.flatten(1) @ weight.T


def test_two_processes_with_unequal_shares_have_the_values_of_one() -> None:
    x, y = some_videos(batch=10), some_videos(batch=10, seed=1)
    one = measured((x, y), i3d=i3d).result()[0]
    shares = [slice(7), slice(7, None)]
    for both in on_processes(
        2, lambda here: measured((x[shares[here.rank]], y[shares[here.rank]]), i3d=i3d).result(here.sum)[0]
    ):
        assert both.pop("rfvd") == pytest.approx(one["rfvd"], rel=1e-4) and one["psnr"] > 0
        of_codes = {"codes_used", "codes_used_fraction", "perplexity"}  # each share has those of its own numbers
        assert {name: both[name] for name in both.keys() - of_codes} == pytest.approx(
            {name: one[name] for name in one.keys() - of_codes - {"rfvd"}}, rel=1e-6
        )
