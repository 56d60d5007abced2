"""The video tokenizer: which frame depends on which, streams, sizes, codes."""

from __future__ import annotations

import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import VideoTokenizer
from models.quantizers import QUANTIZERS
from models.video.layers import LAYERS
from models.video.streams import StreamState
from tests.models.helpers import TOKENIZER, some, some_videos

# Layers that divide time by S_t: one that keeps the number of frames comes before and after each that does not.
COMPRESSING = {
    1: "residual,attend_time,compress_space:6,gateloop_time",
    2: "residual,compress_time:6,attend_time,gateloop_time,adaptive",
    4: "residual,compress_space:6,compress_time,gateloop_time,adaptive,compress_time,attend_time,residual",
}
EVERY = "cond_attend_time,attend_space,cond_residual,linear_attend_space,cond_attend_space,residual_space"
CONDITIONAL = f"{EVERY},compress_time:6,cond_linear_attend_space,adaptive,compress_time,consecutive_residual:2"
UNCONDITIONAL = "attend_space,residual,linear_attend_space,compress_space:6,gateloop_time,attend_time"
SMALL: dict[str, Any] = {**TOKENIZER, "heads": 2, "dim_head": 3, "linear_heads": 2, "linear_dim_head": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"layers": COMPRESSING[4], "norm": "none"},
    "haar": {"layers": COMPRESSING[4], "patch_size": 2},
    "first": {"layers": COMPRESSING[2], "separate_first_frame": True, "pad_mode": "replicate"},
    "window": {"layers": COMPRESSING[1], "time_window": 2, "patch_size": 2, "patch": "pixels"},
    "cond": {"layers": CONDITIONAL, "dim_cond": 3},
}
variants = pytest.mark.parametrize("variant", VARIANTS)


def tokenizer(variant: str = "haar", **changes: Any) -> VideoTokenizer:
    """In eval mode. Gates and modulations that start as constants depend on their input here."""
    torch.manual_seed(0)
    model = VideoTokenizer(**{**SMALL, **VARIANTS[variant], **changes}).eval()
    for weight in model.parameters():
        if not weight.any():
            nn.init.normal_(weight, std=0.3)
    return model


def condition(model: VideoTokenizer, batch: int = 2) -> tuple[Tensor, ...]:
    """What the model's methods take after their first argument."""
    return (some(batch, 3),) if model.is_conditional else ()


def latents(model: VideoTokenizer, videos: Tensor) -> Tensor:
    return torch.cat(list(model._latents(videos, *(condition(model, len(videos)) or (None,)))), dim=2)


def frames_of(model: VideoTokenizer, quantized: Tensor) -> Tensor:
    return model._decode(quantized, *(condition(model, len(quantized)) or (None,)))[0]


