"""The video tokenizer: which frame depends on which, streams, sizes, codes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.models import StreamState, VideoTokenizer
from tests.models.helpers import TOKENIZER, WAN, WAN_2_2, lively, refused, some, some_videos

# Layers that divide time by S_t: one that keeps the number of frames comes before and after each that does not.
COMPRESSING = {
    1: "residual,attend_time,compress_space:6,gateloop_time",
    2: "residual,compress_time:6,attend_time,gateloop_time,adaptive",
    4: "residual,compress_space:6,compress_time,gateloop_time,adaptive,compress_time,attend_time,residual",
}
EVERY = (
    "attend_time,attend_space,residual,linear_attend_space,residual_space,compress_time:6,adaptive,compress_time,"
    "consecutive_residual:2"
)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"layers": COMPRESSING[4], "norm": "none"},
    "haar": {"layers": COMPRESSING[4], "patch_size": 2},
    "first": {"layers": COMPRESSING[2], "separate_first_frame": True, "pad_mode": "replicate"},
    "window": {"layers": COMPRESSING[1], "time_window": 2, "patch_size": 2, "patch": "pixels"},
    "every layer": {"layers": EVERY},
    "wan": {**WAN, "ch_mult": [1, 2, 3], "time_levels": [0, 1]},
    "wan 2.2": WAN_2_2,
}
variants = pytest.mark.parametrize("variant", VARIANTS)


def tokenizer(variant: str = "haar", **changes: Any) -> VideoTokenizer:
    """In eval mode. Gates and modulations that start as constants depend on their input here."""
    torch.manual_seed(0)
    return lively(VideoTokenizer.from_dict({**TOKENIZER, **VARIANTS[variant], **changes})).eval()


# The vectors between encoder and decoder have no public way in or out: codes would hide what they depend on.


def latents(model: VideoTokenizer, videos: Tensor) -> Tensor:
    return torch.cat(list(model._latents(videos)), dim=2)


def frames_of(model: VideoTokenizer, quantized: Tensor) -> Tensor:
    return model._decode(quantized)[0]


def depends_on(outputs: Tensor, inputs: Tensor) -> Tensor:
    """bool (f', f): whether frame f' of the outputs depends on frame f of the inputs."""
    rows = [torch.autograd.grad(frame.sum(), inputs, retain_graph=True)[0] for frame in outputs.unbind(2)]
    return torch.stack([row.abs().sum(dim=(0, 1, 3, 4)) > 0 for row in rows])


BODIES = [*(("plain", {"layers": layers}, per_code) for per_code, layers in COMPRESSING.items()), ("wan", {}, 4),
          ("wan 2.2", {}, 2)]  # fmt: skip
bodies = pytest.mark.parametrize(("variant", "changes", "per_code"), BODIES)


@pytest.mark.parametrize("training", [False, True])
@bodies
def test_code_j_depends_on_frame_j_s_and_on_none_after_it_and_no_frame_is_lost(
    variant: str, changes: dict[str, Any], per_code: int, training: bool
) -> None:
    model = tokenizer(variant, **changes).train(training)
    videos = some_videos(1, 17).requires_grad_()
    seen = depends_on(latents(model, videos), videos)
    assert seen.shape == (1 + 16 // per_code, 17) and model.frames_per_code == per_code
    for j, row in enumerate(seen):
        assert row[per_code * j] and not row[per_code * j + 1 :].any()
    assert seen[0, 0] and seen.any(dim=0).all()


@pytest.mark.parametrize("training", [False, True])
@bodies
def test_a_frame_is_made_from_its_own_code_and_earlier_ones(
    variant: str, changes: dict[str, Any], per_code: int, training: bool
) -> None:
    model = tokenizer(variant, **changes).train(training)
    quantized = some(1, model.quantizer.dim, 5, 4, 4).requires_grad_()
    seen = depends_on(frames_of(model, quantized), quantized)
    assert seen.shape == (1 + 4 * per_code, 5)
    for frame, row in enumerate(seen):
        own = -(-frame // per_code)
        assert row[own] and not row[own + 1 :].any()


@variants
def test_a_clip_in_chunks_is_the_clip_at_once(variant: str) -> None:
    """Train mode computes at once what eval mode computes in chunks; in fp64, what is left is rounding."""
    model = tokenizer(variant).double()
    videos = some_videos(2, 9, 8, 12).double()
    with torch.no_grad():
        chunked = latents(model, videos)
        quantized = chunked.sign()
        frames = frames_of(model, quantized)
        model.train()
        torch.testing.assert_close(latents(model, videos), chunked, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(frames_of(model, quantized), frames, rtol=1e-6, atol=1e-6)  # fp32


@variants
def test_an_image_has_the_codes_and_the_picture_of_the_first_frame(variant: str) -> None:
    model = tokenizer(variant)
    videos = some_videos(2, 9)
    with torch.no_grad():
        whole, image = model(videos), model(videos[:, :, 0])
        assert torch.equal(image.codes, whole.codes[:, 0])
        assert torch.equal(image.reconstruction, whole.reconstruction[:, :, 0])
        assert torch.equal(model.encode(videos[:, :, 0]), image.codes)
        assert torch.equal(model.decode(image.codes), image.reconstruction)


def encoded(model: VideoTokenizer, videos: Tensor, plan: list[int]) -> Tensor:
    state = StreamState()
    return torch.cat([model.encode_next(part, state) for part in videos.split(plan, dim=2)], dim=1)


def decoded(model: VideoTokenizer, codes: Tensor, plan: list[int]) -> Tensor:
    state = StreamState()
    return torch.cat([model.decode_next(part, state) for part in codes.split(plan, dim=1)], dim=2)


@variants
@pytest.mark.parametrize("plan", [[1, 4, 4], [1, 8], [5, 4], [1] * 9, [3, 2, 0, 3, 1]], ids=str)
def test_a_stream_gives_the_bits_of_the_whole_clip(variant: str, plan: list[int]) -> None:
    model = tokenizer(variant)
    videos = some_videos(2, 9)
    codes = model.encode(videos)
    assert torch.equal(encoded(model, videos, plan), codes)
    frames = codes.shape[1]
    plan = [frames] if len(plan) == 2 else [1] * frames if len(plan) > 5 else [frames - 1, 0, 1]
    with torch.no_grad():
        assert torch.equal(decoded(model, codes, plan), model.decode(codes))


def test_frames_that_do_not_fit_are_refused_with_the_nearest_that_do_in_a_stream_too() -> None:
    model = tokenizer()
    for frames, use in ((0, "1 or 5"), (4, "1 or 5"), (16, "13 or 17"), (18, "17 or 21")):
        said = refused(model, some_videos(1, frames))
        assert f"{frames} frames" in said and f"use {use}" in said
    state = StreamState()
    model.encode_next(some_videos(2, 3), state)
    assert state.pending is not None and state.num_consumed + state.pending.shape[2] == 3  # no code has them all
    assert "(1, 3, 8, 8)" in refused(model.encode_next, some_videos(1, 3), state)
    assert "width 10" in refused(model.encode_next, some_videos(2, 3, 8, 10), state)


def test_latents_of_lfq_alone_are_clamped_softly() -> None:
    videos = some_videos(1, 1)
    sharp, soft = (latents(tokenizer(quantizer="lfq", soft_clamp=clamp), videos) for clamp in (0.0, 0.5))
    torch.testing.assert_close(soft, 0.5 * torch.tanh(sharp / 0.5))
    others = [latents(tokenizer(quantizer="bsq", soft_clamp=clamp), videos) for clamp in (0.0, 0.5)]
    assert torch.equal(*others)


IMAGE_LAYERS = ["residual,compress_space:6,residual", COMPRESSING[4], "attend_time,compress_space:6,gateloop_time"]


@pytest.mark.parametrize(
    ("variant", "layers"), [*itertools.product(["plain", "haar", "first", "window"], IMAGE_LAYERS), ("wan", "")]
)
def test_a_model_inflated_from_images_codes_every_frame_like_an_image(
    variant: str, layers: str, tmp_path: Path
) -> None:
    """Of frames that share a code, it codes the last one. Nothing that images do not train has an effect."""
    of_images, model = tokenizer(variant, layers=layers), tokenizer(variant, layers=layers)
    of_images.train()
    F.mse_loss(of_images(some_videos(3, 1)).reconstruction, some_videos(3, 1)).backward()
    with torch.no_grad():
        for weight in of_images.parameters():  # what is untrained is not what it was in `model`
            weight[weight.grad == 0] = torch.randn_like(weight)[weight.grad == 0]
    of_images.eval().save_pretrained(tmp_path)
    model.inflate_from(tmp_path)
    per_code = model.frames_per_code
    videos = some_videos(2, 1 + 2 * per_code)
    with torch.no_grad():
        out = model(videos)
        for frame in range(videos.shape[2]):
            last = math.ceil(frame / per_code) * per_code
            image = of_images(videos[:, :, last])
            assert torch.equal(out.codes[:, last // per_code], image.codes)
            # The kernels have three slices here and one there: other sums, equal but for rounding.
            torch.testing.assert_close(out.reconstruction[:, :, frame], image.reconstruction, rtol=1e-5, atol=1e-5)
