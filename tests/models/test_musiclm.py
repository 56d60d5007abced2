"""The MuLaN of musiclm-pytorch in training: what its outputs must not depend on. The outputs themselves are compared
with those of the public package in files/test_musiclm.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models import MusicLMMuLaN
from models.musiclm import compared_layers
from tests.models.helpers import assert_same_bits
from training.noise import Noise

# 65 bins x 51 frames: 4 x 3 patches.
SMALL: dict[str, Any] = {
    "clip_seconds": 0.15, "n_fft": 128, "win_length": 60, "hop_length": 48, "audio_dim": 16, "audio_depth": 3,
    "text_dim": 12, "text_depth": 2, "heads": 2, "dim_head": 4, "vocab_size": 40, "max_text_tokens": 10,
    "dim_latent": 6, "hierarchical_layers": 1, "sigmoid_contrastive_loss": True,
}  # fmt: skip


def small(**overrides: Any) -> MusicLMMuLaN:
    torch.manual_seed(0)
    return MusicLMMuLaN(**{**SMALL, **overrides})


def batch(model: MusicLMMuLaN, size: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Waveforms, of which the first is silent; tokens; lengths from 0 up; noise."""
    draws = torch.Generator().manual_seed(1)
    waveforms = torch.randn(size, model.clip_samples, generator=draws) * torch.arange(size)[:, None] / 10
    tokens = torch.randint(1, 40, (size, 8), generator=draws)
    return waveforms, tokens, torch.arange(size) * 4, torch.rand(size, model.noise_size, generator=draws)


def test_outputs_depend_neither_on_the_batch_around_them_nor_on_the_graph_nor_on_the_global_generator() -> None:
    model = small()
    inputs = batch(model)
    together = model(*inputs)
    assert together.audio.shape == together.text.shape == (3, 2, 6)
    torch.testing.assert_close(together.audio.norm(dim=-1), torch.ones(3, 2))
    for row in range(3):
        alone = model(*(part[row : row + 1] for part in inputs))
        torch.testing.assert_close(alone.audio[0], together.audio[row], rtol=0, atol=2e-6)
        torch.testing.assert_close(alone.text[0], together.text[row], rtol=0, atol=2e-6)
    with torch.no_grad():
        assert all(torch.equal(one, other) for one, other in zip(model(*inputs), together, strict=True))


def test_a_token_0_is_hidden_wherever_it_stands_and_what_is_beyond_the_length_too() -> None:
    model = small()
    tokens = torch.tensor([[5, 0, 7, 9, 0, 0], [5, 0, 7, 9, 3, 2]])
    assert torch.equal(*model.encode_text(tokens, torch.tensor([6, 4])))
    model.text.pos_emb.weight.data[1] += 1
    model.text.token_emb.weight.data[0] += 1
    assert torch.equal(*model.encode_text(tokens, torch.tensor([6, 4])))
    moved = model.encode_text(torch.tensor([[5, 7, 9]]), torch.tensor([3]))
    assert (moved - model.encode_text(tokens, torch.tensor([6, 4]))[:1]).abs().max() > 1e-3


