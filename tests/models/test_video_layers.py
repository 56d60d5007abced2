"""The layers of the video tokenizer, each against a closed form. Those of reference/tokenizer.py are compared in
tests/test_references.py."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.config.models.autoencoders import VideoTokenizerConfig
from tandem.models.layers.video.attention import (
    AdaptiveNorm,
    AttentionBlock,
    GateLoop,
    MemoryAttention,
    TaylorAttention,
)
from tandem.models.layers.video.blocks import check_side, frames_per_code, parse_layers, pixels_per_code
from tandem.models.layers.video.causal import (
    CausalConv3d,
    Context,
    ResidualUnit,
    SpaceUp,
    TimeUp,
    pad_space,
)
from tandem.models.layers.video.patches import from_patches, to_patches
from tests.models.helpers import some

WHOLE = Context()


@pytest.fixture(autouse=True)
def in_fp64() -> object:
    """So that only rounding of 1e-16 is left between a layer and its formula."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def video(*shape: int, seed: int = 1) -> Tensor:
    return some(*(shape or (2, 6, 5, 4, 4)), seed=seed).double()


def test_a_list_of_layers_says_what_fits() -> None:
    layers = " residual, compress_space:64,consecutive_residual:2,compress_time ,compress_space"
    assert parse_layers(layers)[1:4] == [("compress_space", 64), ("consecutive_residual", 2), ("compress_time", None)]
    config = VideoTokenizerConfig(layers=layers)
    assert (frames_per_code(config), pixels_per_code(config)) == (2, 4)
    assert pixels_per_code(dataclasses.replace(config, patch_size=2)) == 8
    with pytest.raises(ValueError, match=r"^width 3 must be a multiple of 4, .*; use 4 or 8$"):
        check_side("width", 3, 4)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("pad_mode", ["constant", "reflect", "replicate"])
def test_a_causal_convolution_is_a_sum_over_the_frames_before(stride: int, pad_mode: str) -> None:
    conv = CausalConv3d(3, 4, (3, 3, 3), stride=(stride, 1, 1), pad_mode=pad_mode)
    x = video(2, 3, 5, 4, 4)
    out = conv(x, WHOLE)
    assert out.shape == (2, 4, 1 + 4 // stride, 4, 4)
    padded = F.pad(x, (1, 1, 1, 1, 0, 0), mode=pad_mode)
    for j, frame in enumerate(out.unbind(2)):
        terms = [F.conv2d(padded[:, :, stride * j - age], conv.weight[:, :, 2 - age]) for age in range(3)]
        expected = sum(terms[: stride * j + 1]) + conv.bias[:, None, None]  # type: ignore[index]
        torch.testing.assert_close(frame, expected)


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
@pytest.mark.parametrize(("height", "width"), [(0, 2), (1, 3), (3, 3)])
def test_edges_and_their_gradients_are_those_of_pytorch(mode: str, height: int, width: int) -> None:
    x = video(2, 3, 2, 4, 5).requires_grad_()
    ours = pad_space(x, height, width, "zeros" if mode == "constant" else mode)
    theirs = F.pad(x, (width, width, height, height, 0, 0), mode=mode)
    assert torch.equal(ours, theirs)
    loss = video(*ours.shape, seed=2)
    gradients = (torch.autograd.grad((out * loss).sum(), x)[0] for out in (ours, theirs))
    torch.testing.assert_close(*gradients)


def test_new_pixels_and_frames_start_equal() -> None:
    fresh = SpaceUp(3, 5)(video(2, 3, 4, 2, 2), WHOLE)
    torch.testing.assert_close(fresh, fresh[..., ::2, ::2].repeat_interleave(2, dim=3).repeat_interleave(2, dim=4))
    fresh = TimeUp(3, 5)(video(2, 3, 4, 2, 2), WHOLE)
    torch.testing.assert_close(fresh[:, :, 1::2], fresh[:, :, 2::2])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["haar", "pixels"])