def depends_on(outputs: Tensor, inputs: Tensor) -> Tensor:
    """bool (f', f): whether frame f' of the outputs depends on frame f of the inputs."""
    rows = [torch.autograd.grad(frame.sum(), inputs, retain_graph=True)[0] for frame in outputs.unbind(2)]
    return torch.stack([row.abs().sum(dim=(0, 1, 3, 4)) > 0 for row in rows])


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_the_encoder_learns_from_the_reconstruction(quantizer: str) -> None:
    """Measured: its gradient has a fifth of the norm of the decoder's or more; see test_vqgan.py."""
    model = tokenizer("plain", quantizer=quantizer, codebook_size=256).train()
    F.mse_loss(model(some_videos()).reconstruction, some_videos()).backward()
    of_encoder, of_decoder = (
        torch.stack([torch.linalg.vector_norm(p.grad) for p in half.parameters() if p.grad is not None]).norm()
        for half in (model.encoder, model.decoder)
    )
    assert of_encoder > of_decoder / 1000


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("per_code", COMPRESSING)
def test_code_j_depends_on_frame_j_s_and_on_none_after_it_and_no_frame_is_lost(per_code: int, training: bool) -> None:
    model = tokenizer("plain", layers=COMPRESSING[per_code]).train(training)
    videos = some_videos(1, 17).requires_grad_()
    seen = depends_on(latents(model, videos), videos)
    assert seen.shape == (1 + 16 // per_code, 17) and model.frames_per_code == per_code
    for j, row in enumerate(seen):
        assert row[per_code * j] and not row[per_code * j + 1 :].any()
    assert seen[0, 0] and seen.any(dim=0).all()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("per_code", COMPRESSING)
def test_a_frame_is_made_from_its_own_code_and_earlier_ones(per_code: int, training: bool) -> None:
    model = tokenizer("plain", layers=COMPRESSING[per_code]).train(training)
    quantized = some(1, model.quantizer.dim, 5, 4, 4).requires_grad_()
    seen = depends_on(frames_of(model, quantized), quantized)
    assert seen.shape == (1 + 4 * per_code, 5)
    for frame, row in enumerate(seen):
        own = -(-frame // per_code)
        assert row[own] and not row[own + 1 :].any()


@variants
def test_later_frames_change_no_bit_of_earlier_codes_and_frames(variant: str) -> None:
    for training in (False, True):
        model = tokenizer(variant).train(training)
        per_code, videos = model.frames_per_code, some_videos(2, 9)
        with torch.no_grad():
            z = latents(model, videos)
            quantized = z.sign()
            video = frames_of(model, quantized)
            for k in (1, 4, 5, 8):
                changed = torch.cat([videos[:, :, :k], some_videos(2, 9 - k, seed=2)], dim=2)
                first = -(-k // per_code)  # the first code that sees frame k
                z_changed = latents(model, changed)
                assert torch.equal(z_changed[:, :, :first], z[:, :, :first])
                assert not torch.equal(z_changed[:, :, first], z[:, :, first])
                if first < z.shape[2]:
                    flipped = torch.cat([quantized[:, :, :first], -quantized[:, :, first:]], dim=2)
                    same = per_code * (first - 1) + 1
                    video_changed = frames_of(model, flipped)
                    assert torch.equal(video_changed[:, :, :same], video[:, :, :same])
                    assert not torch.equal(video_changed[:, :, same], video[:, :, same])


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
def test_the_beginning_of_a_clip_has_the_codes_and_frames_of_the_whole_and_an_image_those_of_its_first(
    variant: str,
) -> None:
    model = tokenizer(variant)
    cond, videos = condition(model), some_videos(2, 9)
    with torch.no_grad():
        whole = model(videos, *cond)
        for n in range(8 // model.frames_per_code + 1):
            frames = 1 + model.frames_per_code * n
            beginning = model(videos[:, :, :frames], *cond)
            assert torch.equal(latents(model, videos[:, :, :frames]), latents(model, videos)[:, :, : 1 + n])
            assert torch.equal(beginning.codes, whole.codes[:, : 1 + n])
            assert torch.equal(beginning.reconstruction, whole.reconstruction[:, :, :frames])
        image = model(videos[:, :, 0], *cond)
        assert torch.equal(image.codes, whole.codes[:, 0])
        assert torch.equal(image.reconstruction, whole.reconstruction[:, :, 0])
        assert torch.equal(model.encode(videos[:, :, 0], *cond), image.codes)
        assert torch.equal(model.decode(image.codes, *cond), image.reconstruction)


def encoded(model: VideoTokenizer, videos: Tensor, plan: list[int]) -> Tensor:
    state = model.start_encoding(*condition(model, len(videos)))
    codes = torch.cat([model.encode_next(part, state) for part in videos.split(plan, dim=2)], dim=1)
    model.finish_encoding(state)
    return codes


def decoded(model: VideoTokenizer, codes: Tensor, plan: list[int]) -> Tensor:
    state = model.start_decoding(*condition(model, len(codes)))
    return torch.cat([model.decode_next(part, state) for part in codes.split(plan, dim=1)], dim=2)


@variants
@pytest.mark.parametrize("plan", [[1, 4, 4], [1, 8], [5, 4], [1] * 9, [3, 2, 0, 3, 1]], ids=str)
def test_a_stream_gives_the_bits_of_the_whole_clip(variant: str, plan: list[int]) -> None:
    model = tokenizer(variant)
    cond, videos = condition(model), some_videos(2, 9)
    codes = model.encode(videos, *cond)
    assert torch.equal(encoded(model, videos, plan), codes)
    frames = codes.shape[1]
    plan = [frames] if len(plan) == 2 else [1] * frames if len(plan) > 5 else [frames - 1, 0, 1]
    with torch.no_grad():
        assert torch.equal(decoded(model, codes, plan), model.decode(codes, *cond))


def bytes_of(state: StreamState) -> int:
    return len(pickle.dumps(state))


@variants
def test_a_stream_needs_no_more_memory_the_longer_it_gets(variant: str) -> None:
    model = tokenizer(variant, time_window=2)
    state, back = (start(*condition(model)) for start in (model.start_encoding, model.start_decoding))
    sizes = []
    for _ in range(50):
        codes = model.encode_next(some_videos(2, 4), state)
        model.decode_next(codes, back)
        sizes.append((bytes_of(state), bytes_of(back)))
    # The number of frames used takes a byte more from 256 on.
    assert all(abs(late - early) <= 2 for late, early in zip(sizes[-1], sizes[4], strict=True))
    tensors = [tensor for it in (state, back) for tensor in (it.pending, *it.kept.values()) if tensor is not None]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)  # none is a view


@variants
def test_streams_do_not_mix_and_go_on_from_a_pickled_state(variant: str) -> None:
    model = tokenizer(variant)
    cond = condition(model)
    videos = [some_videos(2, 9, seed=1), some_videos(2, 9, 8, 12, seed=2)]
    states, backs = ([start(*cond) for _ in videos] for start in (model.start_encoding, model.start_decoding))
    codes, frames = ([[] for _ in videos] for _ in range(2))
    for start, number in itertools.product(range(0, 9, 3), range(2)):
        states[number], backs[number] = pickle.loads(pickle.dumps((states[number], backs[number])))
        new = model.encode_next(videos[number][:, :, start : start + 3], states[number])
        codes[number].append(new)
        frames[number].append(model.decode_next(new, backs[number]))
    with torch.no_grad():
        for number, video in enumerate(videos):
            out = model(video, *cond)
            assert torch.equal(torch.cat(codes[number], dim=1), out.codes)
            assert torch.equal(torch.cat(frames[number], dim=2), out.reconstruction)


def test_a_stream_that_cannot_go_on_says_so() -> None:
    model = tokenizer()
    state = model.start_encoding()
    model.encode_next(some_videos(2, 3), state)
    with pytest.raises(ValueError, match=r"^3 frames must be 1 \+ 4 n, .*; use 1 or 5$"):
        model.finish_encoding(state)
    with pytest.raises(ValueError, match=r"cannot go on with frames \(1, 3, 8, 8\)"):
        model.encode_next(some_videos(1, 3), state)
    with pytest.raises(ValueError, match="width 10 must be"):
        model.encode_next(some_videos(2, 3, 8, 10), state)


@pytest.mark.parametrize(("frames", "use"), [(0, "1 or 5"), (4, "1 or 5"), (16, "13 or 17"), (18, "17 or 21")])
def test_frames_that_do_not_fit_are_an_error_that_names_the_nearest_that_do(frames: int, use: str) -> None:
    with pytest.raises(ValueError, match=rf"^{frames} frames must be 1 \+ 4 n, .*; use {use}$"):
        tokenizer()(some_videos(1, frames))


@pytest.mark.parametrize("frames", [1, 5, 13])
@pytest.mark.parametrize("side", [(8, 8), (4, 12), (16, 8)])
def test_any_number_of_frames_and_any_size_that_fit_are_taken(frames: int, side: tuple[int, int]) -> None:
    model = tokenizer()
    videos = some_videos(2, frames, *side)
    with torch.no_grad():
        out = model(videos)
        codes = model.tokenize(videos)
        assert codes.shape == (2, 1 + (frames - 1) // 4, side[0] // 4, side[1] // 4)
        assert model.decode_from_code_indices(codes).shape == videos.shape == out.reconstruction.shape
    with pytest.raises(ValueError, match="height 6 must be a multiple of 4, "):
        model.encode(some_videos(1, 1, 6, 8))


def test_flat_codes_are_those_of_videos_of_the_trained_size() -> None:
    model = tokenizer()
    with torch.no_grad():
        codes = model.encode(some_videos(2, 5))
        assert torch.equal(model.decode(codes.flatten(1)), model.decode(codes))
        with pytest.raises(ValueError, match="7 codes fill no frames of 2 x 2"):
            model.decode(torch.zeros(1, 7, dtype=torch.int64))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_in_both_modes_codes_decode_to_the_bits_of_the_reconstruction(quantizer: str) -> None:
    options = {"fsq_levels": [4, 4]} if quantizer == "fsq" else {}
    model = tokenizer(quantizer=quantizer, **options)
    videos = some_videos(2, 5)
    for training in (True, False):  # vq has its codebook after the first pass
        model.train(training)
        out = model(videos)
        assert out.reconstruction.shape == videos.shape and out.reconstruction.dtype == torch.float32
        assert out.codes.shape == (2, 2, 2, 2) and out.codes.dtype == torch.int64 and out.codes.max() < model.num_codes
        assert set(out.losses) == set(model.quantizer.loss_names)
        assert out.features.shape == (2, 4, 5, 4, 4) and not out.features.requires_grad
        with torch.no_grad():
            assert torch.equal(model.decode(out.codes), out.reconstruction)
            assert torch.equal(model.encode(videos), out.codes)
        (F.mse_loss(out.reconstruction, videos) + sum(out.losses.values())).backward()
        assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    assert model(videos, observe=True) is None


def test_latents_of_lfq_alone_are_clamped_softly() -> None:
    videos = some_videos(1, 1)
    sharp, soft = (latents(tokenizer(quantizer="lfq", soft_clamp=clamp), videos) for clamp in (0.0, 0.5))
    torch.testing.assert_close(soft, 0.5 * torch.tanh(sharp / 0.5))
    others = [latents(tokenizer(quantizer="bsq", soft_clamp=clamp), videos) for clamp in (0.0, 0.5)]
    assert torch.equal(*others)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("frames", [1, 5])
@pytest.mark.parametrize(("patch", "pad_mode"), [("haar", "constant"), ("pixels", "reflect")])
def test_the_last_layers_gradient_needs_no_pass_through_the_model(
    separate: bool, frames: int, patch: str, pad_mode: str
) -> None:
    model = tokenizer(patch=patch, pad_mode=pad_mode, separate_first_frame=separate).train()
    videos = some_videos(2, frames)
    videos = videos if frames > 1 else videos[:, :, 0]
    out = model(videos)
    loss = (out.reconstruction - videos).abs().sum()
    (at_videos,) = torch.autograd.grad(loss, out.reconstruction, retain_graph=True)
    weights = [p for name, p in model.decoder.conv_out.named_parameters() if name.endswith("weight")]
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)])
    assert len(weights) == 1 + separate
    torch.testing.assert_close(model.last_layer_gradient(out.features, at_videos), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["plain", "first"])
def test_images_train_the_last_time_slice_of_each_kernel_alone(variant: str) -> None:
    model = tokenizer(variant).train()
    out = model(some_videos(3, 1))
    F.mse_loss(out.reconstruction, some_videos(3, 1)).backward()
    kernels = [p for p in model.parameters() if p.dim() == 5 and p.shape[2] > 1]
    assert kernels and all(p.grad is not None and not p.grad[:, :, :-1].any() for p in kernels)
    is_used = [bool(p.grad[:, :, -1].any()) for p in kernels]  # type: ignore[index]
    assert is_used.count(False) == (2 if variant == "first" else 0)


@pytest.mark.parametrize("variant", ["plain", "haar", "first", "window"])
@pytest.mark.parametrize("layers", [
    "residual,compress_space:6,residual", COMPRESSING[4], "attend_time,compress_space:6,gateloop_time",
])  # fmt: skip
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


def test_an_inflated_model_learns_to_look_back(tmp_path: Path) -> None:
    tokenizer("plain").save_pretrained(tmp_path)
    model = tokenizer("plain").train()
    model.inflate_from(tmp_path)
    F.mse_loss(model(some_videos(2, 9)).reconstruction, some_videos(2, 9)).backward()
    gains = {name: p for name, p in model.named_parameters() if name.endswith("past_gain")}
    # Three of attend_time and one of gateloop_time, in both halves.
    assert len(gains) == 8 and not any(gain.any() for gain in gains.values())
    assert all(gain.grad is not None and gain.grad.any() for gain in gains.values())


class _Border(torch.autograd.Function):
    """The identity, with a node of its own in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        return gradient[0]


def parted(values: Any) -> Any:
    if isinstance(values, tuple):
        each = [parted(value) for value in values]
        return type(values)(*each) if hasattr(values, "_fields") else tuple(each)
    return _Border.apply(values) if isinstance(values, Tensor) and values.requires_grad else values  # type: ignore[no-untyped-call]


@variants
def test_gradients_have_the_same_bits_with_hooks_at_the_borders_of_all_layers(variant: str) -> None:
    """ZeRO 3 sets such hooks. The order in which three gradients of one tensor are added must not depend on them."""
    gradients = []
    for is_parted in (False, True):
        model = tokenizer(
            variant,
            norm="rms",
            layers=CONDITIONAL if variant == "cond" else f"adaptive,{UNCONDITIONAL},adaptive,compress_time",
        ).train()
        for module in model.modules() if is_parted else ():
            module.register_forward_pre_hook(lambda _, given: parted(given))
            module.register_forward_hook(lambda _, given, out: parted(out))
        out = model(some_videos(2, 5), *condition(model))
        (F.mse_loss(out.reconstruction, some_videos(2, 5)) + out.losses["commitment"]).backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    unequal = [name for name in gradients[0] if not torch.equal(gradients[0][name], gradients[1][name])]
    # A condition's own gradient is a sum over layers and the norms in them. No script has conditions yet.
    assert [name for name in unequal if not name.startswith(("encoder.condition.", "decoder.condition."))] == []


def test_a_condition_reaches_codes_and_frames_and_is_neither_forgotten_nor_superfluous() -> None:
    model, other = tokenizer("cond"), tokenizer()
    videos = some_videos(2, 5)
    with torch.no_grad():
        z, frames = (f(model, x) for f, x in ((latents, videos), (frames_of, some(2, 4, 2, 8, 8))))
        conds = some(2, 3, seed=5)
        assert not torch.equal(torch.cat(list(model._latents(videos, conds)), dim=2), z)
        assert not torch.equal(model._decode(some(2, 4, 2, 8, 8), conds)[0], frames)
        for call in (model, model.encode, lambda x: model.start_encoding()):
            with pytest.raises(ValueError, match="need a condition"):
                call(videos)
        with pytest.raises(ValueError, match="no layer takes one"):
            other(videos, conds)


def test_every_layer_is_tested_and_no_norm_pools_over_frames_or_clips() -> None:
    models = [tokenizer(variant) for variant in VARIANTS]
    used = {layer.partition(":")[0] for model in models for layer in model.config["layers"].split(",")}
    assert used == LAYERS.keys()
    norms = (nn.GroupNorm, nn.LayerNorm, nn.modules.batchnorm._NormBase, nn.Dropout)
    assert not [module for model in models for module in model.modules() if isinstance(module, norms)]


def test_the_first_frame_of_clips_and_images_has_a_convolution_of_its_own() -> None:
    model = tokenizer("first")
    videos, images = some_videos(2, 5), some_videos(2, 1)
    with torch.no_grad():
        whole, image = model(videos), model(images)
        model.decoder.conv_out.first.bias += 2  # of values in [-1, 1], which become [0, 1]
        again, image_again = model(videos), model(images)
    torch.testing.assert_close(again.reconstruction[:, :, 0], whole.reconstruction[:, :, 0] + 1)
    torch.testing.assert_close(image_again.reconstruction, image.reconstruction + 1)
    assert torch.equal(again.reconstruction[:, :, 1:], whole.reconstruction[:, :, 1:])