def test_every_weight_has_a_finite_gradient_silence_and_an_empty_caption_included() -> None:
    model = small()
    out = model(*batch(model))
    (out.audio.sum() + out.text.sum() + out.scale.sum() + out.bias.sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_masks_and_patches_are_dropped_by_the_noise_alone() -> None:
    model = small()
    waveforms, tokens, lengths, noise = batch(model)
    assert model.noise_size == 4 + 4 * 3
    plain, dropped = (model(waveforms, tokens, lengths, given).audio for given in (None, noise))
    assert (plain - dropped)[1:].abs().amax(dim=(1, 2)).min() > 1e-4
    with pytest.raises(ValueError, match=r"noise of shape \(3, 3\)"):
        model(waveforms, tokens, lengths, noise[:, :3])


@pytest.mark.parametrize("share", ["attn_dropout", "ff_dropout"])
def test_each_tower_drops_by_the_key_of_a_pair_alone_and_nothing_without_keys(share: str) -> None:
    model, keys = small(**{share: 0.5}), Noise(0, "dropout").keys(0, [0, 1, 2])
    assert model.drops and not small().drops
    plain, dropped, whole = model(*batch(model)), model(*batch(model), keys), small()(*batch(model), keys)
    for tower in ("audio", "text"):
        assert torch.equal(getattr(plain, tower), getattr(whole, tower))
        assert (getattr(plain, tower) - getattr(dropped, tower)).abs().amax(dim=(1, 2)).min() > 1e-4
        alone = getattr(model(*(part[2:] for part in batch(model)), keys[2:]), tower)
        torch.testing.assert_close(alone[0], getattr(dropped, tower)[2], rtol=0, atol=2e-6)


def test_towers_have_heads_of_their_own_and_a_common_width_of_feed_forwards() -> None:
    model = small(audio_heads=3, text_dim_head=6, ff_mult=2)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert shapes["audio.transformer.layers.0.0.to_q.weight"] == (3 * 4, 16)
    assert shapes["audio.dynamic_pos_bias_mlp.4.weight"] == (3, 4)
    assert shapes["text.transformer.layers.0.0.to_kv.weight"] == (2 * 2 * 6, 12)
    assert shapes["text.transformer.layers.1.1.4.weight"] == (12, 2 * 2 * 12 // 3)
    model(*batch(model))


def test_temperature_and_bias_of_each_output_are_those_of_its_loss() -> None:
    model = small(audio_depth=4, text_depth=4, hierarchical_layers=3)
    model.multi_layer_contrastive_learning.contrast.temperatures.data.view(-1)[:] = torch.tensor([1.0, 2.0, 9.0])
    model.multi_layer_contrastive_learning.contrast.bias.data.view(-1)[:] = torch.tensor([1.0, 2.0, 3.0])
    out = model(*batch(model))
    # The final one, then the highest layer first; the temperature of 9 is clamped at ln 100.
    torch.testing.assert_close(out.scale, torch.tensor([10.0, 100.0, 2.0, 1.0]).where(
        torch.tensor([True, True, False, False]), torch.tensor([0.0, 0.0, 2.0, 1.0]).exp()))  # fmt: skip
    assert out.bias.tolist() == [-10.0, 3.0, 2.0, 1.0]
    plain = small(sigmoid_contrastive_loss=False, init_bias=-3.0)
    assert plain(*batch(plain)).bias.tolist() == [-3.0, -3.0]
    assert not [name for name, _ in plain.named_parameters() if name.endswith("contrast.bias")]


def test_compared_layers_are_spaced_evenly_from_the_first_one_on() -> None:
    """Facts of the public package, for towers of 6 and 12 layers; with 22 of 26, fp32 rounds one of them down."""
    assert compared_layers(5, 6) == [0, 1, 2, 3, 4] and compared_layers(2, 6) == [0, 3]
    assert compared_layers(5, 12) == [0, 2, 4, 7, 9] and compared_layers(0, 6) == []
    assert compared_layers(22, 26) != [index * 26 // 22 for index in range(22)]


def test_a_compiled_model_is_traced_once() -> None:
    torch._dynamo.reset()
    model = small()
    model.compile(backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            for ours, expected in zip(model(*batch(model)), small()(*batch(model)), strict=True):
                torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_outputs_stay_in_fp32_and_near(dtype: torch.dtype) -> None:
    model = small()
    expected = model(*batch(model))
    with torch.autocast("cpu", dtype):
        out = model(*batch(model))
    for ours, exact in zip(out, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, exact, rtol=0, atol=0.1)


def test_recomputed_layers_give_the_same_gradients() -> None:
    gradients = []
    for recompute in (False, True):
        model = small(gradient_checkpointing=recompute)
        out = model(*batch(model))
        (out.audio.sum() + out.text.sum()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_same_bits(*gradients)


@pytest.mark.parametrize("samples", [0, 10, 63, 1000, 20011])
def test_a_clip_of_any_length_is_encoded(samples: int) -> None:
    latents = small().encode_audio(torch.stack([torch.zeros(samples), torch.rand(samples)]))
    assert latents.shape == (2, 6) and latents.isfinite().all()


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"audio_dim": 4}, "audio_dim 4 is no multiple of 4 of at least 8"),
        ({"audio_dim": 18}, "audio_dim 18 is no multiple of 4 of at least 8"),
        ({"hierarchical_layers": 2}, "hierarchical_layers 2: a tower of 2 layers has 1 below"),
        ({"patch_size": 66}, "patch_size 66 is larger than the 65 bands"),
        ({"win_length": 129}, "win_length 129 is not between 1 and n_fft 128"),
        ({"clip_seconds": 1e12}, "a clip of clip_seconds 1e\\+12 .* takes more than"),
        ({"heads": 0}, "heads 0 is not a whole number of at least 1"),
    ],
)
def test_arguments_that_cannot_be_are_refused(sizes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        small(**sizes)