def test_patches_lose_nothing_and_keep_the_energy(kind: str, size: int) -> None:
    whole_numbers = torch.randint(0, 256, (2, 3, 2, 8, 4)).float()
    patches = to_patches(whole_numbers, size, kind)
    assert patches.shape == (2, 3 * size**2, 2, 8 // size, 4 // size)
    assert torch.equal(from_patches(patches, size, kind), whole_numbers)
    torch.testing.assert_close(patches.square().sum(), whole_numbers.square().sum())


def test_haar_is_the_transform_of_the_four_pixels() -> None:
    a, b, c, d = 1.0, 2.0, 4.0, 8.0
    x = torch.tensor([[a, b], [c, d]]).view(1, 1, 1, 2, 2)
    expected = torch.tensor([a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d]) / 2
    assert torch.equal(to_patches(x, 2, "haar").flatten(), expected)
    flat = to_patches(torch.ones(1, 3, 1, 8, 8), 4, "haar")
    assert torch.equal(flat[:, :3], torch.full((1, 3, 1, 2, 2), 4.0)) and not flat[:, 3:].any()


@pytest.mark.parametrize("norm", ["none", "rms"])
def test_a_residual_unit_is_what_its_norm_says(norm: str) -> None:
    unit, x = ResidualUnit(6, (3, 3, 3), norm), video()  # the gate starts as 1
    if norm == "none":
        expected = x + F.elu(unit.mix(F.elu(unit.conv(x, WHOLE))))
    else:
        first, second = unit.norms
        expected = x + unit.mix(F.silu(second(unit.conv(F.silu(first(x)), WHOLE))))
    torch.testing.assert_close(unit(x, WHOLE), expected)


@pytest.mark.parametrize("window", [None, 2])
def test_along_time_a_frame_sees_the_memories_and_the_last_frames_up_to_itself(window: int | None) -> None:
    attention = MemoryAttention(6, heads=2, dim_head=3, is_causal=True, window=window)
    tokens = video(3, 5, 6)
    out = attention(tokens, WHOLE)
    q, k, v = attention.to_qkv(tokens).view(3, 5, 3, 2, 3).permute(2, 0, 3, 1, 4)
    for n, t in itertools.product(range(3), range(5)):
        heads = []
        first = 0 if window is None else max(t - window + 1, 0)
        for head in range(2):
            keys, values = (
                torch.cat([memory[head], rows[n, head, first : t + 1]])
                for memory, rows in zip(attention.memory, (k, v), strict=True)
            )
            heads.append((keys @ q[n, head, t] / math.sqrt(3)).softmax(dim=0) @ values)
        torch.testing.assert_close(out[n, t], attention.to_out(torch.cat(heads)))


def test_a_gain_says_how_much_of_earlier_frames_is_seen() -> None:
    """With 0 nothing of them is; between 0 and 1, in attention and in the recurrence, the result is between the two."""
    for layer in (AttentionBlock(6, MemoryAttention(6, 2, 3, is_causal=True), "time"), GateLoop(6)):
        x, gains = video(), [p for name, p in layer.named_parameters() if name.endswith("past_gain")]
        with torch.no_grad():
            for gain in gains:
                gain.zero_()
            alone = layer(x, WHOLE)
            for t in range(x.shape[2]):
                torch.testing.assert_close(alone[:, :, t : t + 1], layer(x[:, :, t : t + 1], WHOLE))
    for layer, x in ((MemoryAttention(6, 2, 3, is_causal=True), video(3, 5, 6)), (GateLoop(6), video())):
        results = []
        for value in (0.0, 0.25, 1.0):
            nn.init.constant_(layer.past_gain, value)
            results.append(layer(x, WHOLE).detach())
        torch.testing.assert_close(results[1], torch.lerp(results[0], results[2], 0.25))


def test_linear_attention_is_its_explicit_sum() -> None:
    attention, tokens = TaylorAttention(6, heads=2, dim_head=3), video(3, 5, 6)
    q, k, v = attention.to_qkv(tokens).view(3, 5, 3, 2, 3).permute(2, 0, 3, 1, 4)
    products = q @ k.transpose(-1, -2) / math.sqrt(3)
    weights = 1 + products + products.square() / 2
    expected = (weights / weights.sum(dim=-1, keepdim=True)) @ v
    torch.testing.assert_close(attention(tokens, WHOLE), attention.to_out(expected.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("along", ["space", "time"])
def test_attention_mixes_positions_along_one_axis(along: str) -> None:
    attention = MemoryAttention(6, heads=2, dim_head=3, is_causal=along == "time")
    layer, x = AttentionBlock(6, attention, along), video(1, 6, 4, 3, 3).requires_grad_()
    out = layer(x, WHOLE)
    (gradient,) = torch.autograd.grad(out[:, :, 2, 1, 1].sum(), x)
    seen = gradient.abs().sum(dim=(0, 1)) > 0
    expected = torch.zeros(4, 3, 3, dtype=torch.bool)
    if along == "space":
        expected[2] = True
    else:
        expected[:3, 1, 1] = True
    assert torch.equal(seen, expected)


def test_a_token_takes_half_of_its_channels_from_the_frame_before() -> None:
    shift, x = AttentionBlock(6, MemoryAttention(6, 1, 2, is_causal=True), "time").shifts[0], video()
    out = shift(x, WHOLE)
    assert torch.equal(out[:, :3], x[:, :3]) and torch.equal(out[:, 3:, 1:], x[:, 3:, :-1])
    assert not out[:, 3:, 0].any()


def test_with_constant_gates_the_recurrence_is_a_geometric_sum() -> None:
    layer, x, rate = GateLoop(6), video(), 0.7
    with torch.no_grad():
        layer.to_qva.weight[12:] = 0
    layer.to_qva.register_parameter("bias", nn.Parameter(torch.zeros(18)))
    with torch.no_grad():
        layer.to_qva.bias[12:] = math.log(rate / (1 - rate))  # type: ignore[index]
    q, v, _ = layer.to_qva(layer.norm(x)).chunk(3, dim=1)
    for t in range(5):
        state = sum(rate ** (t - s) * v[:, :, s] for s in range(t + 1))
        torch.testing.assert_close(layer(x, WHOLE)[:, :, t], x[:, :, t] + q[:, :, t] * state)


def test_an_adaptive_norm_modulates_frame_f_by_latent_f_over_s_rounded_up() -> None:
    layer, x, z = AdaptiveNorm(6, 2, frames=4, pixels=2), video(2, 6, 9, 4, 4), video(2, 2, 3, 2, 2)
    context = Context(latents=z)
    torch.testing.assert_close(layer(x, context), layer.norm(x))
    nn.init.normal_(layer.modulate.weight)
    nn.init.normal_(layer.modulate.bias)  # type: ignore[arg-type]
    for f in range(9):
        latent = z[:, :, math.ceil(f / 4)].repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
        gain, shift = layer.modulate(latent.unsqueeze(2)).squeeze(2).chunk(2, dim=1)
        expected = layer.norm(x)[:, :, f] * (1 + gain) + shift
        torch.testing.assert_close(layer(x, context)[:, :, f], expected)
