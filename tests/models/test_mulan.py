"""MuLan: what its outputs depend on. What is true of other models too is in test_every_model.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.config.models.mulan import MuLaNConfig
from tandem.models import MuLaN
from tandem.models.audio_text.audio_transformer import AudioTransformer
from tandem.models.layers.attention import l2_normalize
from tests.models.helpers import MULAN, MUSICLM, some_pairs


def small(seed: int = 0, **overrides: Any) -> MuLaN:
    torch.manual_seed(seed)
    return MuLaN.from_dict({**MULAN, **overrides})


def test_text_does_not_depend_on_its_padding() -> None:
    model = small()
    pairs = some_pairs(model)
    tokens, lengths = pairs["tokens"], pairs["lengths"]
    expected = model.encode_text(tokens, lengths)
    garbage = tokens.clone()
    for row, length in enumerate(lengths):
        garbage[row, length:] = torch.tensor([-1, 10**6, 3])[torch.arange(8 - length) % 3]
    assert torch.equal(model.encode_text(garbage, lengths), expected)
    for columns in (6, 10):  # fewer, but all that count; more
        other = F.pad(tokens, (0, max(0, columns - 8)), value=5)[:, :columns]
        torch.testing.assert_close(model.encode_text(other, lengths), expected, atol=5e-6, rtol=0)
    for place in range(4):  # ... and on each token that counts
        changed = tokens.clone()
        changed[2, place] = (changed[2, place] + 1) % 40
        assert (model.encode_text(changed, lengths)[2] - expected[2]).abs().max() > 1e-4


def seen_patches(tower: AudioTransformer, spectrograms: Tensor, noise: Tensor | None) -> Tensor:
    """(b, n, p x p), as they enter the embedding."""
    seen: list[Tensor] = []
    hook = tower.embed.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    tower(spectrograms, noise)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize(("dropout", "kept"), [(0.0, 12), (0.25, 9), (0.3, 9), (0.99, 1)])
def test_each_sample_keeps_the_patches_of_its_own_smallest_noise(dropout: float, kept: int) -> None:
    tower = AudioTransformer(MuLaNConfig(audio_dim=8, audio_depth=1, patch_size=4, patch_dropout=dropout))
    spectrograms, noise = torch.randn(50, 12, 16), torch.rand(50, 12)
    every, seen = seen_patches(tower, spectrograms, None), seen_patches(tower, spectrograms, noise)
    assert seen.shape == (50, kept, 16) and tower.num_kept(12) == kept
    chosen = (seen[:, :, None] == every[:, None]).all(dim=-1).any(dim=1)  # bool (b, 12)
    assert torch.equal(chosen, noise <= noise.sort(dim=1).values[:, kept - 1, None])
    assert dropout == 0 or len(chosen.unique(dim=0)) > 5, "all samples dropped the same"


@pytest.mark.parametrize("sizes", [{}, MUSICLM], ids=["tandem", "musiclm"])
def test_noise_alone_masks_and_drops_patches_even_in_training(sizes: dict[str, Any]) -> None:
    model = small(**sizes).train()
    pairs = some_pairs(model)
    assert model.noise_size == 4 + 4 * 3
    plain = model(**{**pairs, "noise": None})
    assert torch.equal(plain.audio, model.eval()(**{**pairs, "noise": None}).audio)
    assert (plain.audio - model(**pairs).audio)[1:].abs().amax(dim=(1, 2)).min() > 1e-4


@pytest.mark.parametrize(("logit_scale", "upstream", "expected"), [
    (2.0, 1.0, math.exp(2)), (2.0, -1.0, -math.exp(2)), (4.7, 1.0, 100.0), (4.7, -1.0, 0.0),
    (4.6, -1.0, -math.exp(4.6)),
])  # fmt: skip
def test_a_clamped_temperature_has_no_gradient_on_its_way_up(
    logit_scale: float, upstream: float, expected: float
) -> None:
    model = small()
    model.logit_scale.data.fill_(logit_scale)
    (model(**some_pairs(model)).scale * upstream).sum().backward()
    torch.testing.assert_close(model.logit_scale.grad, torch.tensor([expected]))


def test_autocast_rounds_neither_spectrograms_nor_the_map_to_latents() -> None:
    """Nor does a model that is cast round spectrograms: it has no buffers."""
    model, features = small(), torch.randn(3, 1, 16)
    waveforms = some_pairs(model)["waveforms"]
    seen, latents = model.spectrogram(waveforms), model.audio_latents(features)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.spectrogram(waveforms), seen) and torch.equal(model.audio_latents(features), latents)
    assert torch.equal(model.bfloat16().spectrogram(waveforms), seen) and not list(model.buffers())


def test_a_vector_of_zeros_has_a_finite_gradient() -> None:
    zero = torch.zeros(1, 4, requires_grad=True)
    l2_normalize(zero).sum().backward()
    assert zero.grad is not None and zero.grad.isfinite().all()
